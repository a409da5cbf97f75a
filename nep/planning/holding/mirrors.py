"""Where mirrors go: each owner's whole state to one partner, in another fault domain where there is one.

Who is whose partner is decided in `nep.planning.holding.pairing`; here that becomes a layout.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nep.planning.cluster import Cluster
from nep.planning.holding.assignment import Assigned, deal
from nep.planning.holding.pairing import pair_up
from nep.planning.intervals import Interval, Intervals, count_units, intersect, normalize, subtract
from nep.planning.layout import Layout, Lines, axis_unit_numel
from nep.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How much state is where.

    Attributes:
        owned: slot -> size of what it owns; slots that own nothing are left out.
        mirrored: (owner, slot) -> size of what the slot mirrors of the owner's.
    """

    owned: Mapping[int, int]
    mirrored: Mapping[tuple[int, int], int]


def mirror_shares(owners: Layout, mirrors: Layout, unit_sizes: Mapping[str, int]) -> Shares:
    """Measures owners and mirrors.

    Args:
        owners: each unit has at most one owner.
        mirrors: units may have any number of mirrors.
        unit_sizes: axis -> size of one unit, in whatever the shares shall be counted in.
    """
    # All axes are laid end to end, so that one search finds what meets.
    starts: dict[str, int] = {}
    end = 0
    for axis in unit_sizes:
        starts[axis] = end
        rows = (*owners.by_slot(axis).values(), *mirrors.by_slot(axis).values())
        end += max((hi for intervals in rows for _, hi in intervals), default=0)
    owned, mirrored = _rows(owners, starts, unit_sizes), _rows(mirrors, starts, unit_sizes)
    first = np.searchsorted(owned[:, 1], mirrored[:, 0], side="right")
    counts = np.maximum(np.searchsorted(owned[:, 0], mirrored[:, 1], side="left") - first, 0)
    mirror = np.repeat(np.arange(len(mirrored)), counts)
    within = np.arange(len(mirror)) - np.repeat(np.cumsum(counts) - counts, counts)
    owner = first[mirror] + within
    units = np.minimum(owned[owner, 1], mirrored[mirror, 1]) - np.maximum(owned[owner, 0], mirrored[mirror, 0])
    width = int(max(owned[:, 2].max(initial=0), mirrored[:, 2].max(initial=0))) + 1
    pairs = _sums(owned[owner, 2] * width + mirrored[mirror, 2], units * owned[owner, 3])
    return Shares(
        owned=_sums(owned[:, 2], (owned[:, 1] - owned[:, 0]) * owned[:, 3]),
        mirrored={divmod(pair, width): size for pair, size in pairs.items()},
    )


def place_mirrors(plan: Plan, cluster: Cluster, lines: Lines) -> Layout:
    """The mirrors that the plan should have.

    Every owner is mirrored on one partner, in another fault domain where the plan has one, and partners are
    mutual as far as possible (see `pair_up`). Mirrors whose owner keeps its partner stay; what an owner took
    over from a slot that left goes to its own partner, so that no pair is left which serves a few units only.
    A slot then keeps, owned and mirrored, at most twice what the largest owner owns: mirrors make memory no
    more uneven than ownership is.

    If one domain has more than half of the slots, not every owner in it finds a partner of its own. Those
    left out are cut over the other domains' slots, in few pieces, so that these keep at most that much or,
    where it is more, their mean; and one unit more, since units are not cut.

    Slots of the plan that are not healthy get no mirrors, and what they own keeps the mirrors that it has.

    Returns:
        The plan's own mirrors, the same object, if nothing is to change.
    """
    healthy = frozenset(cluster.healthy)
    slots = [slot for slot in plan.slots if slot in healthy]
    if plan.redundancy == "none" or len(slots) < 2:
        return plan.mirrors
    domains = cluster.restrict(slots).domains
    sizes = axis_unit_numel(lines)
    shares = mirror_shares(plan.owners, plan.mirrors, sizes)
    owned = {slot: shares.owned.get(slot, 0) for slot in slots}
    partner = pair_up(domains, owned, _partners_so_far(shares, domains))
    alone = [slot for slot in slots if owned[slot] and slot not in partner]
    spread: Assigned = {}
    if alone:
        away = [slot for slot in slots if domains[slot] != domains[alone[0]]]
        loads = _loads(shares, domains, partner)
        spread = _spread(plan, alone, {slot: loads[slot] for slot in away}, sizes, 2 * max(owned.values()))
    cuts = _cuts(plan, domains, partner, spread, sizes)
    return plan.mirrors if cuts == plan.mirrors.cuts else Layout(cuts)


def _rows(layout: Layout, starts: Mapping[str, int], unit_sizes: Mapping[str, int]) -> NDArray[np.int64]:
    """One row ``lo, hi, slot, unit size`` for each interval, ascending; the axes lie end to end."""
    rows = [
        (starts[axis] + lo, starts[axis] + hi, slot, size)
        for axis, size in unit_sizes.items()
        for slot, intervals in layout.by_slot(axis).items()
        for lo, hi in intervals
    ]
    rows.sort()
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def _sums(keys: NDArray[np.int64], values: NDArray[np.int64]) -> dict[int, int]:
    """Key -> the sum of its values."""
    different, where = np.unique(keys, return_inverse=True)
    sums = np.zeros(len(different), dtype=np.int64)
    np.add.at(sums, where, values)
    return dict(zip(different.tolist(), sums.tolist(), strict=True))


def _partners_so_far(shares: Shares, domains: Mapping[int, int]) -> dict[int, int]:
    """Owner -> who mirrors at least half of its state, one-to-one and in another domain.

    Owners whose state is on one slot to the last unit come first: they have found their partner. Others may
    be spread, or have taken over units that are mirrored elsewhere. Where less than half is in one place, most
    of it has to move anyway, and the pairs are better made anew.
    """
    candidates = sorted(
        (-(size * 1_000_000 // shares.owned[owner]), owner, mirror)
        for (owner, mirror), size in shares.mirrored.items()
        if owner in domains
        and mirror in domains
        and domains[owner] != domains[mirror]
        and 2 * size >= shares.owned[owner]
    )
    partner: dict[int, int] = {}
    taken: set[int] = set()
    for _, owner, mirror in candidates:
        if owner not in partner and mirror not in taken:
            partner[owner] = mirror
            taken.add(mirror)
    return partner


def _loads(shares: Shares, slots: Iterable[int], partner: Mapping[int, int]) -> dict[int, int]:
    """Slot -> what it owns and will mirror for sure: its partner's, and what nobody can move."""
    loads = {slot: shares.owned.get(slot, 0) for slot in slots}
    for owner, mirror in partner.items():
        loads[mirror] += shares.owned[owner]
    for (owner, mirror), size in shares.mirrored.items():
        if owner not in loads and mirror in loads:
            loads[mirror] += size
    return loads


def _spread(
    plan: Plan, alone: Iterable[int], loads: Mapping[int, int], sizes: Mapping[str, int], level: int
) -> Assigned:
    """Cuts the state of owners without a partner over slots, in few pieces.

    What is there already stays as far as the limit allows. The rest fills slot after slot, first those that
    mirror the owner anyway and then the emptiest: that adds at most one pair for each owner and each slot.

    Args:
        plan: the plan before.
        alone: the owners.
        loads: slot that may mirror -> what it keeps anyway.
        sizes: axis -> elements of one unit.
        level: what a slot may keep in any case, in elements.
    """
    owned = {owner: {axis: normalize(plan.owners.intervals(axis, owner)) for axis in sizes} for owner in alone}
    total = sum(loads.values())
    total += sum(count_units(todo) * sizes[axis] for rest in owned.values() for axis, todo in rest.items())
    # A slot wastes less than one unit at the end of its room, so that one more for each is enough for all.
    limit = max(level, -(-total // len(loads))) + max(sizes.values())
    rooms = _Rooms({slot: limit - load for slot, load in loads.items()}, sizes)
    known = {
        owner: {slot for axis in sizes for slot in rooms.keep(axis, rest, plan.mirrors.by_slot(axis))}
        for owner, rest in owned.items()
    }
    for owner, rest in owned.items():
        rooms.fill(rest, prefer=known[owner])
    return rooms.assigned


class _Rooms:
    """Slots with room for so many elements, and what was put there."""

    def __init__(self, free: dict[int, int], sizes: Mapping[str, int]) -> None:
        self.assigned: Assigned = {}
        self._free = free
        self._sizes = sizes

    def keep(self, axis: str, rest: dict[str, Intervals], mirrored: Mapping[int, Intervals]) -> list[int]:
        """Leaves in place what fits of what is mirrored already, and takes it off the rest."""
        keeping: list[int] = []
        for slot in sorted(mirrored.keys() & self._free.keys()):
            for lo, hi in intersect(mirrored[slot], rest[axis]):
                stop = min(hi, lo + self._free[slot] // self._sizes[axis])
                if lo < stop:  # not so if the slot is full, or more than that
                    self._give(axis, slot, lo, stop)
                    rest[axis] = subtract(rest[axis], [(lo, stop)])
                    keeping.append(slot)
        return keeping

    def fill(self, rest: Mapping[str, Intervals], prefer: Collection[int]) -> None:
        """Finds room for all of the rest.

        Slot after slot, so that few serve an owner; but of every axis each of them gets its part: a bucket of sums
        is as slow as the slot that mirrors most of it.
        """
        need = sum(count_units(intervals) * self._sizes[axis] for axis, intervals in rest.items())
        parts = self._parts(need, sorted(self._free, key=lambda slot: (slot not in prefer, -self._free[slot], slot)))
        given, total = dict.fromkeys(self._free, 0), 0
        for axis, intervals in rest.items():
            size, units = self._sizes[axis], count_units(intervals)
            if not units:
                continue
            total += units * size
            short = {slot: part * total // need - given[slot] for slot, part in parts.items()}
            counts = _whole_units(short, {slot: free // size for slot, free in self._free.items()}, units, size)
            for slot, (lo, hi) in deal(intervals, counts.items()):
                self._give(axis, slot, lo, hi)
                given[slot] += (hi - lo) * size

    def _parts(self, need: int, order: Sequence[int]) -> dict[int, int]:
        """How much of the need each slot takes, in this order; more than there is room for if all are full."""
        parts: dict[int, int] = {}
        for slot in order:
            part = min(need, self._free[slot])
            if part > 0:
                parts[slot] = part
                need -= part
        if need:  # full everywhere, by mirrors that cannot move: over the limit then
            slot = max(order, key=lambda slot: (self._free[slot] - parts.get(slot, 0), -slot))
            parts[slot] = parts.get(slot, 0) + need
        return parts

    def _give(self, axis: str, slot: int, lo: int, hi: int) -> None:
        self.assigned.setdefault(axis, {}).setdefault(slot, []).append((lo, hi))
        self._free[slot] -= (hi - lo) * self._sizes[axis]


def _whole_units(short: Mapping[int, int], rooms: Mapping[int, int], units: int, size: int) -> dict[int, int]:
    """Shares out units of one size to slots that are short of so much, in whole ones.

    Args:
        short: slot -> elements that it should get.
        rooms: slot -> units that it has room for; also slots that need not get any.
        units: to share out. Only where no slot has room does one get more than that.
        size: elements of a unit.
    """
    counts = dict.fromkeys(rooms, 0)
    for slot, missing in short.items():
        counts[slot] = max(0, min(missing // size, rooms[slot], units))
        units -= counts[slot]
    while units:
        left = {slot: rooms[slot] - counts[slot] for slot in rooms}
        open_to = [slot for slot in short if left[slot] > 0] or [slot for slot in rooms if left[slot] > 0]
        if not open_to:  # full everywhere, by mirrors that cannot move
            counts[max(rooms, key=lambda slot: (left[slot], -slot))] += units
            break
        # Whoever is short of most gets the next one, or all that are left if nobody else can take any.
        slot = max(open_to, key=lambda slot: (short.get(slot, 0) - counts[slot] * size, -slot))
        more = 1 if len(open_to) > 1 else min(units, left[slot])
        counts[slot] += more
        units -= more
    return {slot: count for slot, count in counts.items() if count}


def _cuts(
    plan: Plan, slots: Mapping[int, int], partner: Mapping[int, int], spread: Assigned, axes: Iterable[str]
) -> dict[str, dict[int, Intervals]]:
    """What the partners mirror and what is spread, as a layout has it.

    A slot that mirrors the same units as before keeps their order of storage.
    """
    cuts: dict[str, dict[int, Intervals]] = {}
    for axis in axes:
        before = plan.mirrors.by_slot(axis)
        cut: dict[int, list[Interval]] = {slot: list(new) for slot, new in spread.get(axis, {}).items()}
        for owner, intervals in plan.owners.by_slot(axis).items():
            if owner in partner:
                cut.setdefault(partner[owner], []).extend(intervals)
            elif owner not in slots:
                for slot, mirrored in before.items():
                    cut.setdefault(slot, []).extend(intersect(mirrored, intervals))
        new = {slot: normalize(intervals) for slot, intervals in cut.items() if intervals}
        for slot, intervals in new.items():
            old = before.get(slot, ())
            if old != intervals and normalize(old) == intervals:
                new[slot] = old
        if new:
            cuts[axis] = new
    return cuts
