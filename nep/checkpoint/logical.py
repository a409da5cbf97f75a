"""Rows of logical tensors: how intervals of a line are named in files, whatever the layout and the block size was.

A checkpoint holds tensors as weight files do (`nep.moe.weights`): one for each expert's gate, up and down, a neuron a
row. An interval of units is a run of rows in each of the logical tensors that it touches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nep.planning.layout import Line

_EXPERT_PARTS = {"w13": ("gate", "up"), "w2": ("down",)}


class Rows(NamedTuple):
    """Rows `[lo, hi)` of the logical tensor `name`: units `[unit_lo, unit_hi)` of a line.

    `part` says which of several tensors that share a unit it is (gate or up), or -1 if units are not neurons of an
    expert.
    """

    name: str
    lo: int
    hi: int
    unit_lo: int
    unit_hi: int
    part: int


def logical_rows(name: str, line: Line, lo: int, hi: int) -> list[Rows]:
    """What units `[lo, hi)` of a parameter are in files, in the order of the line."""
    size = line.units_per_expert
    if size is None:
        return [Rows(name, lo, hi, lo, hi, -1)]
    prefix, _, attribute = name.rpartition(".")
    parts, block = _parts(attribute, line)
    found = []
    for expert in range(lo // size, -(-hi // size)):
        first = expert * size
        a, b = max(lo, first), min(hi, first + size)
        for index, part in enumerate(parts):
            rows = (a - first) * block, (b - first) * block
            found.append(Rows(f"{prefix}.{expert}.{part}", *rows, a, b, index if attribute in _EXPERT_PARTS else -1))
    return found


def logical_shape(name: str, line: Line) -> tuple[int, ...]:
    """Shape of a parameter without its cut into units: (experts, neurons, ...) for experts, else that of the line."""
    if line.units_per_expert is None:
        return line.shape
    _, block = _parts(name.rpartition(".")[2], line)
    num_experts = line.num_units // line.units_per_expert
    return num_experts, line.units_per_expert * block, line.unit_numel // block


def take(units: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The rows, from a tensor of exactly their units `[unit_hi - unit_lo, *unit_shape]`."""
    if rows.part < 0:
        return units
    if units.dim() == 4:  # w13: gate and up lie side by side in a unit
        units = units[:, rows.part]
    return units.flatten(0, 1)


def put(units: torch.Tensor, rows: Rows, values: torch.Tensor) -> None:
    """The inverse of `take`: write the rows into a tensor of exactly their units."""
    if rows.part >= 0 and units.dim() == 4:
        units = units[:, rows.part]
    units.copy_(values.view(units.shape))


def _parts(attribute: str, line: Line) -> tuple[tuple[str, ...], int]:
    """Names of an expert's tensors in a line of experts, and how many of their rows are in one unit."""
    parts = _EXPERT_PARTS.get(attribute)
    if parts is None:
        return (attribute,), 1
    return parts, line.unit_shape[-2]
