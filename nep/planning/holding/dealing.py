"""From how many units of each expert a slot holds to which ones, and back.

Placement counts units: a *cut* is an array ``[layers, experts, slots]`` for the slots of one replica. Layouts
have intervals. Whatever a slot holds already it keeps as far as its count allows, so nothing travels that need
not.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nep.planning.intervals import Interval, Intervals, arrange, count_units, intersect, normalize, subtract

Integers = NDArray[np.int64]

Held = Sequence[Sequence[Intervals]]
"""``[layer][slot of the replica]``: what each slot holds of a layer's experts."""


def count_cut(held: Held, num_experts: int, units_per_expert: int) -> Integers:
    """How many units of each expert each slot holds.

    Args:
        held: of the slots of one replica.
        num_experts: of a layer.
        units_per_expert: units of an expert.

    Returns:
        ``[layers, experts, slots]``.
    """
    layers, slots = len(held), len(held[0])
    # Expert boundaries and interval ends are points on one line; a slot's units up to a point are a sum.
    rows = [
        (layer * slots + place, lo, hi)
        for layer, of_slots in enumerate(held)
        for place, intervals in enumerate(of_slots)
        for lo, hi in intervals
    ]
    counts = np.zeros((layers * slots, num_experts), dtype=np.int64)
    if rows:
        where, lo, hi = np.array(rows, dtype=np.int64).T
        first, last = lo // units_per_expert, (hi - 1) // units_per_expert
        spans = last - first + 1
        row = np.repeat(np.arange(len(rows)), spans)
        expert = first[row] + np.arange(row.size) - np.repeat(np.cumsum(spans) - spans, spans)
        start = expert * units_per_expert
        units = np.minimum(hi[row], start + units_per_expert) - np.maximum(lo[row], start)
        np.add.at(counts, (where[row], expert), units)
    return np.ascontiguousarray(counts.reshape(layers, slots, num_experts).swapaxes(1, 2))


def deal_cut(cut: Integers, units_per_expert: int) -> list[list[Intervals]]:
    """Gives each slot its units, from scratch: an expert is cut into one run for each slot, in order.

    Args:
        cut: units of each expert on each slot; an expert with more than all its units has whole copies only.
        units_per_expert: units of an expert.

    Returns:
        ``[layer][slot]``, in storage order. Layers that are cut alike share their lists.
    """
    known: dict[bytes, list[Intervals]] = {}
    dealt: list[list[Intervals]] = []
    for counts in cut:
        key = counts.tobytes()
        if key not in known:
            known[key] = _deal_layer(counts, units_per_expert)
        dealt.append(known[key])
    return dealt


def redeal_cut(cut: Integers, held: Held, units_per_expert: int) -> list[list[Intervals]]:
    """Gives each slot its units so that as few as possible change slots.

    A slot keeps what it holds of an expert, up to its count. What others gave up or lost goes in runs to those
    that get more, first to a neighbour on the line, whose piece then grows instead of being joined by another.
    Slots none of whose counts change keep exactly what they have, in the same order of storage.

    Args:
        cut: units of each expert on each slot.
        held: what the slots hold now. Where several hold the same unit and the cut has it once, the first of
            them that may keeps it.
        units_per_expert: units of an expert.

    Returns:
        ``[layer][slot]``, in storage order. Layers that are and were cut alike share their lists.
    """
    num_experts = cut.shape[1]
    before = count_cut(held, num_experts, units_per_expert)
    changed = (before != cut).any(axis=2)
    for layer, of_slots in enumerate(held):
        everything = [interval for intervals in of_slots for interval in intervals]
        if count_units(everything) > count_units(normalize(everything)):
            # Some unit is held twice: where the cut has no copies, equal counts may hide that another is missing.
            changed[layer] |= cut[layer].sum(axis=1) <= units_per_expert
    dealt: list[list[Intervals]] = []
    known: dict[tuple[bytes, tuple[Intervals, ...]], list[Intervals]] = {}
    for layer, of_slots in enumerate(held):
        key = (cut[layer].tobytes(), tuple(of_slots))
        if key in known:
            dealt.append(known[key])
            continue
        now = list(of_slots)
        fresh: dict[int, list[Interval]] = {}
        gone: list[Interval] = []
        for expert in np.flatnonzero(changed[layer]).tolist():
            whole = (expert * units_per_expert, (expert + 1) * units_per_expert)
            gone.append(whole)
            for place, intervals in _redeal_expert(whole, cut[layer, expert].tolist(), of_slots):
                fresh.setdefault(place, []).extend(intervals)
        if gone:
            touched = {place for place, had in enumerate(before[layer][changed[layer]].T) if had.any()} | fresh.keys()
            for place in sorted(touched):
                kept = subtract(of_slots[place], gone)
                now[place] = _keep_order(of_slots[place], (*kept, *fresh.get(place, ())), units_per_expert)
        known[key] = now
        dealt.append(now)
    return dealt


def _deal_layer(counts: Integers, units_per_expert: int) -> list[Intervals]:
    """One layer's ``[experts, slots]``."""
    size = units_per_expert
    ends = np.cumsum(counts, axis=1)
    # Copies are whole, and each begins where the expert does.
    ends[ends[:, -1] > size] = size
    place, expert = np.nonzero(counts.T)
    units = counts[expert, place]
    hi = expert * size + ends[expert, place]
    dealt: list[Intervals] = []
    full: list[list[Interval]] = [[] for _ in range(counts.shape[1])]
    slices: list[list[Interval]] = [[] for _ in range(counts.shape[1])]
    for at, start, stop in zip(place.tolist(), (hi - units).tolist(), hi.tolist(), strict=True):
        if stop - start < size:
            slices[at].append((start, stop))
        elif full[at] and full[at][-1][1] == start:
            full[at][-1] = (full[at][-1][0], stop)
        else:
            full[at].append((start, stop))
    for of_full, of_slices in zip(full, slices, strict=True):
        dealt.append((*of_full, *of_slices))
    return dealt


def _redeal_expert(whole: Interval, counts: Sequence[int], held: Sequence[Intervals]) -> list[tuple[int, Intervals]]:
    """Which units of one expert each slot that shall have some gets."""
    lo, hi = whole
    if sum(counts) > hi - lo:
        return [(place, (whole,)) for place, count in enumerate(counts) if count]
    mine: dict[int, Intervals] = {}
    free: Intervals = (whole,)
    for place, count in enumerate(counts):
        if count:
            own = intersect([one for one in held[place] if one[0] < hi and lo < one[1]], free)
            mine[place] = _first_units(own, count)
            free = subtract(free, mine[place])
    needs = {place: counts[place] - count_units(own) for place, own in mine.items()}
    for start, stop in free:
        for place, run in _share_run(start, stop, needs, mine):
            mine[place] = normalize((*mine[place], run))
    return list(mine.items())


def _first_units(intervals: Intervals, count: int) -> Intervals:
    """The first so many units, but of the longest interval first, so that few pieces are left."""
    kept: list[Interval] = []
    for lo, hi in sorted(intervals, key=lambda one: (one[0] - one[1], one)):
        if count <= 0:
            break
        kept.append((lo, min(hi, lo + count)))
        count -= hi - lo
    return normalize(kept)


def _share_run(lo: int, hi: int, needs: dict[int, int], mine: dict[int, Intervals]) -> list[tuple[int, Interval]]:
    """Shares out a run of units without a slot; takes what is given off ``needs``."""
    given: list[tuple[int, Interval]] = []

    def give(place: int, start: int, stop: int) -> None:
        needs[place] -= stop - start
        given.append((place, (start, stop)))

    for place, need in needs.items():
        if need and lo < hi and any(end == lo for _, end in mine[place]):
            stop = min(hi, lo + need)
            give(place, lo, stop)
            lo = stop
    for place, need in needs.items():
        if need and lo < hi and any(start == hi for start, _ in mine[place]):
            start = max(lo, hi - need)
            give(place, start, hi)
            hi = start
    for place, need in needs.items():
        if need and lo < hi:
            stop = min(hi, lo + need)
            give(place, lo, stop)
            lo = stop
    return given


def _keep_order(before: Intervals, after: Sequence[Interval], units_per_expert: int) -> Intervals:
    """Storage order; the tuple from before where the units are the same."""
    arranged = arrange(after, units_per_expert)
    return before if normalize(before) == normalize(after) else arranged
