"""Transfers, checked by carrying them out unit by unit on dictionaries and row by row on arrays."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.layout import Layout
from nep.planning.transfer import Piece, Transfer, fetch, overlaps
from tests.unit.planning.strategies import AXES, SLOTS, layouts, line_list, storage_rows, units_of

Arrays = dict[tuple[str, int], np.ndarray]


def _storage(layout: Layout, value: float | None = None) -> Arrays:
    """One array per axis and slot, in storage order: each row names its unit, or is ``value``."""
    return {
        (axis, slot): np.array([_value_of(axis, unit) if value is None else value for unit in storage_rows(intervals)])
        for axis, by_slot in layout.cuts.items()
        for slot, intervals in by_slot.items()
    }


def _value_of(axis: str, unit: int) -> float:
    return 1000.0 * ord(axis) + unit


def _rows(layout: Layout, axis: str, slot: int, lo: int, hi: int) -> slice:
    """The rows of a piece; asserts that they are one run within one interval of storage."""
    rows = storage_rows(layout.intervals(axis, slot))
    first = rows.index(lo)
    assert rows[first : first + hi - lo] == list(range(lo, hi))
    assert any(start <= lo and hi <= stop for start, stop in layout.intervals(axis, slot))
    return slice(first, first + hi - lo)


def _carry_out(transfer: Transfer, source: Layout, destination: Layout, values: Arrays) -> Arrays:
    """Copies each piece by rows; what nobody sent stays NaN."""
    result = _storage(destination, np.nan)
    for axis, lo, hi, src, dst in transfer:
        sent = values[axis, src][_rows(source, axis, src, lo, hi)]
        result[axis, dst][_rows(destination, axis, dst, lo, hi)] = sent
    return result


def _same(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def _is_canonical(transfer: Transfer, axis_order: list[str]) -> bool:
    keys = [(axis_order.index(piece.axis), *piece[1:]) for piece in transfer]
    return keys == sorted(keys) and len(set(keys)) == len(keys)


def _triples(transfer: Transfer) -> Counter[tuple[str, int, int, int]]:
    return Counter((axis, unit, src, dst) for axis, lo, hi, src, dst in transfer for unit in range(lo, hi))


@given(st.data())
def test_overlaps_is_the_per_unit_reference(data: st.DataObject) -> None:
    num_units, slots = data.draw(AXES), data.draw(SLOTS)
    source, destination = data.draw(layouts(num_units, slots)), data.draw(layouts(num_units, slots))
    transfer = overlaps(source, destination, list(num_units))
    have, want = units_of(source), units_of(destination)
    expected = Counter(
        (axis, unit, src, dst)
        for (axis, src), units in have.items()
        for (other, dst), wanted in want.items()
        if axis == other
        for unit in units & wanted
    )
    assert _triples(transfer) == expected
    assert transfer.num_units == expected.total()
    assert _is_canonical(transfer, list(num_units))
    for axis, lo, hi, src, dst in transfer:
        _rows(source, axis, src, lo, hi)
        _rows(destination, axis, dst, lo, hi)


@given(st.data())
def test_overlaps_there_and_back_is_the_identity(data: st.DataObject) -> None:
    num_units, slots = data.draw(AXES), data.draw(SLOTS)
    first = data.draw(layouts(num_units, slots, "partition"))
    second = data.draw(layouts(num_units, slots, "partition"))
    there = _carry_out(overlaps(first, second, list(num_units)), first, second, _storage(first))
    assert _same(there, _storage(second))
    back = _carry_out(overlaps(second, first, list(num_units)), second, first, there)
    assert _same(back, _storage(first))


@given(st.data())
def test_return_is_the_transpose_of_the_sum(data: st.DataObject) -> None:
    num_units, slots = data.draw(AXES), data.draw(SLOTS)
    holders = data.draw(layouts(num_units, slots, "cover"))
    owners = data.draw(layouts(num_units, slots, "partition"))
    forward = overlaps(holders, owners, list(num_units))
    back = overlaps(owners, holders, list(num_units))
    assert Counter(back.pieces) == Counter(Piece(p.axis, p.lo, p.hi, p.dst, p.src) for p in forward)


@given(st.data())
def test_both_ends_compute_the_same_pieces(data: st.DataObject) -> None:
    num_units, slots = data.draw(AXES), data.draw(SLOTS)
    source = data.draw(layouts(num_units, slots, "cover"))
    destination = data.draw(layouts(num_units, slots))
    order = list(num_units)
    # The other end read its layouts from JSON, and has slots and axes in another order.
    source_there, destination_there = (
        Layout({axis: dict(reversed(by_slot.items())) for axis, by_slot in reversed(layout.cuts.items())})
        for layout in (source, destination)
    )
    assert overlaps(source, destination, order) == overlaps(source_there, destination_there, order)
    assert fetch([source], destination, order) == fetch([source_there], destination_there, order)
    whole = overlaps(source, destination, order)
    for slot in slots:
        # Restricting one side to a slot gives exactly what that slot sends, or gets.
        sends = overlaps(source.restrict([slot]), destination, order)
        gets = overlaps(source, destination.restrict([slot]), order)
        assert sends.pieces == tuple(piece for piece in whole if piece.src == slot)
        assert gets.pieces == tuple(piece for piece in whole if piece.dst == slot)


@given(st.data())
def test_fetch_brings_each_unit_once_from_the_first_layout_that_has_it(data: st.DataObject) -> None:
    num_units, slots = data.draw(AXES), data.draw(SLOTS)
    live = data.draw(st.sets(st.sampled_from(slots), min_size=1).map(sorted).map(tuple))
    order = list(num_units)
    sources = [data.draw(layouts(num_units, live)) for _ in range(data.draw(st.integers(0, 2)))]
    sources.append(data.draw(layouts(num_units, live, "cover")))
    destination = data.draw(layouts(num_units, slots))
    have = data.draw(st.none() | layouts(num_units, slots))
    transfer = fetch(sources, destination, order, have)
    assert _is_canonical(transfer, order)

    units = [units_of(source) for source in sources]
    in_place = units_of(have) if have is not None else {}
    wanted = {
        (axis, unit, dst)
        for (axis, dst), want in units_of(destination).items()
        for unit in want - in_place.get((axis, dst), set())
    }
    received: dict[tuple[str, int, int], int] = {}
    for axis, unit, src, dst in _triples(transfer).elements():
        assert (axis, unit, dst) not in received, "received twice"
        received[axis, unit, dst] = src
    assert received.keys() == wanted
    for (axis, unit, dst), src in received.items():
        candidates = next(
            slots_
            for source in units
            if (slots_ := {slot for (where, slot), had in source.items() if where == axis and unit in had})
        )
        assert src in candidates
        assert src == dst or dst not in candidates, "a slot that has the unit itself fetched it"


@given(st.data())
def test_fetch_pieces_are_contiguous_where_they_are_read_and_written(data: st.DataObject) -> None:
    num_units, slots = data.draw(AXES), data.draw(SLOTS)
    order = list(num_units)
    sources = [data.draw(layouts(num_units, slots)), data.draw(layouts(num_units, slots, "cover"))]
    destination = data.draw(layouts(num_units, slots))
    for axis, lo, hi, src, dst in fetch(sources, destination, order):
        # As documented: the piece lies in the first source in which its slot has the first unit.
        source = next(one for one in sources if lo in units_of(one).get((axis, src), ()))
        _rows(source, axis, src, lo, hi)
        _rows(destination, axis, dst, lo, hi)


@given(st.data())
def test_fetch_there_and_back_is_the_identity(data: st.DataObject) -> None:
    num_units, slots = data.draw(AXES), data.draw(SLOTS)
    first = data.draw(layouts(num_units, slots, "cover"))
    second = data.draw(layouts(num_units, slots, "cover"))
    there = _carry_out(fetch([first], second, list(num_units)), first, second, _storage(first))
    assert _same(there, _storage(second))
    back = _carry_out(fetch([second], first, list(num_units)), second, first, there)
    assert _same(back, _storage(first))


def test_fetch_joins_what_one_source_sends_in_a_row() -> None:
    # Slot 2 has half of what slot 1 has: with both, the line changes hands in the middle.
    source = Layout({"a": {1: ((0, 8),), 2: ((4, 8),)}})
    destination = Layout({"a": {0: ((0, 8),)}})
    assert fetch([source.restrict([1])], destination, ["a"]).pieces == (Piece("a", 0, 8, 1, 0),)
    assert fetch([source], destination, ["a"]).pieces == (Piece("a", 0, 4, 1, 0), Piece("a", 4, 8, 2, 0))


def test_fetch_balances_what_the_sources_send() -> None:
    everyone = Layout({f"x{i}": dict.fromkeys(range(3), ((0, 3),)) for i in range(6)})
    order = [f"x{i}" for i in range(6)]
    newcomer = Layout({axis: {9: ((0, 3),)} for axis in order})
    sent = Counter(piece.src for piece in fetch([everyone], newcomer, order))
    assert sent == {0: 2, 1: 2, 2: 2}
    # In elements the first axis is as heavy as all others together, and slot 0 sends that one only.
    weights = {axis: 100 if axis == "x0" else 1 for axis in order}
    sent = Counter(piece.src for piece in fetch([everyone], newcomer, order, unit_numel=weights))
    assert sent[0] == 1


def test_fetch_names_everything_that_no_source_has() -> None:
    source = Layout({"a": {0: ((0, 4),)}})
    destination = Layout({"a": {1: ((2, 6),)}, "b": {2: ((0, 1),)}})
    with pytest.raises(RuntimeError, match=r"a \[4, 6\) for slot 1; b \[0, 1\) for slot 2; .*checkpoint"):
        fetch([source], destination, ["a", "b"])


def test_of_much_that_is_missing_the_first_is_named_and_the_rest_counted() -> None:
    wanted = Layout({"a": {slot: ((slot, slot + 1),) for slot in range(9)}})
    with pytest.raises(RuntimeError) as caught:
        fetch([Layout({"a": {0: ((0, 1),)}})], wanted, ["a"])
    assert str(caught.value) == (
        "no source has a [1, 2) for slot 1; a [2, 3) for slot 2; a [3, 4) for slot 3 and 5 more intervals "
        "(8 units in all); restore from a checkpoint"
    )


def test_transfer_answers_by_slot_and_by_pair() -> None:
    transfer = Transfer(
        (Piece("a", 0, 2, 0, 1), Piece("a", 2, 3, 1, 1), Piece("b", 0, 4, 1, 0), Piece("b", 4, 5, 2, 1))
    )
    assert transfer.between(0, 1).pieces == (Piece("a", 0, 2, 0, 1),)
    assert transfer.between(5, 1).pieces == ()
    assert transfer.touching(0).pieces == (Piece("a", 0, 2, 0, 1), Piece("b", 0, 4, 1, 0))
    assert transfer.touching(1).pieces == transfer.pieces
    assert transfer.remote().num_units == 2 + 4 + 1
    assert len(transfer) == 4
    lines = line_list({"a": 3, "b": 5})
    assert transfer.num_bytes(lines, 4) == (3 + 5) * 2 * 4
    assert Transfer().num_bytes(lines, 4) == 0
