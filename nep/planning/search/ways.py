"""Ways to place experts and to go on from a plan in force, each of them a draft; those with copies are elsewhere."""

from collections.abc import Sequence
from dataclasses import replace

from nep.planning.degrees import Degrees
from nep.planning.holding.assembly import assemble, hold_experts
from nep.planning.holding.lanes import Cuts, form_lanes, hold_dense, make_lanes
from nep.planning.holding.mirrors import place_mirrors
from nep.planning.holding.replica_cuts import CutsFromScratch, Way, adapt_cuts
from nep.planning.holding.survivors import go_on
from nep.planning.layout import Layout
from nep.planning.plan import Plan
from nep.planning.search.drafts import Draft, Drafter, NothingNew, Replicas
from nep.planning.search.room import Limits
from nep.planning.search.with_copies import shares_of


def from_scratch(
    drafter: Drafter,
    name: str,
    replicas: Replicas,
    *,
    width: int = 1,
    way: Way = "cut",
    current: Plan | None = None,
    unlike: Sequence[Draft] = (),
) -> Draft:
    """Experts placed anew; with a plan in force such that few units change slots.

    Args:
        drafter: makes the draft.
        name: of the draft.
        replicas: slots of each.
        width: most slots of a lane.
        way: how experts may be placed.
        current: the plan in force.
        unlike: drafts that it should differ from.

    Raises:
        ValueError: if it does not fit into memory.
        NothingNew: if it is like one of the others.
    """
    prices = drafter.prices(replicas, width)
    batch = drafter.request.workload.global_batch_size
    lanes = make_lanes(form_lanes(replicas, width, drafter.domains), drafter.speeds_ppm, batch)
    slots_of = [lane.slots for lane in lanes]
    dense = hold_dense(lanes, drafter.speeds_ppm, drafter.lines)
    holders = None if current is None else current.holders

    def build(limits: Limits | None) -> Plan:
        scratch = CutsFromScratch(prices, limits, way=way)
        cuts = hold_experts(drafter.experts, replicas, [scratch.deal(replica, holders) for replica in replicas])
        for other in unlike:
            if [lane.slots for lane in other.plan.lanes] == slots_of and _holds(other.plan, cuts):
                raise NothingNew(other.name)
        return assemble(
            replicas=replicas,
            lanes=lanes,
            cuts=dense | cuts,
            cluster=drafter.cluster,
            lines=drafter.lines,
            redundancy=drafter.request.redundancy,
            current=current,
        )

    return drafter.fitted(name, build, current)


def pinned(drafter: Drafter, name: str, replicas: Replicas, degrees: Degrees) -> Draft:
    """Replicas, lanes and experts cut just as somebody asked for.

    Raises:
        ValueError: if it does not fit into memory.
    """
    experts, speeds = drafter.experts, drafter.speeds_ppm
    together = dict.fromkeys(drafter.domains, 0)  # lanes may cross nodes if that is what was asked for
    places = form_lanes(replicas, degrees.tp, together)
    lanes = make_lanes(places, speeds, drafter.request.workload.global_batch_size)
    cuts = [degrees.cut_experts(slots, speeds, experts.num_experts, experts.units_per_expert) for slots in replicas]
    held = hold_experts(experts, replicas, [[cut] * len(experts.names) for cut in cuts])

    def build(limits: Limits | None) -> Plan:
        return assemble(
            replicas=replicas,
            lanes=lanes,
            cuts=hold_dense(lanes, speeds, drafter.lines) | held,
            cluster=drafter.cluster,
            lines=drafter.lines,
            redundancy=drafter.request.redundancy,
        )

    return drafter.fitted(name, build, None)


def by_survivors(drafter: Drafter, name: str, replicas: Replicas, current: Plan) -> Draft:
    """What is left of replicas keeps what it has and takes over what was lost.

    Raises:
        ValueError: if it does not fit into memory.
    """

    def build(limits: Limits | None) -> Plan:
        return go_on(
            current,
            replicas,
            cluster=drafter.cluster,
            lines=drafter.lines,
            prices=drafter.prices(replicas),
            global_batch_size=drafter.request.workload.global_batch_size,
            redundancy=drafter.request.redundancy,
            limits=limits,
            cut=drafter.request.limits.fractions,
        )

    return drafter.fitted(name, build, current)


def kept(drafter: Drafter, name: str, current: Plan) -> Draft:
    """The plan in force, with its batch shared out by the speeds of now. It is the very plan if nothing changes.

    Raises:
        ValueError: if it does not fit into memory.
    """
    request = drafter.request
    lanes = current.lanes
    if current.global_batch_size != request.workload.global_batch_size:
        places = [(lane.replica, lane.slots) for lane in lanes]
        lanes = make_lanes(places, drafter.speeds_ppm, request.workload.global_batch_size)
    plan = replace(
        current,
        lanes=lanes,
        redundancy=request.redundancy,
        mirrors=current.mirrors if request.redundancy != "none" else Layout({}),
        speeds_ppm=tuple(drafter.speeds_ppm[slot] for slot in current.slots),
    )
    plan = replace(plan, mirrors=place_mirrors(plan, drafter.cluster, drafter.lines))
    copied, cut = drafter.forms(current)
    shares = shares_of(drafter, current) if copied and not cut else None
    return drafter.fitted(name, lambda _: plan, current, lambda: shares)


def adapted(
    drafter: Drafter, name: str, replicas: Replicas, base: Plan, current: Plan, *, budget: float = 1.0
) -> Draft:
    """A plan that grew out of another one by the moves that pay.

    Args:
        drafter: makes the draft.
        name: of the draft.
        replicas: those of the base, with slots that have come, which hold nothing yet.
        base: the plan in force, or what its survivors make of it.
        current: the plan in force.
        budget: part of a replica's units that may move.

    Raises:
        ValueError: if it does not fit into memory, or nothing moves.
    """
    request = drafter.request
    width = max(len(lane.slots) for lane in base.lanes)
    batch = request.workload.global_batch_size
    lanes = make_lanes(form_lanes(replicas, width, drafter.domains), drafter.speeds_ppm, batch)
    dense = hold_dense(lanes, drafter.speeds_ppm, drafter.lines)
    largest = max(len(replica) for replica in replicas)
    cuts = [base.holders.by_slot(axis) for axis in drafter.experts.names]

    def build(limits: Limits | None) -> Plan:
        dealt = adapt_cuts(
            base.holders,
            replicas,
            drafter.prices(replicas, width),
            unit_s=drafter.unit_s(largest),
            budget=budget,
            limits=limits,
        )
        if replicas == base.replicas and all(
            by_slot.get(slot, ()) is held
            for slots, layers in zip(replicas, dealt, strict=True)
            for by_slot, of_layer in zip(cuts, layers, strict=True)
            for slot, held in zip(slots, of_layer, strict=True)
        ):
            raise ValueError("no move pays for itself")
        return assemble(
            replicas=replicas,
            lanes=lanes,
            cuts=dense | hold_experts(drafter.experts, replicas, dealt),
            cluster=drafter.cluster,
            lines=drafter.lines,
            redundancy=request.redundancy,
            current=current,
        )

    return drafter.fitted(name, build, current)


def _holds(plan: Plan, cuts: Cuts) -> bool:
    """Whether slots hold just that of some axes."""
    held = {axis: {slot: units for slot, units in by_slot.items() if units} for axis, by_slot in cuts.items()}
    return all(plan.holders.by_slot(axis) == by_slot for axis, by_slot in held.items())
