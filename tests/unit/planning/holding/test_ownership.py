"""Owners that stay, and what has none: checked unit by unit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.holding.ownership import assign_owners, staying_mirrors, staying_owners
from nep.planning.layout import Layout, Lines, axis_unit_numel, normalize
from tests.unit.planning.strategies import layouts, line_list, slots_with, units_of

SLOTS = (0, 1, 2, 5, 9)


def _partial(layout: Layout, units: set[int]) -> Layout:
    """The layout with these units only."""
    cuts: dict[str, dict[int, tuple[tuple[int, int], ...]]] = {}
    for (axis, slot), having in units_of(layout).items():
        cuts.setdefault(axis, {})[slot] = normalize((unit, unit + 1) for unit in having & units)
    return Layout(cuts)


@given(st.data())
def test_owners_stay_and_the_rest_goes_to_holders_as_even_as_a_greedy_pass(data: st.DataObject) -> None:
    num_units = {"b": data.draw(st.integers(1, 12)), "a": 6}
    lines = line_list(num_units)
    holders = data.draw(layouts(num_units, SLOTS, "cover"))
    # Somebody of the holders owns some of the units.
    owned = {
        axis: {
            slot: normalize((unit, unit + 1) for unit in units if min(slots_with(holders, axis, unit)) == slot)
            for slot, units in ((slot, range(count)) for slot in SLOTS)
        }
        for axis, count in num_units.items()
    }
    before = _partial(Layout(owned), data.draw(st.sets(st.integers(0, 12))))
    after, gained = assign_owners(holders, before.cuts, lines)
    had, have = units_of(before), units_of(after)
    for axis, count in num_units.items():
        for unit in range(count):
            (owner,) = slots_with(after, axis, unit)
            assert owner in slots_with(holders, axis, unit)
            assert slots_with(before, axis, unit) <= {owner}
    assert {axis: set(slots) for axis, slots in gained.items()} == {
        axis: {slot for slot in SLOTS if have.get((axis, slot), set()) > had.get((axis, slot), set())}
        for axis in gained
    }
    assert assign_owners(holders, after.cuts, lines) == (after, {})


def _sizes(layout: Layout, lines: Lines) -> dict[int, int]:
    numel = axis_unit_numel(lines)
    sizes = dict.fromkeys(SLOTS, 0)
    for (axis, slot), units in units_of(layout).items():
        sizes[slot] += len(units) * numel[axis]
    return sizes


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_free_choice_ends_within_one_unit_of_the_mean(counts: list[int]) -> None:
    """The bound of list scheduling: who got the last unit was at or below the mean before it."""
    num_units = {f"x{index}": count for index, count in enumerate(counts)}
    lines = line_list(num_units)
    holders = Layout({axis: dict.fromkeys(SLOTS, ((0, count),)) for axis, count in num_units.items()})
    owners, _ = assign_owners(holders, {}, lines)
    sizes = _sizes(owners, lines)
    assert max(sizes.values()) <= sum(sizes.values()) / len(SLOTS) + 2


def test_what_few_can_have_goes_first_and_the_rest_fills_the_gaps() -> None:
    lines = line_list({"everywhere": 8, "here": 6})
    holders = Layout({"everywhere": dict.fromkeys(SLOTS, ((0, 8),)), "here": {0: ((0, 6),)}})
    owners, _ = assign_owners(holders, {}, lines)
    assert _sizes(owners, lines) == {0: 12, 1: 4, 2: 4, 5: 4, 9: 4}


def test_holders_of_a_ring_own_equal_parts_since_the_others_are_taken_into_account() -> None:
    ring = {f"x{index}": {SLOTS[index]: ((0, 8),), SLOTS[(index + 1) % 5]: ((0, 8),)} for index in range(5)}
    lines = line_list(dict.fromkeys(ring, 8))
    owners, _ = assign_owners(Layout(ring), {}, lines)
    for axis, held in ring.items():
        assert {owners.num_units(axis, slot) for slot in held} == {4}


def test_units_that_nobody_holds_are_named() -> None:
    lines = line_list({"a": 6})
    with pytest.raises(ValueError, match=r"nobody holds \[\(2, 3\)\] of a"):
        assign_owners(Layout({"a": {0: ((0, 2),), 1: ((3, 6),)}}), {}, lines)


@given(st.data())
def test_who_stays_owns_what_it_still_holds(data: st.DataObject) -> None:
    num_units = {"b": data.draw(st.integers(1, 12)), "a": 6}
    before = data.draw(layouts(num_units, SLOTS, "cover"))
    owners = data.draw(layouts(num_units, SLOTS, "partition"))
    after = data.draw(layouts(num_units, SLOTS, "any"))
    slots = data.draw(st.sets(st.sampled_from(SLOTS)))
    found = units_of(Layout(staying_owners(owners, before, after, slots)))
    held, had = units_of(after), units_of(before)
    for (axis, slot), units in units_of(owners).items():
        # Who has not changed is not asked.
        still = units if held.get((axis, slot)) == had.get((axis, slot)) else units & held.get((axis, slot), set())
        assert found.get((axis, slot), set()) == (still if slot in slots else set())
    everything = units_of(Layout(staying_owners(owners, before, after, slots, keep_held=True)))
    assert everything == {where: units for where, units in units_of(owners).items() if where[1] in slots}


@given(st.data())
def test_mirrors_stay_unless_their_slot_owns_the_units_now(data: st.DataObject) -> None:
    num_units = {"b": data.draw(st.integers(1, 12)), "a": 6}
    mirrors = data.draw(layouts(num_units, SLOTS, "any"))
    owners = data.draw(layouts(num_units, SLOTS, "partition"))
    slots = data.draw(st.sets(st.sampled_from(SLOTS)))
    gained = {axis: frozenset(SLOTS) for axis in num_units}
    found = units_of(staying_mirrors(mirrors, owners, gained, slots))
    owned = units_of(owners)
    expected = {
        where: units - owned.get(where, set()) for where, units in units_of(mirrors).items() if where[1] in slots
    }
    assert found == {where: units for where, units in expected.items() if units}
