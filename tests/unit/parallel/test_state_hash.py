"""Hashes of units: sums that do not depend on the cut, and that every flipped bit changes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nep.fault_tolerance.bit_flip import flip_bit
from nep.parallel.state_hash import UnitHasher
from nep.planning.layout import Layout, Line, LineKind

UNITS = 12
LINES = {
    "a": Line(kind=LineKind.NEURONS, num_units=UNITS, unit_shape=(3, 5), axis="x", layer=0),
    "b": Line(kind=LineKind.NEURONS, num_units=UNITS, unit_shape=(), axis="x", layer=0),
    "wide": Line(kind=LineKind.WHOLE, num_units=1, unit_shape=(9001,), axis="w", layer=1),  # several blocks
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def whole(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(line.shape, generator=generator).to(dtype) for name, line in LINES.items()}


def total_of(layout: Layout, tensors: dict[str, torch.Tensor], kind: str = "master") -> int:
    """Over all slots of a layout, each with its own part in its storage order."""
    found = 0
    for slot in layout.slots():
        parts = {
            name: torch.cat([tensor[:0], *(tensor[lo:hi] for lo, hi in layout.intervals(LINES[name].axis, slot))])
            for name, tensor in tensors.items()
        }
        found += int(UnitHasher(layout, slot, LINES).hash(parts, kind).sum())
    return found % 2**64


ALONE = Layout({"x": {0: ((0, UNITS),)}, "w": {0: ((0, 1),)}})


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_sums_are_the_same_under_any_cut(data: st.DataObject, dtype: torch.dtype) -> None:
    bounds = sorted({0, UNITS, *data.draw(st.lists(st.integers(1, UNITS - 1), max_size=5))})
    by_slot: dict[int, list[tuple[int, int]]] = {}
    for interval in data.draw(st.permutations(list(pairwise(bounds)))):  # storage order is any order
        by_slot.setdefault(data.draw(st.integers(0, 3)), []).append(interval)
    layout = Layout({"x": {slot: tuple(intervals) for slot, intervals in by_slot.items()}, "w": {2: ((0, 1),)}})
    assert total_of(layout, whole(dtype)) == total_of(ALONE, whole(dtype))


@given(data=st.data(), dtype=st.sampled_from(DTYPES), count=st.integers(1, 4))
def test_flipped_bits_are_seen(data: st.DataObject, dtype: torch.dtype, count: int) -> None:
    """Also several of the same place in different elements, say two signs, which a sum of whole words would miss."""
    tensors, name = whole(dtype), data.draw(st.sampled_from(list(LINES)))
    bit = data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    elements = st.integers(0, tensors[name].numel() - 1)
    for element in data.draw(st.sets(elements, min_size=1, max_size=count)):
        flip_bit(tensors[name], element, bit)
    assert total_of(ALONE, tensors) != total_of(ALONE, whole(dtype))


@pytest.mark.parametrize("name", LINES)
@given(data=st.data())
def test_swapped_elements_are_seen(name: str, data: st.DataObject) -> None:
    tensors = whole(torch.float32)
    first, second = data.draw(st.lists(st.integers(0, tensors[name].numel() - 1), min_size=2, max_size=2, unique=True))
    flat = tensors[name].view(-1)
    flat[first], flat[second] = flat[second].clone(), flat[first].clone()
    assert total_of(ALONE, tensors) != total_of(ALONE, whole(torch.float32))


def test_the_same_bytes_of_another_kind_or_parameter_have_another_hash() -> None:
    tensors = whole(torch.float32)
    assert total_of(ALONE, tensors, "exp_avg") != total_of(ALONE, tensors, "master")
    tensors["a"], tensors["b"] = torch.zeros_like(tensors["a"]), torch.zeros_like(tensors["b"])
    hasher = UnitHasher(ALONE, 0, LINES)
    zeros = hasher.split(hasher.hash(tensors, "master"))
    assert len({int(value) for name in ("a", "b") for value in zeros[name]}) == 2 * UNITS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_on_the_way_is_rounding_before(dtype: torch.dtype) -> None:
    hasher, masters = UnitHasher(ALONE, 0, LINES), whole(torch.float64)
    rounded = {name: tensor.to(dtype) for name, tensor in masters.items()}
    assert torch.equal(hasher.digest(masters, dtype), hasher.digest(rounded))
