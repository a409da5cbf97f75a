"""Who owns which units: owners stay put, and what has none goes to its holders, even in bytes.

A layout for thousands of slots has millions of entries but few different ones, so slots are looked at by
*class*: those that hold exactly the same of an axis.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nep.planning.intervals import Interval, Intervals, intersect, normalize, segments, subtract
from nep.planning.layout import Layout, Lines, axis_lines, axis_unit_numel, count_units

Integers = NDArray[np.int64]


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


def assign_owners(holders: Layout, owners: Layout, lines: Lines) -> Layout:
    """Leaves owners as they are and gives every unit without one to a holder of it.

    Units are shared out so that bytes end as even as a greedy pass gets them. Units that few slots hold go
    first, then large ones: what can go anywhere fills the gaps that the others left.

    Args:
        holders: every unit has at least one.
        owners: so far; every unit has at most one, which must hold it.
        lines: the model's.

    Raises:
        ValueError: if nobody holds a unit.
    """
    sizes = axis_unit_numel(lines)
    slots = holders.slots()
    position = {slot: place for place, slot in enumerate(slots)}
    orphans = _find_orphans(holders, owners, lines, position)
    if not orphans:
        return owners
    loads = _numel(owners, sizes, position)
    order = sorted(range(len(orphans)), key=lambda i: (orphans[i].candidates.size, -orphans[i].unit_size, i))
    assigned: dict[str, dict[int, list[Interval]]] = {}
    for index in order:
        group = orphans[index]
        counts = water_fill(loads[group.candidates], count_units(group.intervals), group.unit_size)
        takers = np.flatnonzero(counts)
        loads[group.candidates[takers]] += counts[takers] * group.unit_size
        runs = [(slots[place], count) for place, count in zip(group.candidates[takers].tolist(), counts[takers].tolist(), strict=True)]
        of_axis = assigned.setdefault(group.axis, {})
        for slot, interval in deal(group.intervals, runs):
            of_axis.setdefault(slot, []).append(interval)
    return _with(owners, assigned)


def held_only(owners: Layout, holders: Layout, before: Layout) -> Layout:
    """Owners without the units that they do not hold any more.

    Args:
        owners: so far.
        holders: from now on.
        before: holders so far, to see who has changed at all.
    """
    cuts: dict[str, Mapping[int, Intervals]] = dict(owners.cuts)
    for axis, by_slot in owners.cuts.items():
        held, had = holders.by_slot(axis), before.by_slot(axis)
        if held is had:
            continue
        changed = {
            slot: intersect(owned, held.get(slot, ()))
            for slot, owned in by_slot.items()
            if held.get(slot) is not had.get(slot) and held.get(slot) != had.get(slot)
        }
        if changed:
            cuts[axis] = {**by_slot, **changed}
    return Layout(cuts)


def water_fill(loads: Integers, num_units: int, unit_size: int) -> Integers:
    """How many of some equal units each bin gets if every one goes to the bin least loaded by then.

    Computed by the level that the water reaches, not unit by unit: a vocabulary has a hundred thousand. Of
    equally loaded bins the earlier comes first.

    Args:
        loads: load of each bin before; at least one bin.
        num_units: units to give out.
        unit_size: load of one unit.
    """
    poured = num_units * unit_size
    order = np.argsort(loads, kind="stable")
    rising = loads[order]
    below = np.concatenate([[0], np.cumsum(rising)])
    count = np.arange(loads.size)
    # A bin stays dry if the level of those before it does not reach it.
    dry = (count > 0) & (rising * count >= poured + below[:-1])
    wet = int(np.argmax(dry)) if dry.any() else loads.size
    counts = np.zeros(loads.size, dtype=np.int64)
    # The level is (poured + below) / wet; each bin takes the whole units that fit under it.
    counts[order[:wet]] = (poured + below[wet] - rising[:wet] * wet) // (wet * unit_size)
    # Fewer than ``wet`` are left, and no bin gets a second one of them before each has a first.
    left = num_units - int(counts.sum())
    counts[np.argsort(loads + counts * unit_size, kind="stable")[:left]] += 1
    return counts


def deal(intervals: Iterable[Interval], counts: Iterable[tuple[int, int]]) -> list[tuple[int, Interval]]:
    """Cuts intervals into runs: the first slot takes its count of units from the front, then the next.

    Consecutive runs keep the number of pieces below intervals + slots.

    Args:
        intervals: what is dealt.
        counts: ``(slot, units)``, at least 1 each; together as many units as the intervals have.

    Returns:
        ``(slot, interval)``, in the order of the intervals.
    """
    dealt: list[tuple[int, Interval]] = []
    takers = iter(counts)
    slot, room = -1, 0
    for lo, hi in intervals:
        while lo < hi:
            if not room:
                slot, room = next(takers)
            stop = min(hi, lo + room)
            dealt.append((slot, (lo, stop)))
            room -= stop - lo
            lo = stop
    return dealt


def _find_orphans(holders: Layout, owners: Layout, lines: Lines, position: Mapping[int, int]) -> list[_Orphans]:
    """Units without an owner, grouped by axis and by who holds them, in canonical order."""
    sizes = axis_unit_numel(lines)
    found: list[_Orphans] = []
    missing: list[str] = []
    classes_of: dict[int, dict[int, Integers]] = {}
    cut_of: dict[int, dict[int, Intervals]] = {}
    for axis, line in axis_lines(lines).items():
        orphans = subtract([(0, line.num_units)], owners.covered(axis))
        if not orphans:
            continue
        by_slot = holders.by_slot(axis)
        key = id(by_slot)
        if key not in classes_of:
            cut_of[key], classes_of[key] = _classes(by_slot, position)
        classes = classes_of[key]
        grouped: dict[tuple[int, ...], list[Interval]] = defaultdict(list)
        for lo, hi, who in segments(cut_of[key], orphans):
            grouped[who].append((lo, hi))
        for who, intervals in grouped.items():
            if not who:
                missing.append(f"{intervals} of {axis}")
                continue
            members = [classes[index] for index in who]
            candidates = members[0] if len(members) == 1 else np.sort(np.concatenate(members))
            found.append(
                _Orphans(axis=axis, unit_size=sizes[axis], intervals=intervals, candidates=candidates)
            )
    if missing:
        raise ValueError(f"nobody holds {'; '.join(missing)}; every replica must hold the whole model")
    return found


def _classes(
    by_slot: Mapping[int, Intervals], position: Mapping[int, int]
) -> tuple[dict[int, Intervals], dict[int, Integers]]:
    """Numbers the classes: what each holds, and the positions of its slots."""
    by_identity: dict[int, tuple[Intervals, list[int]]] = {}
    for slot in sorted(by_slot):
        intervals = by_slot[slot]
        by_identity.setdefault(id(intervals), (intervals, []))[1].append(position[slot])
    by_value: dict[Intervals, list[int]] = {}
    for intervals, places in by_identity.values():
        by_value.setdefault(intervals, []).extend(places)
    cut = dict(enumerate(by_value))
    members = {index: np.sort(np.array(places)) for index, places in enumerate(by_value.values())}
    return cut, members


def _numel(layout: Layout, sizes: Mapping[str, int], position: Mapping[int, int]) -> Integers:
    """Elements of each slot."""
    numel = [0] * len(position)
    for axis, by_slot in layout.cuts.items():
        size = sizes[axis]
        for slot, intervals in by_slot.items():
            for lo, hi in intervals:
                numel[position[slot]] += (hi - lo) * size
    return np.array(numel, dtype=np.int64)


def _with(layout: Layout, assigned: Mapping[str, Mapping[int, Iterable[Interval]]]) -> Layout:
    """A layout with more intervals; what it changes is stored in ascending order."""
    cuts: dict[str, Mapping[int, Intervals]] = dict(layout.cuts)
    for axis, by_slot in assigned.items():
        before = layout.by_slot(axis)
        cuts[axis] = {
            **before,
            **{slot: normalize((*before.get(slot, ()), *intervals)) for slot, intervals in by_slot.items()},
        }
    return Layout(cuts)
