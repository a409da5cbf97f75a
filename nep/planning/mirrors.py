"""Where mirrors go: each owner's whole state to one partner, in another fault domain where there is one.

Who is whose partner is decided in `nep.planning.pairing`; here that becomes a layout.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nep.planning.assignment import Assigned
from nep.planning.cluster import Cluster
from nep.planning.intervals import Interval, Intervals, count_units, intersect, normalize, subtract
from nep.planning.layout import Layout, Lines, axis_unit_numel
from nep.planning.pairing import pair_up
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
    slots, sizes = _sums(owned[:, 2:3], (owned[:, 1] - owned[:, 0]) * owned[:, 3])
    pairs, common = _sums(np.stack([owned[owner, 2], mirrored[mirror, 2]], axis=1), units * owned[owner, 3])
    return Shares(
        owned={slot: size for (slot,), size in zip(slots, sizes, strict=True)},
        mirrored={(one, other): size for (one, other), size in zip(pairs, common, strict=True)},
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
    mirrors = _layout(plan, domains, partner, spread, sizes)
    return plan.mirrors if mirrors == plan.mirrors else mirrors


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


def _sums(keys: NDArray[np.int64], values: NDArray[np.int64]) -> tuple[list[list[int]], list[int]]:
    """The different rows of ``keys`` and the sum of the values of each."""
    if not len(keys):
        return [], []
    different, where = np.unique(keys, axis=0, return_inverse=True)
    sums = np.zeros(len(different), dtype=np.int64)
    np.add.at(sums, where.reshape(-1), values)
    return different.tolist(), sums.tolist()


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
    owned = {(owner, axis): plan.owners.intervals(axis, owner) for owner in alone for axis in sizes}
    total = sum(loads.values()) + sum(count_units(intervals) * sizes[axis] for (_, axis), intervals in owned.items())
    # One unit of slack for each slot is never used up by what does not fit at the end of its room.
    limit = max(level, -(-total // len(loads))) + max(sizes.values())
    room = {slot: limit - load for slot, load in loads.items()}
    assigned: Assigned = {}

    def give(axis: str, slot: int, interval: Interval) -> None:
        assigned.setdefault(axis, {}).setdefault(slot, []).append(interval)
        room[slot] -= (interval[1] - interval[0]) * sizes[axis]

    served: dict[int, set[int]] = {}
    for (owner, axis), intervals in owned.items():
        rest = normalize(intervals)
        for slot, mirrored in sorted(plan.mirrors.by_slot(axis).items()) if rest else ():
            if slot not in room:
                continue
            for lo, hi in intersect(mirrored, rest):
                stop = min(hi, lo + max(0, room[slot]) // sizes[axis])
                if lo < stop:
                    give(axis, slot, (lo, stop))
                    served.setdefault(owner, set()).add(slot)
                    rest = subtract(rest, [(lo, stop)])
        owned[owner, axis] = rest
    for owner in alone:
        known = served.get(owner, set())
        order = sorted(room, key=lambda slot: (slot not in known, -room[slot], slot))
        for axis, size in sizes.items():
            for lo, hi in owned[owner, axis]:
                while lo < hi:
                    slot = next((slot for slot in order if room[slot] >= size), -1)
                    stop = min(hi, lo + room[slot] // size) if slot >= 0 else hi
                    if slot < 0:  # full everywhere, by mirrors that cannot move: over the limit then
                        slot = max(order, key=lambda slot: (room[slot], -slot))
                    give(axis, slot, (lo, stop))
                    lo = stop
    return assigned


def _layout(
    plan: Plan, slots: Mapping[int, int], partner: Mapping[int, int], spread: Assigned, axes: Iterable[str]
) -> Layout:
    """What the partners mirror and what is spread; a slot that mirrors the same units as before keeps their
    order of storage."""
    cuts: dict[str, dict[int, Intervals]] = {}
    for axis in axes:
        before = plan.mirrors.by_slot(axis)
        cut: dict[int, list[Interval]] = {slot: list(new) for slot, new in spread.get(axis, {}).items()}
        for owner, intervals in plan.owners.by_slot(axis).items():
            if owner in partner:
                cut.setdefault(partner[owner], []).extend(intervals)
            elif owner not in slots:
                for slot, mirrored in before.items():
                    if slot != owner:
                        cut.setdefault(slot, []).extend(intersect(mirrored, intervals))
        new = {slot: normalize(intervals) for slot, intervals in cut.items()}
        cuts[axis] = {
            slot: before[slot] if slot in before and normalize(before[slot]) == intervals else intervals
            for slot, intervals in new.items()
        }
    return Layout(cuts)
