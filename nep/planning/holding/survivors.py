"""How a plan goes on with fewer slots: survivors keep what they hold and share out what was lost."""

from collections.abc import Container, Mapping, Sequence

from nep.planning.cluster import Cluster
from nep.planning.holding.assembly import ExpertAxes, assemble
from nep.planning.holding.even_shares import EvenShares
from nep.planning.holding.lanes import Cuts, hold_dense, keep_dense, make_lanes
from nep.planning.holding.replica_cuts import Dealt, Prices, repair_cuts
from nep.planning.intervals import Intervals
from nep.planning.layout import Lines
from nep.planning.plan import Lane, Plan, Redundancy


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
    cut: bool = True,
    new_mirrors: bool = True,
) -> Plan:
    """The next plan of some replicas and slots of a plan.

    Args:
        plan: the plan in force.
        replicas: what is left of those that go on, and slots that have come, each a lane of its own. None empty.
        cluster: every slot, with its health and speed.
        lines: the model's.
        prices: what placement goes by; None: equal loads, as in recovery, where time is short.
        global_batch_size: sequences of a step.
        redundancy: where owners are mirrored.
        limits: slot -> units of experts that it has memory for; None: no limit.
        cut: whether lost experts may be cut.
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
        theirs = hold_dense([Lane(0, (slot,), 0) for slot in new], new, lines)
        cuts = {axis: {**by_slot, **theirs[axis]} for axis, by_slot in cuts.items()}
    experts = ExpertAxes.of(lines)
    if experts is not None:
        intact = frozenset(plan.replicas)
        damaged = [replica for replica in replicas if replica not in intact]
        kept = _kept(plan, experts, replica_of)
        if not damaged:
            cuts |= kept
        elif prices is None:
            cuts |= _share_evenly(experts, kept, damaged, left)
        else:
            repaired = repair_cuts(plan.holders, damaged, prices, limits=limits, cut=cut)
            cuts |= _with(experts, kept, damaged, repaired)
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


def _kept(plan: Plan, experts: ExpertAxes, slots: Container[int]) -> Cuts:
    """What slots hold of the experts; axes that are cut alike share their mapping."""
    known: dict[int, dict[int, Intervals]] = {}
    kept: Cuts = {}
    for axis in experts.names:
        by_slot = plan.holders.by_slot(axis)
        if id(by_slot) not in known:
            known[id(by_slot)] = {slot: held for slot, held in by_slot.items() if slot in slots}
        kept[axis] = known[id(by_slot)]
    return kept


def _share_evenly(
    experts: ExpertAxes, kept: Cuts, damaged: Sequence[Sequence[int]], speeds_ppm: Mapping[int, int]
) -> Cuts:
    """Gives survivors what their replicas lost, as evenly as it goes."""
    shares = EvenShares(experts.num_experts * experts.units_per_expert, experts.units_per_expert, speeds_ppm)
    known: dict[tuple[int, int], Mapping[int, Intervals]] = {}
    cuts: Cuts = {}
    for layer, axis in enumerate(experts.names):
        turn = shares.turn(layer)
        key = (id(kept[axis]), turn)
        if key not in known:
            now = dict(kept[axis])
            for slots in damaged:
                now |= zip(slots, shares.complete(slots, [now.get(slot, ()) for slot in slots], turn), strict=True)
            known[key] = now
        cuts[axis] = known[key]
    return cuts


def _with(experts: ExpertAxes, kept: Cuts, damaged: Sequence[Sequence[int]], repaired: Sequence[Dealt]) -> Cuts:
    """What everybody holds once damaged replicas are repaired; axes that are cut alike share their mapping."""
    known: dict[tuple[int, ...], Mapping[int, Intervals]] = {}
    cuts: Cuts = {}
    for layer, axis in enumerate(experts.names):
        key = (id(kept[axis]), *(id(dealt[layer]) for dealt in repaired))
        if key not in known:
            now = dict(kept[axis])
            for slots, dealt in zip(damaged, repaired, strict=True):
                now |= zip(slots, dealt[layer], strict=True)
            known[key] = now
        cuts[axis] = known[key]
    return cuts
