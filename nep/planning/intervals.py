"""Arithmetic on tuples of half-open intervals of units.

Everything here costs a sort of the intervals, never a walk over the units inside them: a vocabulary line
has a hundred thousand units and a handful of intervals.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby

Interval = tuple[int, int]
"""Half open, in units."""

Intervals = tuple[Interval, ...]

Segment = tuple[int, int, tuple[int, ...]]
"""``(lo, hi, slots)``: a stretch of a line and the slots, ascending, that have all of it."""


def normalize(intervals: Iterable[Interval]) -> Intervals:
    """Sorts intervals, merges those that touch or overlap, and drops empty ones."""
    merged: list[Interval] = []
    for lo, hi in sorted(intervals):
        if lo >= hi:
            continue
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return tuple(merged)


def union(a: Iterable[Interval], b: Iterable[Interval]) -> Intervals:
    """The units in ``a`` or ``b``, as sorted disjoint intervals."""
    return normalize((*a, *b))


def intersect(a: Iterable[Interval], b: Iterable[Interval]) -> Intervals:
    """The units in both ``a`` and ``b``, as sorted disjoint intervals."""
    left, right = normalize(a), normalize(b)
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        lo, hi = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if lo < hi:
            common.append((lo, hi))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def subtract(a: Iterable[Interval], b: Iterable[Interval]) -> Intervals:
    """The units in ``a`` but not in ``b``, as sorted disjoint intervals."""
    left, right = normalize(a), normalize(b)
    rest: list[Interval] = []
    j = 0
    for lo, hi in left:
        while j < len(right) and right[j][1] <= lo:
            j += 1
        k = j
        while k < len(right) and right[k][0] < hi:
            if lo < right[k][0]:
                rest.append((lo, right[k][0]))
            lo = right[k][1]
            k += 1
        if lo < hi:
            rest.append((lo, hi))
    return tuple(rest)


def count_units(intervals: Iterable[Interval]) -> int:
    """The sum of the lengths; of disjoint intervals, the number of units."""
    units = 0
    for lo, hi in intervals:  # a generator would take twice as long, and plans are full of these
        units += hi - lo
    return units


def arrange(intervals: Iterable[Interval], units_per_expert: int | None) -> Intervals:
    """Puts the intervals of one slot into storage order.

    Grouped GEMMs run on views of storage if the full experts lie first, so: intervals are split at expert
    boundaries, full experts come first (ascending, neighbours merged into one interval), then slices,
    ascending.

    Args:
        intervals: what the slot holds, in any order.
        units_per_expert: None for a line without experts, whose storage order is ascending.
    """
    merged = normalize(intervals)
    if units_per_expert is None:
        return merged
    full: list[Interval] = []
    slices: list[Interval] = []
    for lo, hi in merged:
        first_boundary = -(-lo // units_per_expert) * units_per_expert
        last_boundary = hi // units_per_expert * units_per_expert
        if first_boundary > last_boundary:  # strictly inside one expert
            slices.append((lo, hi))
            continue
        if lo < first_boundary:
            slices.append((lo, first_boundary))
        if first_boundary < last_boundary:
            full.append((first_boundary, last_boundary))
        if last_boundary < hi:
            slices.append((last_boundary, hi))
    return (*full, *slices)


def storage_offset(intervals: Iterable[Interval], lo: int, hi: int) -> list[tuple[int, int, int]]:
    """Finds where the units of ``[lo, hi)`` lie in the storage of a slot.

    Args:
        intervals: what the slot holds, in storage order.
        lo: first unit asked for.
        hi: one past the last unit asked for.

    Returns:
        ``(offset, lo, hi)`` for each stretch of the asked units that is held, ascending in ``lo``; ``offset``
        is the row of storage, counted in units, at which unit ``lo`` lies.
    """
    found: list[tuple[int, int, int]] = []
    offset = 0
    for start, stop in intervals:
        low, high = max(start, lo), min(stop, hi)
        if low < high:
            found.append((offset + low - start, low, high))
        offset += stop - start
    found.sort(key=lambda piece: piece[1])
    return found


def segments(cut: Mapping[int, Intervals], within: Iterable[Interval]) -> list[Segment]:
    """Cuts ``within`` wherever the set of slots that have the units changes.

    Args:
        cut: slot -> disjoint intervals; slots may overlap each other.
        within: the units asked about.

    Returns:
        Segments ascending in ``lo`` that together are exactly ``within``; units that no slot has come with
        ``()``.
    """
    wanted = normalize(within)
    if not wanted:
        return []
    first, last = wanted[0][0], wanted[-1][1]
    # (position, is_start, slot); -1 stands for ``within`` itself, so that a segment ends where it ends.
    events: list[tuple[int, bool, int]] = []
    for lo, hi in wanted:
        events += [(lo, True, -1), (hi, False, -1)]
    for slot, intervals in cut.items():
        for lo, hi in intervals:
            if lo < last and first < hi:
                events += [(lo, True, slot), (hi, False, slot)]
    events.sort()
    active: set[int] = set()
    inside = False
    start = first
    found: list[Segment] = []
    for position, changes in groupby(events, key=lambda event: event[0]):
        if inside and start < position:
            found.append((start, position, tuple(sorted(active))))
        # An end sorts before a start at the same place, so a slot whose intervals touch stays active.
        for _, is_start, slot in changes:
            if slot == -1:
                inside = is_start
            elif is_start:
                active.add(slot)
            else:
                active.discard(slot)
        start = position
    return _join_equal(found)


def _join_equal(found: list[Segment]) -> list[Segment]:
    """Joins neighbouring segments of the same slots (a slot's own inner boundary is no change of the set)."""
    joined: list[Segment] = []
    for lo, hi, slots in found:
        if joined and joined[-1][1] == lo and joined[-1][2] == slots:
            joined[-1] = (joined[-1][0], hi, slots)
        else:
            joined.append((lo, hi, slots))
    return joined
