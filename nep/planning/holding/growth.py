"""How a plan goes on with more slots: who comes takes over from those in its replica that have most."""

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from nep.planning.cluster import Cluster
from nep.planning.holding.assembly import ExpertAxes, assemble, hold_experts
from nep.planning.holding.dealing import Integers, count_cut, redeal_cut
from nep.planning.holding.lanes import Cuts, form_lanes, hold_dense, make_lanes
from nep.planning.holding.replica_cuts import CutsFromScratch, Dealt, Prices, held_by
from nep.planning.intervals import Interval, Intervals, count_units, intersect, normalize, subtract, union
from nep.planning.layout import Layout, Lines, axis_lines, axis_unit_numel
from nep.planning.plan import Lane, Plan

Places = list[tuple[int, tuple[int, ...]]]


def grow(plan: Plan, replicas: Sequence[Sequence[int]], *, cluster: Cluster, lines: Lines, lane_slots: int) -> Plan:
    """The next plan once slots have come. Nothing new is mirrored, as after a failure.

    Args:
        plan: the plan in force; all its slots go on, each in its replica.
        replicas: those of the plan, in its order, with slots that have come; then replicas of such slots alone.
        cluster: every slot, with its health and speed.
        lines: the model's.
        lane_slots: most slots of a lane; a slot that comes joins a lane that has fewer.
    """
    grown = tuple(tuple(sorted(replica)) for replica in replicas)
    speeds, known = cluster.speeds_ppm, frozenset(plan.slots)
    places = _lanes_with(plan, grown, cluster, lane_slots)
    cuts = _dense(plan, places, speeds, lines)
    experts = ExpertAxes.of(lines)
    if experts is not None:
        scratch = CutsFromScratch(Prices.unknown(experts, speeds))
        dealt: list[Dealt] = []
        for replica in grown:
            if known.isdisjoint(replica):
                dealt.append(scratch.deal(replica))
                continue
            held = held_by(plan.holders, experts, replica)
            if not known.issuperset(replica):
                before = count_cut(held, experts.num_experts, experts.units_per_expert)
                came = [place for place, slot in enumerate(replica) if slot not in known]
                after = take_over(before, came, [speeds[slot] for slot in replica], experts.units_per_expert)
                dealt.append(redeal_cut(after, held, experts.units_per_expert))
            else:
                dealt.append([list(of_layer) for of_layer in held])
        cuts |= hold_experts(experts, grown, dealt)
    came_slots = frozenset(slot for replica in grown for slot in replica) - known
    return assemble(
        replicas=grown,
        lanes=make_lanes(places, speeds, plan.global_batch_size),
        cuts=cuts,
        cluster=cluster,
        lines=lines,
        redundancy=plan.redundancy,
        current=plan,
        owners=_handed_over(plan, cuts, came_slots, lines),
        new_mirrors=False,
    )


def take_over(before: Integers, came: Sequence[int], speeds_ppm: Sequence[int], units_per_expert: int) -> Integers:
    """Who holds how much once the slots that have come have their share.

    A layer's units are shared by speed. Who has most for its speed gives first, and of what it has the smallest
    slices, so that an expert which was cut up when a slot left becomes whole again. Experts with several copies
    stay where they are.

    Args:
        before: ``[layers, experts, slots]`` units, all experts complete.
        came: places of the slots that hold nothing.
        speeds_ppm: of each slot of the replica.
        units_per_expert: units of an expert.

    Returns:
        The same after it.
    """
    after = before.copy()
    everything = sum(speeds_ppm)
    for layer, counts in enumerate(after):
        total = int(counts.sum())
        # Layers take turns in who has a unit more.
        parts = {place: total * speeds_ppm[place] for place in came}
        shares = {at: (layer + 1) * part // everything - layer * part // everything for at, part in parts.items()}
        single = counts.sum(axis=1) <= units_per_expert
        given = _give(counts, single, speeds_ppm, sum(shares.values()), layer)
        for expert in sorted(given, key=lambda one: (-given[one], one)):
            for place in came:
                units = min(given[expert], shares[place])
                counts[expert, place] += units
                given[expert] -= units
                shares[place] -= units
    return after


def _give(counts: Integers, movable: np.ndarray, speeds_ppm: Sequence[int], wanted: int, turn: int) -> dict[int, int]:
    """Takes units off slots, in place. Returns expert -> units that are free now."""
    number = counts.shape[1]
    have = counts.sum(axis=0).tolist()
    room = counts[movable].sum(axis=0).tolist()
    heap = [(-have[at] / speeds_ppm[at], (at - turn) % number, at) for at in range(number) if room[at]]
    heapq.heapify(heap)
    takes = [0] * number
    while wanted and heap:
        _, order, at = heap[0]
        takes[at] += 1
        wanted -= 1
        if takes[at] == room[at]:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (-(have[at] - takes[at]) / speeds_ppm[at], order, at))
    given: dict[int, int] = {}
    for at, take in enumerate(takes):
        experts = [expert for expert in np.flatnonzero(counts[:, at]).tolist() if movable[expert]]
        for expert in sorted(experts, key=lambda one: (counts[one, at], one)):
            units = min(take, int(counts[expert, at]))
            if units:
                counts[expert, at] -= units
                given[expert] = given.get(expert, 0) + units
                take -= units
    return given


def _lanes_with(plan: Plan, replicas: Sequence[Sequence[int]], cluster: Cluster, lane_slots: int) -> Places:
    """Lanes by replica: those there are, grown by slots that have come, and new ones for the others."""
    known = frozenset(plan.slots)
    nodes = {slot.index: slot.node for slot in cluster.slots}
    places: Places = []
    for index, replica in enumerate(replicas):
        new = [slot for slot in replica if slot not in known]
        if len(new) == len(replica):
            places += [(index, slots) for _, slots in form_lanes([replica], lane_slots, nodes)]
            continue
        lanes = [list(lane.slots) for lane in plan.lanes if lane.slots[0] in replica]
        for slot in new:
            narrow = [lane for lane in lanes if len(lane) < lane_slots and nodes[lane[0]] == nodes[slot]]
            if narrow:
                min(narrow, key=len).append(slot)
            else:
                lanes.append([slot])
        places += [(index, tuple(sorted(lane))) for lane in lanes]
    return places


def _dense(plan: Plan, places: Places, speeds_ppm: Mapping[int, int], lines: Lines) -> Cuts:
    """What slots hold of everything but experts: as before where a lane is as before, else cut anew."""
    before = {lane.slots for lane in plan.lanes}
    changed = [slots for _, slots in places if slots not in before]
    fresh = hold_dense([Lane(0, slots, 0) for slots in changed], speeds_ppm, lines)
    return {axis: {**plan.holders.by_slot(axis), **by_slot} for axis, by_slot in fresh.items()}


def _handed_over(plan: Plan, cuts: Cuts, came: frozenset[int], lines: Lines) -> Layout:
    """The owners once those with more than their part have given to slots that have come and hold it.

    What an owner does not hold any more is left with it here: `assemble` finds that it has none.
    """
    sizes = axis_unit_numel(lines)
    load = dict.fromkeys((*plan.slots, *came), 0)
    for axis, size in sizes.items():
        held = {slot: normalize(cuts[axis].get(slot, ())) for slot in load}
        for slot, owned in plan.owners.by_slot(axis).items():
            lost = subtract(normalize(owned), held[slot])
            load[slot] += (count_units(owned) - count_units(lost)) * size
            for other in came:
                # As if who comes got all of it: other holders get some, so it ends with a little less than its part.
                load[other] += count_units(intersect(lost, held[other])) * size
    part = sum(load.values()) // len(load)
    owners: dict[str, Mapping[int, Intervals]] = {}
    for axis in axis_lines(lines):
        size, now = sizes[axis], dict(plan.owners.by_slot(axis))
        for slot, owned in plan.owners.by_slot(axis).items():
            for other in sorted(came):
                units = max(0, min(load[slot] - part, part - load[other])) // size
                free = intersect(normalize(owned), normalize(cuts[axis].get(slot, ())))
                gone = _first(intersect(free, normalize(cuts[axis].get(other, ()))), units)
                if gone:
                    now[slot] = owned = subtract(normalize(owned), gone)
                    now[other] = union(now.get(other, ()), gone)
                    load[slot] -= count_units(gone) * size
                    load[other] += count_units(gone) * size
        owners[axis] = now
    return Layout(owners)


def _first(intervals: Intervals, units: int) -> Intervals:
    taken: list[Interval] = []
    for lo, hi in intervals:
        if units <= 0:
            break
        taken.append((lo, min(hi, lo + units)))
        units -= hi - lo
    return tuple(taken)
