"""Hands units out to slots: who owns or inherits what.

Everything is exact in integers and depends on nothing but its arguments, so every slot computes the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nep.planning.intervals import Interval, count_units


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Units of one axis that look for a slot.

    Attributes:
        axis: the axis.
        axis_position: its place in canonical order.
        lo: first unit.
        hi: one past the last unit.
        unit_size: load of one unit, in whatever the loads are counted in.
        candidates: the slots that may take it; at least one.
    """

    axis: str
    axis_position: int
    lo: int
    hi: int
    unit_size: int
    candidates: frozenset[int]

    @property
    def size(self) -> int:
        """Load of the whole portion."""
        return (self.hi - self.lo) * self.unit_size


Assigned = dict[str, dict[int, list[Interval]]]
"""axis -> slot -> intervals, neither sorted nor merged."""


def water_fill(
    loads: Sequence[int], num_units: int, unit_size: int = 1, ties: Sequence[int] | None = None
) -> list[int]:
    """How many of ``num_units`` equal units each bin gets if every one goes to the bin least loaded by then.

    Computed by the level that the water reaches, not unit by unit: a vocabulary has a hundred thousand.

    Args:
        loads: load of each bin before; at least one bin.
        num_units: units to give out.
        unit_size: load of one unit.
        ties: which of equally loaded bins comes first, lower first; None means the earlier one.
    """
    bins = range(len(loads))
    second = ties if ties is not None else [0] * len(loads)
    order = sorted(bins, key=lambda bin_: (loads[bin_], second[bin_]))
    poured = num_units * unit_size
    below = 0  # load before, of the bins under the level
    wet = 0  # how many bins are
    for bin_ in order:
        if wet and loads[bin_] * wet >= poured + below:
            break
        below += loads[bin_]
        wet += 1
    counts = [0] * len(loads)
    for bin_ in order[:wet]:
        # The level is (poured + below) / wet; each bin takes the whole units that fit under it.
        counts[bin_] = (poured + below - loads[bin_] * wet) // (wet * unit_size)
    # Fewer than ``wet`` are left, and no bin gets a second one of them before each has a first.
    left = num_units - sum(counts)
    after = sorted(bins, key=lambda bin_: (loads[bin_] + counts[bin_] * unit_size, second[bin_]))
    for bin_ in after[:left]:
        counts[bin_] += 1
    return counts


def deal(intervals: Iterable[Interval], counts: Iterable[tuple[int, int]]) -> list[tuple[int, Interval]]:
    """Cuts intervals into runs: the first slot takes its count of units from the front, then the next.

    Consecutive runs keep the number of pieces below intervals + slots. Cutting every interval over all slots
    would multiply the pieces by the number of slots at each of several failures.

    Args:
        intervals: what is dealt.
        counts: ``(slot, units)``; together as many units as the intervals have.

    Returns:
        ``(slot, interval)``, in the order of the intervals.
    """
    dealt: list[tuple[int, Interval]] = []
    takers = iter([(slot, count) for slot, count in counts if count])
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


def balance(portions: Iterable[Portion], loads: Mapping[int, int]) -> Assigned:
    """Gives every unit to one of its candidates so that loads end as even as a greedy pass gets them.

    A portion is cut over all its candidates, as a reduce-scatter among them wants it. Portions with few
    candidates go first, then large units: what can go anywhere fills the gaps that the others left.

    Args:
        portions: disjoint.
        loads: load of each candidate before.
    """
    groups: dict[tuple[str, frozenset[int]], list[Portion]] = defaultdict(list)
    for portion in sorted(portions, key=lambda portion: (portion.axis_position, portion.lo)):
        groups[portion.axis, portion.candidates].append(portion)
    # The sort is stable: among equals, the order of axes and units decides.
    ordered = sorted(groups.values(), key=lambda group: (len(group[0].candidates), -group[0].unit_size))
    now = defaultdict(int, loads)
    assigned: Assigned = {}
    for group in ordered:
        intervals = [(portion.lo, portion.hi) for portion in group]
        candidates = sorted(group[0].candidates)
        counts = water_fill([now[slot] for slot in candidates], count_units(intervals), group[0].unit_size)
        for slot, (lo, hi) in deal(intervals, zip(candidates, counts, strict=True)):
            _give(assigned, now, group[0], slot, lo, hi)
    return assigned


def _give(assigned: Assigned, now: dict[int, int], portion: Portion, slot: int, lo: int, hi: int) -> None:
    now[slot] += (hi - lo) * portion.unit_size
    assigned.setdefault(portion.axis, {}).setdefault(slot, []).append((lo, hi))
