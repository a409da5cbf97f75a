"""From counts of units to the units themselves, checked unit by unit."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.holding.dealing import Integers, count_cut, deal_cut, redeal_cut
from nep.planning.intervals import Intervals, arrange


@st.composite
def _cuts(draw: st.DrawFn, num_experts: int, num_slots: int, size: int, layers: int = 2) -> Integers:
    cut = np.zeros((layers, num_experts, num_slots), dtype=np.int64)
    for layer in range(layers):
        for expert in range(num_experts):
            for _ in range(size):
                cut[layer, expert, draw(st.integers(0, num_slots - 1))] += 1
    return cut


def _units(held: list[Intervals]) -> list[set[int]]:
    return [{unit for lo, hi in intervals for unit in range(lo, hi)} for intervals in held]


SIZES = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))


@given(SIZES, st.data())
def test_dealt_units_are_as_many_as_counted_each_once_and_in_order_of_storage(
    sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    num_experts, num_slots, size = sizes
    cut = data.draw(_cuts(num_experts, num_slots, size))
    dealt = deal_cut(cut, size)
    assert (count_cut(dealt, num_experts, size) == cut).all()
    for of_layer in dealt:
        assert sorted(unit for units in _units(of_layer) for unit in units) == [*range(num_experts * size)]
        assert all(intervals == arrange(intervals, size) for intervals in of_layer)
        for intervals in of_layer:
            for expert in range(num_experts):
                inside = [1 for lo, hi in intervals if lo < (expert + 1) * size and expert * size < hi]
                assert len(inside) <= 1, "an expert is one run on each slot"


@given(SIZES, st.data())
def test_who_keeps_a_count_keeps_its_units_and_only_the_difference_moves(
    sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    num_experts, num_slots, size = sizes
    held = deal_cut(data.draw(_cuts(num_experts, num_slots, size)), size)
    lost = data.draw(st.sets(st.integers(0, num_slots - 1)))
    held = [[() if slot in lost else intervals for slot, intervals in enumerate(of_layer)] for of_layer in held]
    before = count_cut(held, num_experts, size)
    cut = data.draw(_cuts(num_experts, num_slots, size))
    dealt = redeal_cut(cut, held, size)
    assert (count_cut(dealt, num_experts, size) == cut).all()
    for layer, (had, have) in enumerate(zip(held, dealt, strict=True)):
        assert sorted(unit for units in _units(have) for unit in units) == [*range(num_experts * size)]
        moved = sum(len(now - then) for now, then in zip(_units(have), _units(had), strict=True))
        assert moved == np.maximum(cut[layer] - before[layer], 0).sum()
        for slot in range(num_slots):
            if (cut[layer, :, slot] == before[layer, :, slot]).all():
                assert have[slot] is had[slot]
            else:
                assert have[slot] == arrange(have[slot], size)


def test_a_lost_piece_goes_on_where_a_neighbour_of_it_is() -> None:
    held = [[((0, 3),), ((5, 8),), ()]]
    assert redeal_cut(np.array([[[4, 4, 0]]]), held, 8) == [[((0, 4),), ((4, 8),), ()]]
    assert redeal_cut(np.array([[[3, 4, 1]]]), held, 8) == [[((0, 3),), ((4, 8),), ((3, 4),)]]


def test_copies_are_whole_and_a_unit_held_twice_is_kept_once() -> None:
    copies = np.array([[[4, 4, 0], [0, 4, 4]]])
    dealt = deal_cut(copies, 4)
    assert dealt == [[((0, 4),), ((0, 8),), ((4, 8),)]]
    assert redeal_cut(copies, dealt, 4) == dealt
    assert redeal_cut(np.array([[[4, 0, 0], [0, 2, 2]]]), dealt, 4) == [[((0, 4),), ((4, 6),), ((6, 8),)]]
    # As many units as an expert has, and yet not all of them.
    half_twice = [[((0, 2),), ((0, 2),)]]
    assert redeal_cut(np.array([[[2, 2]]]), half_twice, 4) == [[((0, 2),), ((2, 4),)]]
