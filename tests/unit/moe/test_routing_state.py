"""Biases against the load, counts of the last step, and bytes for a slot that has none."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nep.moe.routing_state import RoutingState
from nep.planning.shapes import parameter_lines, preset

SHAPE = dataclasses.replace(preset("debug-fine"), num_experts=4, top_k=2)


def state_of(dtype: torch.dtype = torch.float32) -> RoutingState:
    return RoutingState.initial(parameter_lines(SHAPE), dtype)


def test_it_begins_with_nothing() -> None:
    state = state_of(torch.bfloat16)
    assert state.bias_le.shape == state.counts_le.shape == (2, 4)
    assert state.bias_le.dtype == torch.float32 and not state.bias_le.any() and not state.counts_le.any()
    assert state_of(torch.float64).bias_le.dtype == torch.float64


def test_each_bias_goes_against_its_load() -> None:
    state = state_of()
    row = state.bias_le[1]  # what a layer keeps
    counts_le = torch.tensor([[5, 5, 5, 5], [2, 4, 6, 4]])
    state.commit(counts_le, 0.25)
    state.commit(counts_le, 0.25)
    assert state.bias_le.tolist() == [[0.0] * 4, [0.5, 0.0, -0.5, 0.0]]
    assert torch.equal(row, state.bias_le[1])
    assert torch.equal(state.counts_le, counts_le)
    counts_le[0, 0] = 9
    assert state.counts_le[0, 0] == 5, "the state shares memory with what was counted"


def test_the_mean_is_not_rounded() -> None:
    """A load one above a mean near 2 ** 53 / 4 is above it; in floating point it might be equal."""
    state = state_of()
    big = 2**51
    state.commit(torch.tensor([[big, big, big, big + 1]] * 2), 1.0)
    assert state.bias_le[0].tolist() == [1.0, 1.0, 1.0, -1.0]


def test_a_rate_of_zero_leaves_biases_alone() -> None:
    state = state_of()
    state.commit(torch.tensor([[1, 2, 3, 4]] * 2), 0.0)
    assert not state.bias_le.any() and state.counts_le.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_there_and_back(dtype: torch.dtype) -> None:
    state, other = state_of(dtype), state_of(dtype)
    state.commit(torch.tensor([[1, 2, 3, 4], [9, 0, 0, 1]]), 0.001)
    other.load(state.to_bytes())
    assert torch.equal(other.bias_le, state.bias_le) and torch.equal(other.counts_le, state.counts_le)
    assert other.to_bytes() == state.to_bytes()


def test_the_state_of_another_model_is_refused() -> None:
    other = RoutingState.initial(parameter_lines(preset("debug-fine")), torch.float32)
    with pytest.raises(ValueError, match=r"not that of \(2, 4\) layers and experts"):
        state_of().load(other.to_bytes())


def test_biases_may_aim_at_uneven_loads() -> None:
    lines = parameter_lines(preset("debug"))
    even, weighted, slow = (RoutingState.initial(lines, torch.float64) for _ in range(3))
    counts = torch.randint(0, 50, even.counts_le.shape, generator=torch.Generator().manual_seed(0))
    even.commit(counts, 0.5)
    weighted.commit(counts, 0.5, torch.full_like(counts, 7))
    assert torch.equal(even.bias_le, weighted.bias_le) and even.bias_le.any()
    same = torch.full_like(counts, 30)
    weights = torch.full_like(counts, 1_000_000)
    weights[:, 2] = 600_000
    slow.commit(same, 0.5, weights)
    assert (slow.bias_le[:, 2] == -0.5).all() and (slow.bias_le[:, :2] == 0.5).all()
