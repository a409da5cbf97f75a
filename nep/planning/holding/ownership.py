"""Who owns which units: owners stay put, and what has none goes to its holders, even in bytes."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nep.planning.holding.assignment import Assigned, deal, water_fill
from nep.planning.intervals import Interval, Intervals, count_units, intersect, normalize, subtract
from nep.planning.layout import Layout, Lines, axis_lines, axis_unit_numel

Integers = NDArray[np.int64]

Cuts = Mapping[str, Mapping[int, Intervals]]
"""axis -> slot -> intervals."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Orphans:
    """Units of one axis without an owner that the same slots hold.

    Attributes:
        axis: the axis.
        unit_size: elements of one unit.
        intervals: the units, ascending.
        candidates: positions of the slots that hold them, ascending.
    """

    axis: str
    unit_size: int
    intervals: Sequence[Interval]
    candidates: Integers


def staying_owners(
    owners: Layout, before: Layout, holders: Layout, slots: Container[int], *, keep_held: bool = False
) -> dict[str, dict[int, Intervals]]:
    """What of the owners can stay: slots that go on own what they still hold.

    Args:
        owners: so far.
        before: holders so far.
        holders: from now on.
        slots: that go on.
        keep_held: whether it is known that they hold everything that they held.
    """
    staying: dict[str, dict[int, Intervals]] = {}
    for axis, by_slot in owners.cuts.items():
        if keep_held:
            staying[axis] = {slot: owned for slot, owned in by_slot.items() if slot in slots}
            continue
        held, had = holders.by_slot(axis), before.by_slot(axis)
        staying[axis] = {
            slot: owned if held.get(slot) is had.get(slot) else _still_held(owned, had.get(slot), held.get(slot, ()))
            for slot, owned in by_slot.items()
            if slot in slots
        }
    return staying


def _still_held(owned: Intervals, had: Intervals | None, held: Intervals) -> Intervals:
    if had == held:
        return owned
    kept = intersect(owned, held)
    return owned if kept == normalize(owned) else kept


def assign_owners(holders: Layout, owners: Cuts, lines: Lines) -> tuple[Layout, dict[str, frozenset[int]]]:
    """Leaves owners as they are and gives every unit without one to a holder of it.

    Units are shared out so that bytes end as even as a greedy pass gets them. Units that few slots hold go
    first, then large ones: what can go anywhere fills the gaps that the others left.

    Args:
        holders: every unit has at least one.
        owners: so far; every unit has at most one, which must hold it.
        lines: the model's.

    Returns:
        The owners, what is new of them in ascending order of storage; and axis -> slots that own more than before.

    Raises:
        ValueError: if nobody holds a unit.
    """
    sizes = axis_unit_numel(lines)
    slots = holders.slots()
    position = {slot: place for place, slot in enumerate(slots)}
    orphans = _find_orphans(holders, owners, lines, sizes, position)
    loads = _numel(owners, sizes, position) if orphans else np.zeros(0, dtype=np.int64)
    order = sorted(range(len(orphans)), key=lambda i: (orphans[i].candidates.size, -orphans[i].unit_size, i))
    # Each group fills what the others leave if these are shared evenly. Without looking ahead, slots of a chain of
    # pairs would own all or nothing, and some receive every sum.
    even = [count_units(group.intervals) * group.unit_size // group.candidates.size for group in orphans]
    for group, share in zip(orphans, even, strict=True):
        loads[group.candidates] += share
    gained: Assigned = {}
    for index in order:
        group = orphans[index]
        before = loads[group.candidates] - even[index]
        counts = water_fill(before, count_units(group.intervals), group.unit_size)
        loads[group.candidates] = before + counts * group.unit_size
        takers = counts.nonzero()[0]
        places, units = group.candidates[takers].tolist(), counts[takers].tolist()
        of_axis = gained.setdefault(group.axis, {})
        for place, interval in deal(group.intervals, zip(places, units, strict=True)):
            of_axis.setdefault(slots[place], []).append(interval)
    cuts: dict[str, Mapping[int, Intervals]] = dict(owners)
    for axis, by_slot in gained.items():
        had = owners.get(axis, {})
        cuts[axis] = {
            **had,
            **{slot: normalize((*had.get(slot, ()), *intervals)) for slot, intervals in by_slot.items()},
        }
    return Layout(cuts), {axis: frozenset(by_slot) for axis, by_slot in gained.items()}


def staying_mirrors(
    mirrors: Layout, owners: Layout, gained: Mapping[str, frozenset[int]], slots: Container[int]
) -> Layout:
    """What of the mirrors can stay: those of slots that go on, less what these have come to own.

    Args:
        mirrors: so far.
        owners: from now on.
        gained: axis -> slots that own more than before.
        slots: that go on.
    """
    cuts: dict[str, Mapping[int, Intervals]] = {}
    for axis, by_slot in mirrors.cuts.items():
        more = gained.get(axis, frozenset())
        cuts[axis] = {
            slot: subtract(mirrored, owners.intervals(axis, slot)) if slot in more else mirrored
            for slot, mirrored in by_slot.items()
            if slot in slots
        }
    return Layout(cuts)


def _find_orphans(
    holders: Layout, owners: Cuts, lines: Lines, sizes: Mapping[str, int], position: Mapping[int, int]
) -> list[_Orphans]:
    """Units without an owner, grouped by axis and by who holds them, in canonical order."""
    found: list[_Orphans] = []
    missing: list[str] = []
    known: dict[int, _Holders] = {}
    for axis, line in axis_lines(lines).items():
        distinct = set(owners.get(axis, {}).values())
        orphans = subtract([(0, line.num_units)], [interval for intervals in distinct for interval in intervals])
        if not orphans:
            continue
        by_slot = holders.by_slot(axis)
        if id(by_slot) not in known:
            known[id(by_slot)] = _Holders(by_slot, position)
        for members, intervals in known[id(by_slot)].split(orphans):
            if not members.size:
                missing.append(f"{intervals} of {axis}")
                continue
            found.append(_Orphans(axis=axis, unit_size=sizes[axis], intervals=intervals, candidates=members))
    if missing:
        raise ValueError(f"nobody holds {'; '.join(missing)}; every replica must hold the whole model")
    return found


class _Holders:
    """Who holds what of an axis, as arrays with one entry for each interval of each slot.

    Args:
        by_slot: what each slot holds of it.
        position: slot -> its place among all slots.
    """

    def __init__(self, by_slot: Mapping[int, Intervals], position: Mapping[int, int]) -> None:
        slots = sorted(by_slot)
        held = [by_slot[slot] for slot in slots]
        table = np.array([interval for intervals in held for interval in intervals], dtype=np.int64).reshape(-1, 2)
        self._lo, self._hi = table[:, 0].copy(), table[:, 1].copy()
        places = np.array([position[slot] for slot in slots], dtype=np.int64)
        self._position = np.repeat(places, [len(intervals) for intervals in held])  # ascending
        self._boundaries = np.unique(table)

    def split(self, intervals: Intervals) -> list[tuple[Integers, list[Interval]]]:
        """The units grouped by the positions, ascending, of all slots that hold them."""
        grouped: dict[bytes, tuple[Integers, list[Interval]]] = {}
        for first, last in intervals:
            inside = self._boundaries[(self._boundaries > first) & (self._boundaries < last)].tolist()
            for lo, hi in pairwise([first, *inside, last]):
                members = self._position[(self._lo <= lo) & (self._hi >= hi)]
                units = grouped.setdefault(members.tobytes(), (members, []))[1]
                if units and units[-1][1] == lo:
                    units[-1] = (units[-1][0], hi)
                else:
                    units.append((lo, hi))
        return list(grouped.values())


def _numel(owners: Cuts, sizes: Mapping[str, int], position: Mapping[int, int]) -> Integers:
    """Elements of each slot."""
    numel = [0] * len(position)
    for axis, by_slot in owners.items():
        size = sizes[axis]
        for slot, intervals in by_slot.items():
            place = position[slot]
            for lo, hi in intervals:
                numel[place] += (hi - lo) * size
    return np.array(numel, dtype=np.int64)
