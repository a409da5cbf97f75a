"""How a plan goes on with fewer slots: survivors keep what they hold and share out what was lost."""

from collections.abc import Mapping

from nep.planning.assembly import assemble
from nep.planning.cluster import Cluster
from nep.planning.intervals import Intervals
from nep.planning.lanes import Cuts, hold_dense, keep_dense, make_lanes
from nep.planning.layout import Lines
from nep.planning.plan import Lane, Plan, Redundancy
from nep.planning.replica_cuts import Prices, repair_cuts


def go_on(
    plan: Plan,
    replicas: tuple[tuple[int, ...], ...],
    *,
    cluster: Cluster,
    lines: Lines,
    prices: Prices | None,
    global_batch_size: int,
    redundancy: Redundancy,
    limits: Mapping[int, int] | None = None,
    new_mirrors: bool = True,
) -> Plan:
    """The next plan of some replicas and slots of a plan.

    Args:
        plan: the plan in force.
        replicas: what is left of those that go on, and slots that have come, each a lane of its own. None empty.
        cluster: every slot, with its health and speed.
        lines: the model's.
        prices: what placement goes by; None for a model without experts.
        global_batch_size: sequences of a step.
        redundancy: where owners are mirrored.
        limits: slot -> units of experts that it has memory for; None: no limit.
        new_mirrors: whether owners without a mirror get one.

    Raises:
        ValueError: if memory cannot hold what was lost.
    """
    speeds = cluster.speeds_ppm
    replica_of = {slot: index for index, replica in enumerate(replicas) for slot in replica}
    left = {slot: speeds[slot] for slot in replica_of}
    known = frozenset(plan.slots)
    new = {slot: speed for slot, speed in left.items() if slot not in known}
    lanes = [tuple(slot for slot in lane.slots if slot in left) for lane in plan.lanes]
    places = [(replica_of[slots[0]], slots) for slots in lanes if slots]
    cuts = keep_dense(plan.holders, [lane.slots for lane in plan.lanes], left, lines)
    if new:
        places = sorted(places + [(replica_of[slot], (slot,)) for slot in new])
        whole = hold_dense([Lane(0, (slot,), 0) for slot in new], new, lines)
        cuts = {axis: {**by_slot, **whole[axis]} for axis, by_slot in cuts.items()}
    if prices is not None:
        cuts |= _keep_experts(plan, replicas, replica_of, prices, limits)
    return assemble(
        replicas=replicas,
        lanes=make_lanes(places, speeds, global_batch_size),
        cuts=cuts,
        cluster=cluster,
        lines=lines,
        redundancy=redundancy,
        current=plan,
        keep_held=True,
        new_mirrors=new_mirrors,
    )


def _keep_experts(
    plan: Plan,
    replicas: tuple[tuple[int, ...], ...],
    replica_of: Mapping[int, int],
    prices: Prices,
    limits: Mapping[int, int] | None,
) -> Cuts:
    """Experts of the replicas: as before, but for what damaged ones lost."""
    whole = frozenset(plan.replicas)
    damaged = [replica for replica in replicas if replica not in whole]
    repaired = repair_cuts(plan.holders, damaged, prices, limits)
    known: dict[int, dict[int, Intervals]] = {}
    cuts: Cuts = {}
    for layer, axis in enumerate(prices.experts.names):
        by_slot = plan.holders.by_slot(axis)
        if id(by_slot) not in known:
            known[id(by_slot)] = {slot: held for slot, held in by_slot.items() if slot in replica_of}
        cuts[axis] = known[id(by_slot)]
        if damaged:
            now = dict(cuts[axis])
            for slots, dealt in zip(damaged, repaired, strict=True):
                now |= zip(slots, dealt[layer], strict=True)
            cuts[axis] = now
    return cuts
