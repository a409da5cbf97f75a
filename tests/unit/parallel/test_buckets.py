"""Which layers' gradients travel together."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st

from nep.parallel.grad_sync import layer_groups
from nep.planning.shapes import parameter_lines, preset

SHAPE = dataclasses.replace(preset("debug"), num_layers=4)
LINES = parameter_lines(SHAPE)
LAYERS = list(range(-1, SHAPE.num_layers + 1))
BYTES = {
    layer: sum(4 * line.num_units * line.unit_numel for line in LINES.values() if line.layer == layer)
    for layer in LAYERS
}


def test_layers_stay_apart_if_nobody_asks() -> None:
    assert layer_groups(LINES, torch.float32, 0) == [[layer] for layer in LAYERS]


def test_narrow_parameters_have_wide_gradients() -> None:
    size = BYTES[3] + BYTES[4]
    assert layer_groups(LINES, torch.bfloat16, size) == layer_groups(LINES, torch.float32, size)
    assert layer_groups(LINES, torch.float32, size)[-1] == [3, 4]


@given(smallest=st.integers(0, 2 * sum(BYTES.values())))
def test_groups_are_filled_from_the_back_and_none_is_small(smallest: int) -> None:
    groups = layer_groups(LINES, torch.float32, smallest)
    assert [layer for group in groups for layer in group] == LAYERS
    sizes = [sum(BYTES[layer] for layer in group) for group in groups]
    assert min(sizes) >= smallest or len(groups) == 1
    for group, size in zip(groups[1:], sizes[1:], strict=True):
        assert len(group) == 1 or size - BYTES[group[0]] < smallest, "its sums could have started a layer earlier"


def test_layers_of_real_models_are_large_enough() -> None:
    lines = parameter_lines(preset("mixtral-1b"))
    num_layers = preset("mixtral-1b").num_layers
    assert layer_groups(lines, torch.bfloat16, 1 << 20) == [[layer] for layer in range(-1, num_layers + 1)]
