"""The planner: pure functions from the state of the cluster to a plan.

This first planner knows lanes of one slot: the experts of a replica are cut over its slots, everything else
is held whole by every slot. The same arguments give the same plan on every slot, bit for bit.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from nep.planning.assignment import Assigned, Portion, balance, deal, water_fill
from nep.planning.batch import split_sequences
from nep.planning.cluster import Cluster
from nep.planning.intervals import Intervals, arrange, count_units, normalize, segments, subtract, union
from nep.planning.layout import Layout, Line, LineKind, Lines, axis_lines, axis_unit_numel
from nep.planning.mirrors import place_mirrors
from nep.planning.plan import Lane, Plan, Redundancy

Cuts = dict[str, dict[int, Intervals]]


def plan_from_scratch(
    cluster: Cluster,
    lines: Lines,
    *,
    num_replicas: int,
    global_batch_size: int,
    redundancy: Redundancy = "device",
) -> Plan:
    """Plans a job for the healthy slots of a cluster, with mirrors if redundancy asks for them.

    Replicas are contiguous slots whose sizes differ by one at most; each cuts the experts of a layer evenly
    by the line; owners are balanced in bytes, and mirrored in pairs.

    Raises:
        ValueError: with everything that is wrong.
    """
    slots = cluster.healthy
    errors: list[str] = []
    if num_replicas < 1:
        errors.append(f"num_replicas ({num_replicas}) must be at least 1; a job has a copy of the model")
    elif num_replicas > len(slots):
        errors.append(
            f"num_replicas ({num_replicas}) cannot exceed the healthy slots ({len(slots)}); use at most "
            f"{len(slots)} replicas or add slots"
        )
    if global_batch_size < 1:
        errors.append(f"global_batch_size ({global_batch_size}) must be at least 1; give it sequences")
    if redundancy not in get_args(Redundancy):
        errors.append(f"redundancy ({redundancy!r}) must be one of {', '.join(get_args(Redundancy))}")
    if not lines:
        errors.append("lines (none) must have at least one parameter; pass those of the model")
    if errors:
        raise ValueError("; ".join(errors))
    replicas = _even_replicas(slots, num_replicas)
    holders = Layout(
        {axis: _hold_from_scratch(line, replicas) for axis, line in axis_lines(lines).items()},
    )
    plan = Plan(
        number=1,
        slots=slots,
        replicas=replicas,
        lanes=_lanes(replicas, cluster, global_batch_size),
        holders=holders,
        owners=_own(holders, Layout({}), lines),
        mirrors=Layout({}),
        redundancy=redundancy,
        speeds_ppm=_speeds(slots, cluster),
    )
    return replace(plan, mirrors=place_mirrors(plan, cluster, lines))


def plan_after_failure(plan: Plan, cluster: Cluster, lines: Lines) -> Plan:
    """Plans for the slots of a plan that are still healthy, moving no more than was lost.

    Survivors keep what they hold. What nobody in a damaged replica holds any more is spread over its
    survivors, to those with the fewest units first; a replica without survivors disappears. Owners stay;
    units whose owner left go to holders of them. Mirrors stay unless their slot owns the units now: nothing
    new is mirrored, `plan_mirrors` does that later. A draining slot leaves like a failed one, but may still
    be a source.

    Whether the lost owners' state exists anywhere is another question: see `lost_intervals`.

    Args:
        plan: the plan in force.
        cluster: every slot of the plan, with its health now.
        lines: the model's.

    Raises:
        ValueError: if a slot of the plan is not of the cluster, or a lane has several slots.
        RuntimeError: if no slot is left.
    """
    _require_known(plan, cluster)
    healthy = frozenset(cluster.healthy)
    slots = tuple(slot for slot in plan.slots if slot in healthy)
    if not slots:
        raise RuntimeError(f"no slot of plan {plan.number} is healthy; restart from a checkpoint")
    survivors = [tuple(slot for slot in replica if slot in healthy) for replica in plan.replicas]
    replicas = tuple(replica for replica in survivors if replica)
    holders = _hold_after_failure(plan, survivors, lines)
    owners = _own(holders, plan.owners.restrict(slots), lines)
    return replace(
        plan,
        number=plan.number + 1,
        slots=slots,
        replicas=replicas,
        lanes=_lanes(replicas, cluster, plan.global_batch_size),
        holders=holders,
        owners=owners,
        mirrors=_without(plan.mirrors.restrict(slots), owners),
        speeds_ppm=_speeds(slots, cluster),
    )


def plan_mirrors(plan: Plan, cluster: Cluster, lines: Lines) -> Plan:
    """Gives every owner its mirrors, all on one partner as far as possible; see `place_mirrors`.

    Mirrors stay where they are unless their owner's pair is broken, or has to be opened for a slot that lost
    its partner. Units whose owner is new follow it to its own partner.

    Returns:
        The next plan, or the same object if there is nothing to do: everything has its mirror in place,
        redundancy is none, or there is no second slot.

    Raises:
        ValueError: if a slot of the plan is not of the cluster.
    """
    _require_known(plan, cluster)
    mirrors = place_mirrors(plan, cluster, lines)
    if mirrors is plan.mirrors:
        return plan
    return replace(plan, number=plan.number + 1, mirrors=mirrors)


def lost_intervals(plan: Plan, live: Collection[int], lines: Lines) -> list[tuple[str, int, int]]:
    """``(axis, lo, hi)`` with neither a live owner nor a live mirror, in canonical order.

    If there is one, its master weights and moments are gone and the job needs a checkpoint.
    """
    owners, mirrors = plan.owners.restrict(live), plan.mirrors.restrict(live)
    lost: list[tuple[str, int, int]] = []
    for axis, line in axis_lines(lines).items():
        kept = union(owners.covered(axis), mirrors.covered(axis))
        lost += [(axis, lo, hi) for lo, hi in subtract([(0, line.num_units)], kept)]
    return lost


def _require_known(plan: Plan, cluster: Cluster) -> None:
    unknown = sorted(set(plan.slots) - {slot.index for slot in cluster.slots})
    if unknown:
        raise ValueError(
            f"slots {unknown} of plan {plan.number} are not of the cluster; list failed slots too"
        )
    wide = [lane.slots for lane in plan.lanes if len(lane.slots) > 1]
    if wide:
        raise ValueError(f"lanes {wide} have several slots; this planner knows lanes of one slot")


def _even_replicas(slots: Sequence[int], num_replicas: int) -> tuple[tuple[int, ...], ...]:
    sizes = split_sequences(len(slots), [1] * num_replicas)
    ends = [sum(sizes[: index + 1]) for index in range(num_replicas)]
    return tuple(tuple(slots[end - size : end]) for size, end in zip(sizes, ends, strict=True))


def _lanes(replicas: Sequence[Sequence[int]], cluster: Cluster, global_batch_size: int) -> tuple[Lane, ...]:
    places = [(index, slot) for index, replica in enumerate(replicas) for slot in replica]
    speeds = cluster.speeds_ppm
    shares = split_sequences(global_batch_size, [speeds[slot] for _, slot in places])
    return tuple(Lane(index, (slot,), share) for (index, slot), share in zip(places, shares, strict=True))


def _speeds(slots: Iterable[int], cluster: Cluster) -> tuple[int, ...]:
    speeds = cluster.speeds_ppm
    return tuple(speeds[slot] for slot in slots)


def _hold_from_scratch(line: Line, replicas: Iterable[Sequence[int]]) -> dict[int, Intervals]:
    whole = ((0, line.num_units),)
    held: dict[int, Intervals] = {}
    for replica in replicas:
        for index, slot in enumerate(replica):
            if line.kind is LineKind.EXPERTS:
                lo = index * line.num_units // len(replica)
                hi = (index + 1) * line.num_units // len(replica)
                held[slot] = arrange([(lo, hi)], line.units_per_expert)
            else:
                held[slot] = whole
    return held


def _hold_after_failure(plan: Plan, survivors: Sequence[Sequence[int]], lines: Lines) -> Layout:
    """The holders of before without the dead, with what a replica lost spread over its survivors.

    Args:
        plan: the plan in force.
        survivors: for each replica of it, the slots left.
        lines: the model's.
    """
    order = axis_lines(lines)
    unit_numel = axis_unit_numel(lines)
    held: Cuts = {
        axis: {slot: plan.holders.intervals(axis, slot) for replica in survivors for slot in replica}
        for axis in order
    }
    for replica, left in zip(plan.replicas, survivors, strict=True):
        if not left or len(left) == len(replica):
            continue
        numel = dict.fromkeys(left, 0)  # over all axes, to even out what single axes leave uneven
        for axis, by_slot in held.items():
            for slot in left:
                numel[slot] += count_units(by_slot[slot]) * unit_numel[axis]
        for axis, line in order.items():
            kept = normalize({interval for slot in left for interval in held[axis][slot]})
            lost = subtract([(0, line.num_units)], kept)
            if not lost:
                continue
            units = [count_units(held[axis][slot]) for slot in left]
            counts = water_fill(units, count_units(lost), ties=[numel[slot] for slot in left])
            for slot, interval in deal(lost, zip(left, counts, strict=True)):
                held[axis][slot] = arrange((*held[axis][slot], interval), line.units_per_expert)
                numel[slot] += count_units([interval]) * unit_numel[axis]
    return Layout(held)


def _own(holders: Layout, owners: Layout, lines: Lines) -> Layout:
    """Leaves owners as they are and gives each unit without an owner to one of its holders, even in bytes."""
    unit_numel = axis_unit_numel(lines)
    loads = _state_numel([owners], holders.slots(), unit_numel)
    portions: list[Portion] = []
    for position, (axis, line) in enumerate(axis_lines(lines).items()):
        orphans = subtract([(0, line.num_units)], owners.covered(axis))
        for lo, hi, candidates in segments(holders.by_slot(axis), orphans):
            if not candidates:
                raise ValueError(
                    f"nobody holds [{lo}, {hi}) of {axis}; every replica must hold the whole model"
                )
            portions.append(
                Portion(
                    axis=axis,
                    axis_position=position,
                    lo=lo,
                    hi=hi,
                    unit_size=unit_numel[axis],
                    candidates=frozenset(candidates),
                )
            )
    return _add(owners, balance(portions, loads))


def _state_numel(layouts: Iterable[Layout], slots: Iterable[int], sizes: Mapping[str, int]) -> dict[int, int]:
    """Slot -> elements that it has in all the layouts together."""
    numel = dict.fromkeys(slots, 0)
    for layout in layouts:
        for axis, by_slot in layout.cuts.items():
            for slot, intervals in by_slot.items():
                if slot in numel:
                    numel[slot] += count_units(intervals) * sizes[axis]
    return numel


def _add(layout: Layout, assigned: Assigned) -> Layout:
    """A layout with more intervals; what it changes is stored in ascending order."""
    cuts: Cuts = {axis: dict(by_slot) for axis, by_slot in layout.cuts.items()}
    for axis, by_slot in assigned.items():
        cut = cuts.setdefault(axis, {})
        for slot, intervals in by_slot.items():
            cut[slot] = normalize((*cut.get(slot, ()), *intervals))
    return Layout(cuts)


def _without(layout: Layout, other: Layout) -> Layout:
    """A layout less what the same slot has in another one."""
    return Layout(
        {
            axis: {
                slot: subtract(intervals, other.intervals(axis, slot)) for slot, intervals in by_slot.items()
            }
            for axis, by_slot in layout.cuts.items()
        }
    )
