"""The planner as training calls it: pure functions from the state of the cluster to the next plan.

The same arguments give the same plan on every slot, bit for bit. Nothing is known here of hardware and router:
loads count as equal. `nep.planning.search.make` plans with both.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

from nep.planning.cluster import Cluster
from nep.planning.degrees import Degrees
from nep.planning.holding.assembly import ExpertAxes, assemble, hold_experts
from nep.planning.holding.growth import grow
from nep.planning.holding.lanes import form_lanes, hold_dense, make_lanes
from nep.planning.holding.mirrors import place_mirrors
from nep.planning.holding.replica_cuts import CutsFromScratch, Prices
from nep.planning.holding.replicas import is_even, replica_choices
from nep.planning.holding.survivors import go_on
from nep.planning.intervals import subtract, union
from nep.planning.layout import Lines, axis_lines
from nep.planning.plan import Plan, Redundancy


def plan_from_scratch(
    cluster: Cluster,
    lines: Lines,
    *,
    num_replicas: int,
    global_batch_size: int,
    redundancy: Redundancy = "device",
    lane_slots: int = 1,
    degrees: Degrees | None = None,
) -> Plan:
    """Plans a job for the healthy slots of a cluster, with mirrors if redundancy asks for them.

    Replicas are neighbouring slots whose sizes differ by one at most, inside nodes where that is possible. Each
    has its experts whole as far as they come out even, and cuts the others.

    Args:
        cluster: every slot, with its health and speed.
        lines: the model's.
        num_replicas: data-parallel copies of the model.
        global_batch_size: sequences of a step, shared out by speed.
        redundancy: where owners are mirrored.
        lane_slots: most slots of a lane (tensor parallelism).
        degrees: cut replicas, lanes and experts just so; `num_replicas` and `lane_slots` are theirs then.

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
    if lane_slots < 1:
        errors.append(f"lane_slots ({lane_slots}) must be at least 1; 1 means no tensor parallelism")
    if redundancy not in get_args(Redundancy):
        errors.append(f"redundancy ({redundancy!r}) must be one of {', '.join(get_args(Redundancy))}")
    if not lines:
        errors.append("lines (none) must have at least one parameter; pass those of the model")
    if errors:
        raise ValueError("; ".join(errors))
    nodes = {slot.index: slot.node for slot in cluster.slots}
    if degrees is None:
        choices = replica_choices(slots, nodes, num_replicas)
        replicas = choices[0] if is_even(choices[0]) else choices[-1]
    else:
        replicas, lane_slots = degrees.replicas(slots), degrees.tp
        # Lanes may cross nodes if that is what was asked for.
        nodes = dict.fromkeys(nodes, 0)
    lanes = make_lanes(form_lanes(replicas, lane_slots, nodes), cluster.speeds_ppm, global_batch_size)
    cuts = hold_dense(lanes, cluster.speeds_ppm, lines)
    experts = ExpertAxes.of(lines)
    if experts is not None and degrees is not None:
        cut = partial(
            degrees.cut_experts,
            speeds_ppm=cluster.speeds_ppm,
            num_experts=experts.num_experts,
            units_per_expert=experts.units_per_expert,
        )
        cuts |= hold_experts(experts, replicas, [[cut(replica)] * len(experts.names) for replica in replicas])
    elif experts is not None:
        scratch = CutsFromScratch(Prices.unknown(experts, cluster.speeds_ppm))
        cuts |= hold_experts(experts, replicas, [scratch.deal(replica) for replica in replicas])
    return assemble(replicas=replicas, lanes=lanes, cuts=cuts, cluster=cluster, lines=lines, redundancy=redundancy)


def plan_after_failure(plan: Plan, cluster: Cluster, lines: Lines) -> Plan:
    """Plans for the slots of a plan that are still healthy, moving no more than was lost.

    Survivors keep what they hold. What nobody in a damaged replica holds any more is spread over its survivors,
    so that all are busy equally long; a replica without survivors disappears. Owners stay; units whose owner
    left go to holders of them. Mirrors stay unless their slot owns the units now: nothing new is mirrored,
    `plan_mirrors` does that later. A draining slot leaves like a failed one, but may still be a source.

    Whether the lost owners' state exists anywhere is another question: see `lost_intervals`.

    Args:
        plan: the plan in force.
        cluster: every slot of the plan, with its health now.
        lines: the model's.

    Raises:
        ValueError: if a slot of the plan is not of the cluster.
        RuntimeError: if no slot is left.
    """
    _require_known(plan, cluster)
    healthy = frozenset(cluster.healthy)
    if healthy.isdisjoint(plan.slots):
        raise RuntimeError(f"no slot of plan {plan.number} is healthy; restart from a checkpoint")
    survivors = tuple(left for replica in plan.replicas if (left := tuple(s for s in replica if s in healthy)))
    return go_on(
        plan,
        survivors,
        cluster=cluster,
        lines=lines,
        prices=None,
        global_batch_size=plan.global_batch_size,
        redundancy=plan.redundancy,
        new_mirrors=False,
    )


def plan_with_slots(plan: Plan, cluster: Cluster, lines: Lines, *, num_replicas: int = 1, lane_slots: int = 1) -> Plan:
    """Plans for slots that have come, moving no more than their share.

    Each joins the slowest replica (of equal ones that with most slots of its node) and takes over from those in it
    that have most, which keep the rest. A replica that had disappeared comes back as soon as none would be smaller
    than those of the full cluster; slots of the largest replicas move to it then if those that have come are too few.
    Owners with more than their part give up some to the slots that have come. Nothing new is mirrored, `plan_mirrors`
    does that later.

    Args:
        plan: the plan in force; all its slots are healthy.
        cluster: every slot of the job; the healthy ones that the plan does not use have come.
        lines: the model's.
        num_replicas: what the job aims at.
        lane_slots: most slots of a lane.

    Returns:
        The next plan, or the same object if nobody has come.

    Raises:
        ValueError: if a slot of the plan is not of the cluster, or not healthy.
    """
    _require_known(plan, cluster)
    healthy = frozenset(cluster.healthy)
    if unfit := sorted(set(plan.slots) - healthy):
        raise ValueError(f"slots {unfit} of plan {plan.number} are not healthy; plan for their failure first")
    came = [slot for slot in cluster.healthy if slot not in plan.slots]
    if not came:
        return plan
    speeds, nodes = cluster.speeds_ppm, {slot.index: slot.node for slot in cluster.slots}
    smallest = max(1, len(cluster.slots) // max(1, num_replicas))
    missing = 0
    while (
        len(plan.replicas) + missing < num_replicas and len(healthy) // (len(plan.replicas) + missing + 1) >= smallest
    ):
        missing += 1
    number, before = plan.number, plan
    if missing:
        need = missing * (len(healthy) // (len(plan.replicas) + missing)) - len(came)
        movers = _movers(plan, need, [nodes[slot] for slot in came], nodes)
        if movers:
            plan = plan_after_failure(plan, cluster.with_health(movers, "draining"), lines)
            came = sorted([*came, *movers])
    replicas = [list(replica) for replica in plan.replicas]
    fresh: list[list[int]] = [[] for _ in range(missing)]
    for slot in came:
        pick = [replica for replica in fresh if len(replica) < len(healthy) // (len(plan.replicas) + missing)]
        # A replica that comes back first; then whichever is slowest.
        target = pick[0] if pick else min(replicas + fresh, key=partial(_need_for, slot, speeds, nodes))
        target.append(slot)
    after = grow(plan, [*replicas, *fresh], cluster=cluster, lines=lines, lane_slots=lane_slots)
    return replace(after, number=number + 1) if before is not plan else after


def _need_for(
    slot: int, speeds: Mapping[int, int], nodes: Mapping[int, int], replica: Sequence[int]
) -> tuple[int, int]:
    """The less, the better is a slot for a replica: speed first, then how many of its node are there."""
    return sum(speeds[one] for one in replica), -sum(nodes[one] == nodes[slot] for one in replica)


def _movers(plan: Plan, need: int, came_on: Sequence[int], nodes: Mapping[int, int]) -> list[int]:
    """Slots that leave the largest replicas for one that comes back: those on its nodes first, then the last ones."""
    sizes = [list(replica) for replica in plan.replicas]
    movers: list[int] = []
    for _ in range(need):
        largest = max(sizes, key=len)
        place = max(range(len(largest)), key=lambda place: (came_on.count(nodes[largest[place]]), place))
        movers.append(largest.pop(place))
    return movers


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
        raise ValueError(f"slots {unknown} of plan {plan.number} are not of the cluster; list failed slots too")
