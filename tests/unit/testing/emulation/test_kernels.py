"""Prices of kernels: operations over speed on an ideal accelerator, and what tiles, waves and memory add."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.workload import Workload
from nep.planning.shapes import ModelShape, parameter_lines, preset
from nep.testing.emulation.kernels import KernelSeconds

FLOPS = 1e12
IDEAL = HardwareProfile(name="ideal", flops_per_s={2: FLOPS})
SHAPE = preset("mixtral-1b")
SEQ_LEN = 1024


def _kernels(hardware: HardwareProfile = IDEAL, shape: ModelShape = SHAPE) -> KernelSeconds:
    return KernelSeconds(shape, Workload(global_batch_size=1, micro_batch_size=1, seq_len=SEQ_LEN), hardware)


def test_forward_is_two_operations_per_active_parameter_and_token_and_backward_twice_that() -> None:
    kernels, tokens = _kernels(), float(SEQ_LEN)
    attention = kernels.attention(tokens, tokens, SHAPE.num_heads, SHAPE.num_kv_heads)
    experts = kernels.experts([tokens / 4] * 8, [SHAPE.ffn_hidden_size] * 8)
    router, head = kernels.router(tokens), kernels.head(tokens, tokens, SHAPE.vocab_size)
    forward = SHAPE.num_layers * (attention.forward + experts.forward + router.forward) + head.forward
    backward = SHAPE.num_layers * (attention.backward + experts.backward + router.backward) + head.backward
    norms = sum(line.num_units * line.unit_numel for line in parameter_lines(SHAPE).values() if line.init_std is None)
    looked_up = SHAPE.vocab_size * SHAPE.hidden_size  # the embedding is no product
    weights = 2 * (SHAPE.num_active_parameters - norms - looked_up) * tokens
    # Scores and values: 4 operations per channel of all heads and pair of tokens, half of the pairs.
    pairs = SHAPE.num_layers * 4 * SHAPE.num_heads * SHAPE.head_dim * tokens * (tokens + 1) / 2
    assert forward * FLOPS == pytest.approx(weights + pairs, rel=1e-9)
    assert backward * FLOPS == pytest.approx(2 * weights + 2.5 * pairs, rel=1e-9)


def test_rows_cost_in_proportion_and_nothing_costs_nothing() -> None:
    kernels = _kernels()
    once, twice = kernels.experts([100.0], [256]), kernels.experts([200.0], [256])
    assert twice.forward == pytest.approx(2 * once.forward)
    assert kernels.experts([50.0, 50.0], [256, 256]).forward == pytest.approx(once.forward)
    assert kernels.experts([0.0, 100.0], [256, 0]) == (0.0, 0.0)
    assert kernels.attention(0.0, 0.0, 0, 0) == (0.0, 0.0)


def test_a_window_limits_the_keys() -> None:
    whole, window = (_kernels(shape=replace(SHAPE, sliding_window=size)) for size in (None, 16))
    assert window.attention(8.0, 8.0, 4, 1).forward < whole.attention(8.0, 8.0, 4, 1).forward


def test_products_round_up_to_tiles_and_to_waves_over_processors() -> None:
    tiled = _kernels(replace(IDEAL, tile_rows=128, tile_columns=64))
    assert tiled.experts([1.0], [64]).forward == pytest.approx(tiled.experts([128.0], [64]).forward)
    # Up and gate are 128 columns: [130, d] x [d, 128] has 2 x 2 tiles; down is [130, 64] x [64, d].
    d = SHAPE.hidden_size
    ideal = 2 * 256 * d * (128 + 64) / FLOPS
    assert tiled.experts([130.0], [64]).forward == pytest.approx(ideal)
    waves = _kernels(replace(IDEAL, tile_rows=128, tile_columns=64, processors=3))
    rounds = 3 * math.ceil(4 / 3) * 128 * 64 * d + 3 * math.ceil(2 * d / 64 / 3) * 128 * 64 * 64
    assert waves.experts([130.0], [64]).forward == pytest.approx(2 * rounds / FLOPS)


def test_small_products_wait_for_memory() -> None:
    slow = _kernels(replace(IDEAL, memory_bytes_per_s=1e9))
    read = 3 * 256 * SHAPE.hidden_size * 2 / 1e9
    assert slow.experts([1.0], [256]).forward > read
    assert slow.optimizer(100, 10) == pytest.approx((9 * 100 + 8 * 10) * 4 / 1e9)
    assert _kernels().optimizer(100, 10) == 0.0 == _kernels().packing(1e6)


def test_time_on_the_host_cannot_be_emulated() -> None:
    with pytest.raises(ValueError, match="launch_s"):
        _kernels(replace(IDEAL, launch_s=1e-6))
