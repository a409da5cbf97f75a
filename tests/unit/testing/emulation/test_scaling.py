"""What the small model's sizes stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nep.planning.cluster import Cluster
from nep.planning.cost.workload import Workload
from nep.planning.layout import axis_lines
from nep.planning.planner import plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from nep.testing.emulation.cases import FINE_GRAINED, MIXTRAL_LIKE
from nep.testing.emulation.scaling import Scale
from nep.testing.emulation.sizes import BucketSizes

WORKLOAD = Workload(global_batch_size=8, micro_batch_size=1, seq_len=4096)


@pytest.mark.parametrize("shape", [MIXTRAL_LIKE, FINE_GRAINED], ids=lambda shape: shape.name)
def test_the_small_model_has_the_same_units_and_elements_count_for_the_full_ones(shape) -> None:
    scale = Scale.of(shape, WORKLOAD)
    small, full = (axis_lines(parameter_lines(one)) for one in (scale.small, shape))
    assert {axis: line.num_units for axis, line in small.items()} == {a: line.num_units for a, line in full.items()}
    assert scale.small.num_parameters * scale.elements == pytest.approx(shape.num_parameters, rel=0.01)
    assert scale.small.num_parameters < shape.num_parameters / 1000
    assert scale.tokens * scale.seq_len == WORKLOAD.seq_len


def test_a_large_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size \(32000\)"):
        Scale.of(replace(preset("mixtral-8x7b"), num_layers=2), WORKLOAD)


def test_rows_of_a_dispatch_are_a_token_wide_whatever_comes_with_them() -> None:
    scale = Scale.of(MIXTRAL_LIKE, WORKLOAD)
    narrow, extra = scale.small.hidden_size * 2, MIXTRAL_LIKE.top_k * (4 + 4)
    rows = torch.empty(3, narrow + extra, dtype=torch.uint8)
    assert scale.row_bytes(rows) == scale.tokens * (MIXTRAL_LIKE.hidden_size * 2 + extra)
    stream = torch.empty(3, scale.small.hidden_size, dtype=torch.bfloat16)
    assert scale.row_bytes(stream) == scale.tokens * MIXTRAL_LIKE.hidden_size * 2
    assert scale.row_bytes(torch.empty(5)) == scale.tokens * 4


def test_messages_of_buckets_are_known_exactly() -> None:
    shape = MIXTRAL_LIKE
    scale = Scale.of(shape, WORKLOAD)
    small, full = parameter_lines(scale.small), parameter_lines(shape)
    plan = plan_from_scratch(Cluster.uniform(4, 2), full, num_replicas=2, global_batch_size=8)
    same = BucketSizes(plan, 1, full, full)
    scaled = BucketSizes(plan, 1, small, full)
    known = list(scaled._full.values())
    assert known, "no bucket at all"
    for messages in known:
        assert same.full(messages.sends, messages.receives) == messages
    assert scaled.full({0: 10**9}, {}) is None
