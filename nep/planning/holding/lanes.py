"""Lanes, their shares of the batch, and how they cut everything that is not an expert.

A lane of one slot holds all of it. In a wider one query heads, vocabulary rows and neurons of dense networks
are cut over its slots by speed; KV heads go where their query heads are; norms and routers are everywhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from nep.planning.batch import split_sequences
from nep.planning.holding.assignment import deal
from nep.planning.holding.heads import HeadCut, cut_heads, cut_line, recut_heads
from nep.planning.intervals import Intervals, count_units, normalize, subtract
from nep.planning.layout import Layout, Line, LineKind, Lines, axis_lines
from nep.planning.plan import Lane

Cuts = dict[str, Mapping[int, Intervals]]
"""axis -> slot -> intervals."""


def make_lanes(
    lanes: Iterable[tuple[int, tuple[int, ...]]], speeds_ppm: Mapping[int, int], global_batch_size: int
) -> tuple[Lane, ...]:
    """Shares out the batch by the speed of the lanes.

    Args:
        lanes: (replica, slots) of each, in global batch order.
        speeds_ppm: slot -> relative speed.
        global_batch_size: in sequences.
    """
    places = list(lanes)
    shares = split_sequences(global_batch_size, [sum(speeds_ppm[slot] for slot in slots) for _, slots in places])
    return tuple(Lane(replica, slots, share) for (replica, slots), share in zip(places, shares, strict=True))


def batch_choices(
    lanes: Sequence[Lane], speeds_ppm: Mapping[int, int], micro_batch_size: int = 1
) -> list[tuple[Lane, ...]]:
    """Ways to share the batch of these lanes: as it is, by speed, by the speed of replicas only, and evenly.

    A slow lane holds up its replica in attention, but a fast one that gets a micro-batch more makes a round more.
    Which is worse depends on the numbers. So there is one more way: no more rounds than lanes of equal speed would
    make, and what of these need not be full is left to the slow lanes.
    """
    batch = sum(lane.num_sequences for lane in lanes)
    speeds = [sum(speeds_ppm[slot] for slot in lane.slots) for lane in lanes]
    sizes = [len(lane.slots) for lane in lanes]
    of_replica: dict[int, list[int]] = {}
    for index, lane in enumerate(lanes):
        of_replica.setdefault(lane.replica, []).append(index)
    by_replica, slow_last = [0] * len(lanes), [0] * len(lanes)
    shares = split_sequences(batch, [sum(speeds[index] for index in members) for members in of_replica.values()])
    for members, share in zip(of_replica.values(), shares, strict=True):
        for index, part in zip(members, split_sequences(share, [sizes[index] for index in members]), strict=True):
            by_replica[index] = part
        room = -(-share // (len(members) * micro_batch_size)) * micro_batch_size
        for index in sorted(members, key=lambda index: (-speeds[index], index)):
            slow_last[index] = min(room, share)
            share -= slow_last[index]
    ways = [
        [lane.num_sequences for lane in lanes],
        split_sequences(batch, speeds),
        by_replica,
        split_sequences(batch, sizes),
        slow_last,
    ]
    return [
        tuple(replace(lane, num_sequences=part) for lane, part in zip(lanes, way, strict=True))
        for way in dict.fromkeys(tuple(way) for way in ways)
    ]


def share_by_pace(
    lanes: Sequence[Lane], seconds: Sequence[float], weights: Sequence[int] | None = None
) -> tuple[Lane, ...]:
    """Shares the batch so that replicas which are cut differently would take equally long.

    Args:
        lanes: with the shares that `seconds` were predicted for.
        seconds: what each replica takes for its share; one without sequences gets none.
        weights: of the lanes inside their replicas; None: their slots.
    """
    sequences = [0] * len(seconds)
    for lane in lanes:
        sequences[lane.replica] += lane.num_sequences
    # Integers of nine digits: the same bits everywhere, and finer than any prediction.
    paces = [number / second if second > 0 else 0.0 for number, second in zip(sequences, seconds, strict=True)]
    fastest = max(paces)
    if fastest == 0.0:
        return tuple(lanes)
    shares = split_sequences(sum(sequences), [round(pace / fastest * 1_000_000_000) for pace in paces])
    return share_in_replicas(lanes, shares, weights)


def fill_rounds(
    lanes: Sequence[Lane], seconds: Sequence[float], micro_batch_size: int, weights: Sequence[int] | None = None
) -> tuple[Lane, ...]:
    """Takes from the slowest replicas their last round, if it is not full, and gives it to the fastest others.

    A round of few sequences takes nearly as long as a full one where the slots that have some must send them all
    over the network.

    Args:
        lanes: with the shares that `seconds` were predicted for.
        seconds: what each replica takes for its share.
        micro_batch_size: sequences that a lane runs at a time.
        weights: see `share_by_pace`.
    """
    widths, sequences = [0] * len(seconds), [0] * len(seconds)
    for lane in lanes:
        widths[lane.replica] += micro_batch_size
        sequences[lane.replica] += lane.num_sequences
    slowest = max(seconds)
    late = [second >= slowest * (1 - 1e-9) for second in seconds]
    left = 0
    for index, width in enumerate(widths):
        over = sequences[index] % width
        if late[index] and over < sequences[index]:
            sequences[index] -= over
            left += over
    others = sorted((index for index in range(len(seconds)) if not late[index]), key=lambda i: (seconds[i], i))
    if not left or not others:
        return tuple(lanes)
    # Places in rounds that are begun, then a round more each, the fastest first.
    for index in others:
        more = min(left, -sequences[index] % widths[index])
        sequences[index] += more
        left -= more
    while left:
        for index in others:
            more = min(left, widths[index])
            sequences[index] += more
            left -= more
    return share_in_replicas(lanes, sequences, weights)


def share_in_replicas(
    lanes: Sequence[Lane], sequences: Sequence[int], weights: Sequence[int] | None = None
) -> tuple[Lane, ...]:
    """The lanes with these sequences of each replica, shared out by weights (none, or nothing but zeros: by slots)."""
    sizes = [len(lane.slots) for lane in lanes]
    members: dict[int, list[int]] = {}
    for index, lane in enumerate(lanes):
        members.setdefault(lane.replica, []).append(index)
    shared = list(lanes)
    for replica, indices in members.items():
        inside = [(weights or sizes)[index] for index in indices]
        parts = split_sequences(sequences[replica], inside if any(inside) else [sizes[index] for index in indices])
        for index, part in zip(indices, parts, strict=True):
            if part != lanes[index].num_sequences:
                shared[index] = replace(lanes[index], num_sequences=part)
    return tuple(shared)


def weights_of(lanes: Sequence[Lane], speeds_ppm: Mapping[int, int]) -> list[int]:
    """What the replicas' shares follow inside them, but for rounding: slots, speeds, or neither (the shares then)."""
    members: dict[int, list[int]] = {}
    for index, lane in enumerate(lanes):
        members.setdefault(lane.replica, []).append(index)
    sizes = [len(lane.slots) for lane in lanes]
    speeds = [sum(speeds_ppm[slot] for slot in lane.slots) for lane in lanes]
    found = [lane.num_sequences for lane in lanes]
    for indices in members.values():
        shares = [lanes[index].num_sequences for index in indices]
        for weights in (sizes, speeds):
            parts = split_sequences(sum(shares), [weights[index] for index in indices])
            if all(abs(share - part) <= 1 for share, part in zip(shares, parts, strict=True)):
                for index in indices:
                    found[index] = weights[index]
                break
    return found


def form_lanes(
    replicas: Sequence[Sequence[int]], width: int, domains: Mapping[int, int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Divides replicas into lanes of at most ``width`` neighbours of one scale-up domain, as equal as possible."""
    lanes: list[tuple[int, tuple[int, ...]]] = []
    for index, replica in enumerate(replicas):
        if width == 1:
            lanes += [(index, (slot,)) for slot in replica]
            continue
        by_domain: dict[int, list[int]] = {}
        for slot in replica:
            by_domain.setdefault(domains[slot], []).append(slot)
        for slots in by_domain.values():
            start = 0
            for size in split_sequences(len(slots), [1] * -(-len(slots) // width)):
                lanes.append((index, tuple(slots[start : start + size])))
                start += size
    return lanes


def hold_dense(lanes: Iterable[Lane], speeds_ppm: Mapping[int, int], lines: Lines) -> Cuts:
    """What each slot holds of everything but experts, from scratch.

    Axes that are cut alike share their mapping.
    """
    lanes = list(lanes)
    order = _dense_lines(lines)
    kv_heads = _kv_heads(order)
    known: dict[tuple[LineKind, int, int], Mapping[int, Intervals]] = {}
    cuts: Cuts = {}
    for axis, line in order.items():
        heads_of = _query_heads(order, line) if line.kind is LineKind.KV_HEADS else line.num_units
        kv = kv_heads.get(line.layer, 1)
        key = (line.kind, line.num_units, heads_of if line.kind is LineKind.KV_HEADS else kv)
        if key not in known:
            cut: dict[int, Intervals] = {}
            whole = ((0, line.num_units),)
            for lane in lanes:
                if len(lane.slots) == 1:
                    cut[lane.slots[0]] = whole
                else:
                    speeds = [speeds_ppm[slot] for slot in lane.slots]
                    cut |= zip(lane.slots, _cut_axis(line, heads_of, kv, speeds), strict=True)
            known[key] = cut
        cuts[axis] = known[key]
    return cuts


def keep_dense(holders: Layout, before: Sequence[Sequence[int]], speeds_ppm: Mapping[int, int], lines: Lines) -> Cuts:
    """The same after slots left: survivors of a lane keep what they hold and share out what it lost.

    Args:
        holders: so far.
        before: slots of each lane so far.
        speeds_ppm: of the slots that stay; others are not in it.
        lines: the model's.
    """
    order = _dense_lines(lines)
    known: dict[int, dict[int, Intervals]] = {}
    cuts: Cuts = {}
    damaged = [lane for lane in before if len(lane) > 1 and 0 < sum(slot in speeds_ppm for slot in lane) < len(lane)]
    for axis in order:
        by_slot = holders.by_slot(axis)
        if id(by_slot) not in known:
            known[id(by_slot)] = {slot: cut for slot, cut in by_slot.items() if slot in speeds_ppm}
        cuts[axis] = known[id(by_slot)]
    for lane in damaged:
        for axis, line in order.items():
            if line.kind not in (LineKind.KV_HEADS, LineKind.WHOLE):
                changed = _recut_axis(
                    line, _kv_heads(order).get(line.layer, 1), holders.by_slot(axis), lane, speeds_ppm
                )
                cuts[axis] = {**cuts[axis], **changed}
        for axis, line in order.items():
            if line.kind is LineKind.KV_HEADS:
                query = next(
                    a for a, other in order.items() if other.kind is LineKind.HEADS and other.layer == line.layer
                )
                size = order[query].num_units // line.num_units
                left = [slot for slot in lane if slot in speeds_ppm]
                needed = {slot: _kv_of(cuts[query].get(slot, ()), size) for slot in left}
                cuts[axis] = {**cuts[axis], **needed}
    return cuts


def _dense_lines(lines: Lines) -> dict[str, Line]:
    return {axis: line for axis, line in axis_lines(lines).items() if line.kind is not LineKind.EXPERTS}


def _kv_heads(order: Mapping[str, Line]) -> dict[int, int]:
    """Layer -> its KV heads."""
    return {line.layer: line.num_units for line in order.values() if line.kind is LineKind.KV_HEADS}


def _query_heads(order: Mapping[str, Line], line: Line) -> int:
    """Query heads of the layer of a line of KV heads."""
    found = [other.num_units for other in order.values() if other.kind is LineKind.HEADS and other.layer == line.layer]
    return found[0] if found else line.num_units


def _kv_of(query: Intervals, group_size: int) -> Intervals:
    return normalize((lo // group_size, -(-hi // group_size)) for lo, hi in query)


def _cut_axis(line: Line, num_heads: int, num_kv_heads: int, speeds_ppm: Sequence[int]) -> list[Intervals]:
    """One lane's cut of one axis."""
    if line.kind is LineKind.WHOLE:
        return [((0, 1),)] * len(speeds_ppm)
    if line.kind is LineKind.HEADS:
        return list(cut_heads(line.num_units, num_kv_heads, speeds_ppm).query)
    if line.kind is LineKind.KV_HEADS:
        return list(cut_heads(num_heads, line.num_units, speeds_ppm).kv)
    return [(one,) if one[0] < one[1] else () for one in cut_line(line.num_units, speeds_ppm)]


def _recut_axis(
    line: Line,
    num_kv_heads: int,
    held: Mapping[int, Intervals],
    lane: Sequence[int],
    speeds_ppm: Mapping[int, int],
) -> dict[int, Intervals]:
    """What survivors of a lane hold of one axis."""
    left = [slot for slot in lane if slot in speeds_ppm]
    if line.kind is LineKind.HEADS:
        cut = HeadCut(
            num_heads=line.num_units,
            num_kv_heads=num_kv_heads,
            query=tuple(held.get(slot, ()) for slot in lane),
            speeds_ppm=tuple(speeds_ppm.get(slot, 1) for slot in lane),
        )
        return dict(zip(left, recut_heads(cut, [speeds_ppm.get(slot) for slot in lane]).query, strict=True))
    mine = {slot: normalize(held.get(slot, ())) for slot in left}
    lost = subtract([(0, line.num_units)], [one for own in mine.values() for one in own])
    # What each would have of a line cut by speed, less what it has.
    want = [hi - lo for lo, hi in cut_line(line.num_units, [speeds_ppm[slot] for slot in left])]
    short = [max(0, share - count_units(mine[slot])) for share, slot in zip(want, left, strict=True)]
    weights = short if any(short) else [1] * len(left)
    for slot, run in deal(lost, zip(left, split_sequences(count_units(lost), weights), strict=True)):
        mine[slot] = normalize((*mine[slot], run))
    return mine
