"""A small measured job: its storages are those that the planner foretells, before and after a slot was killed."""

from dataclasses import replace
from pathlib import Path

import pytest

from nep.testing.memory_bench.cases import CASES
from nep.testing.memory_bench.counting import find_compiler
from nep.testing.memory_bench.jobs import measure

_PERSISTENT = (
    "parameters",
    "gradients",
    "master",
    "moments",
    "sums",
    "mirrored master",
    "mirrored moments",
    "mirrored sums",
)


@pytest.mark.skipif(find_compiler() is None, reason="counting storages needs a C++ compiler")
@pytest.mark.timeout(240)
def test_a_damaged_job_holds_what_its_plan_says(tmp_path: Path) -> None:
    case = replace(CASES[0], num_slots=3, replicas=1, num_layers=1, global_batch_size=3, seq_len=64)
    found = measure(case, tmp_path, timeout_s=100.0)
    assert [one.slot for one in found] == [0, 1]
    for one in found:
        for kind in _PERSISTENT:
            assert one.healthy_kinds[kind] == one.predicted_healthy[kind] > 0, kind
            assert one.damaged_kinds[kind] == one.predicted_damaged[kind] > 0, kind
        assert all(ratio == pytest.approx(1.0, abs=0.05) for ratio in one.predictions)
        # Recovery, then new mirrors.
        assert len(one.changes) == 2
        assert all(ratio == pytest.approx(1.0, abs=0.05) for ratio in one.change_predictions)
        assert one.healthy < one.damaged < 1.1 * (one.healthy + one.more_to_hold)
        assert one.damaged < one.damaged_resident
