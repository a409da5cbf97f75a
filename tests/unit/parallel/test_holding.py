"""Tensors addressed by units: views are the units asked for, in an order both ends of a transfer share."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nep.parallel.holding import Holding, allocate
from nep.planning.layout import Interval, Layout, Line, LineKind, Lines

UNITS_PER_EXPERT, NUM_UNITS = 4, 24
LINES: Lines = {
    "w13": Line(
        kind=LineKind.EXPERTS,
        num_units=NUM_UNITS,
        unit_shape=(2, 3),
        axis="experts",
        layer=0,
        units_per_expert=UNITS_PER_EXPERT,
    ),
    "w2": Line(
        kind=LineKind.EXPERTS,
        num_units=NUM_UNITS,
        unit_shape=(5,),
        axis="experts",
        layer=0,
        units_per_expert=UNITS_PER_EXPERT,
    ),
    "norm": Line(kind=LineKind.WHOLE, num_units=1, unit_shape=(7,), axis="norm", layer=0),
}
NAMES = ("w13", "w2")


def holding_of(intervals: tuple[Interval, ...], num_fields: int) -> Holding:
    """A slot whose every element says (field, parameter, unit)."""
    layout = Layout({"experts": {3: intervals}})
    fields = [allocate(layout, 3, LINES, torch.float64) for _ in range(num_fields)]
    units = torch.tensor([unit for lo, hi in intervals for unit in range(lo, hi)], dtype=torch.float64)
    for number, field in enumerate(fields):
        for place, name in enumerate(NAMES):
            tensor = field[name]
            tensor += (1000 * number + 100 * place + units).reshape(-1, *[1] * (tensor.dim() - 1))
    return Holding(layout, 3, *fields)


# Storage order is any order of disjoint intervals; neighbours on the line may lie apart in storage.
storages = st.lists(st.integers(0, NUM_UNITS), min_size=2, max_size=8, unique=True).flatmap(
    lambda ends: st.lists(st.sampled_from(list(pairwise(sorted(ends)))), min_size=1, unique=True)
)


def test_allocation_has_every_parameter_also_those_without_units() -> None:
    layout = Layout({"experts": {0: ((0, 3), (20, 24)), 1: ((3, 20),)}})
    tensors = allocate(layout, 0, LINES, torch.bfloat16)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "w13": (7, 2, 3),
        "w2": (7, 5),
        "norm": (0, 7),
    }
    assert all(tensor.dtype == torch.bfloat16 and not tensor.any() for tensor in tensors.values())


@given(storage=storages, lo=st.integers(0, NUM_UNITS - 1), length=st.integers(1, NUM_UNITS), fields=st.integers(1, 3))
def test_views_are_the_units_asked_for_or_none(storage: list[Interval], lo: int, length: int, fields: int) -> None:
    intervals = tuple(storage)
    hi = min(lo + length, NUM_UNITS)
    held = {unit for start, stop in intervals for unit in range(start, stop)}
    views = holding_of(intervals, fields).views("experts", NAMES, lo, hi)
    if not set(range(lo, hi)) <= held:
        assert views is None
        return
    assert views is not None
    # Field after field; in it stretch after stretch, ascending; of each stretch parameter after parameter.
    seen: dict[int, dict[int, list[int]]] = {number: {place: [] for place in range(2)} for number in range(fields)}
    order = []
    for view in views:
        (number, rest) = divmod(int(view.flatten()[0]), 1000)
        place, first = divmod(rest, 100)
        units = [int(row.flatten()[0]) % 100 for row in view]
        assert all((row == row.flatten()[0]).all() for row in view)
        seen[number][place] += units
        order.append((number, first, place))
    assert order == sorted(order)
    assert all(units == list(range(lo, hi)) for by_place in seen.values() for units in by_place.values())


def test_views_share_memory() -> None:
    holding = holding_of(((8, 12), (1, 3)), 1)
    views = holding.views("experts", NAMES, 1, 3)
    assert views is not None
    for view in views:
        view.fill_(-1.0)
    assert [row[0, 0].item() for row in holding.fields[0]["w13"]] == [8, 9, 10, 11, -1, -1]
    assert [row[0].item() for row in holding.fields[0]["w2"]] == [108, 109, 110, 111, -1, -1]


@pytest.mark.parametrize(("lo", "hi"), [(0, 1), (7, 9), (11, 13), (1, 9)])
def test_units_that_are_not_all_here_have_no_views(lo: int, hi: int) -> None:
    assert holding_of(((8, 12), (1, 3)), 1).views("experts", NAMES, lo, hi) is None


def test_an_axis_that_the_slot_has_nothing_of_has_no_views() -> None:
    assert holding_of(((8, 12),), 1).views("norm", ["norm"], 0, 1) is None
