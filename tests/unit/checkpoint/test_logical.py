from __future__ import annotations

import dataclasses

import pytest
import torch

from nep.checkpoint.logical import logical_rows, logical_shape, put, take
from nep.moe.weights import logical_names, split_experts
from nep.planning.layout import LineKind
from nep.planning.shapes import parameter_lines, preset

SHAPE = dataclasses.replace(preset("debug-fine"), ffn_hidden_size=12, neuron_block=3, hidden_size=8)
LINES = parameter_lines(SHAPE)


@pytest.mark.parametrize("name", LINES)
def test_names_and_rows_are_those_of_weight_files(name: str) -> None:
    line = LINES[name]
    tensor = torch.arange(line.num_units * line.unit_numel, dtype=torch.float64).view(line.shape)
    expected = split_experts(name, tensor, SHAPE)
    found = {
        rows.name: take(tensor[rows.unit_lo : rows.unit_hi], rows)
        for rows in logical_rows(name, line, 0, line.num_units)
    }
    assert tuple(found) == logical_names(name, SHAPE)
    for key, rows in found.items():
        assert torch.equal(rows.reshape(expected[key].shape), expected[key]), key


@pytest.mark.parametrize("name", [name for name, line in LINES.items() if line.num_units > 3])
def test_any_interval_is_taken_and_put_back(name: str) -> None:
    line = LINES[name]
    tensor = torch.arange(line.num_units * line.unit_numel, dtype=torch.float64).view(line.shape)
    for lo, hi in ((0, 1), (1, 3), (2, line.num_units), (line.num_units - 1, line.num_units)):
        again = torch.zeros(hi - lo, *line.unit_shape, dtype=torch.float64)
        for rows in logical_rows(name, line, lo, hi):
            values = take(tensor[rows.unit_lo : rows.unit_hi], rows)
            assert len(values) == rows.hi - rows.lo
            put(again[rows.unit_lo - lo : rows.unit_hi - lo], rows, values)
        assert torch.equal(again, tensor[lo:hi])


def test_a_shape_without_blocks() -> None:
    other = parameter_lines(dataclasses.replace(SHAPE, neuron_block=4))
    for name, line in LINES.items():
        assert logical_shape(name, line) == logical_shape(name, other[name])
        if line.kind is LineKind.EXPERTS:
            assert logical_shape(name, line)[:2] == (SHAPE.num_experts, SHAPE.ffn_hidden_size)
