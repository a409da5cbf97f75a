"""Hands units out: how many each gets, and which.

Everything is exact in integers and depends on nothing but its arguments, so every slot computes the same.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from nep.planning.intervals import Interval

Integers = NDArray[np.int64]

Assigned = dict[str, dict[int, list[Interval]]]
"""axis -> slot -> intervals, neither sorted nor merged."""

# Up to so many bins plain Python is faster than numpy.
_FEW = 32


def water_fill(loads: Integers, num_units: int, unit_size: int) -> Integers:
    """How many of some equal units each bin gets if every one goes to the bin least loaded by then.

    Computed by the level that the water reaches, not unit by unit: a vocabulary has a hundred thousand. Of
    equally loaded bins the earlier comes first.

    Args:
        loads: load of each bin before; at least one bin.
        num_units: units to give out.
        unit_size: load of one unit.
    """
    if loads.size <= _FEW:
        return np.array(_fill_few(loads.tolist(), num_units, unit_size), dtype=np.int64)
    poured = num_units * unit_size
    order = np.argsort(loads, kind="stable")
    rising = loads[order]
    below = np.cumsum(rising) - rising
    # A bin stays dry if the level of those before it does not reach it.
    dry = np.flatnonzero(rising * np.arange(loads.size) >= poured + below)
    wet = int(dry[dry > 0][0]) if dry.size and dry[-1] > 0 else loads.size
    counts = np.zeros(loads.size, dtype=np.int64)
    # The level is (poured + what is below) / wet; each bin takes the whole units that fit under it.
    counts[order[:wet]] = (poured + int(rising[:wet].sum()) - rising[:wet] * wet) // (wet * unit_size)
    # Fewer than ``wet`` are left, and no bin gets a second one of them before each has a first.
    left = num_units - int(counts.sum())
    if left:
        counts[np.argsort(loads + counts * unit_size, kind="stable")[:left]] += 1
    return counts


def _fill_few(loads: list[int], num_units: int, unit_size: int) -> list[int]:
    """`water_fill` for few bins, step for step."""
    poured = num_units * unit_size
    order = sorted(range(len(loads)), key=loads.__getitem__)
    below = wet = 0
    for place in order:
        if wet and loads[place] * wet >= poured + below:
            break
        below += loads[place]
        wet += 1
    counts = [0] * len(loads)
    for place in order[:wet]:
        counts[place] = (poured + below - loads[place] * wet) // (wet * unit_size)
    left = num_units - sum(counts)
    if left:
        after = sorted(range(len(loads)), key=lambda place: loads[place] + counts[place] * unit_size)
        for place in after[:left]:
            counts[place] += 1
    return counts


def deal(intervals: Iterable[Interval], counts: Iterable[tuple[int, int]]) -> list[tuple[int, Interval]]:
    """Cuts intervals into runs: the first taker gets its count of units from the front, then the next.

    Consecutive runs keep the number of pieces below intervals + takers. Cutting every interval over all of them
    would multiply the pieces at each of several failures.

    Args:
        intervals: what is dealt.
        counts: ``(taker, units)``; together as many units as the intervals have.

    Returns:
        ``(taker, interval)``, in the order of the intervals.
    """
    dealt: list[tuple[int, Interval]] = []
    takers = iter([(taker, count) for taker, count in counts if count])
    taker, room = -1, 0
    for lo, hi in intervals:
        while lo < hi:
            if not room:
                taker, room = next(takers)
            stop = min(hi, lo + room)
            dealt.append((taker, (lo, stop)))
            room -= stop - lo
            lo = stop
    return dealt
