"""Finds the plan for a request: drafts every sensible way to go on, and takes the one that trains fastest.

The measure is time: seconds to get there and then the predicted seconds of the steps for which the plan will
hold. A plan that balances better and is slower loses.
"""

from collections.abc import Callable
from dataclasses import replace

from nep.planning.cluster import Cluster
from nep.planning.degrees import Degrees
from nep.planning.holding.replica_cuts import Way
from nep.planning.holding.replicas import replica_choices
from nep.planning.plan import Plan
from nep.planning.search.choice import WORTH_MOVING, Search
from nep.planning.search.drafts import Draft, Drafter, Replicas
from nep.planning.search.large import gain_anew, seconds_without
from nep.planning.search.report import report_on
from nep.planning.search.request import Planned, PlanRequest
from nep.planning.search.ways import adapted, by_survivors, from_scratch, kept, pinned
from nep.planning.search.with_copies import copied
from nep.planning.validation import check_plan

FULL_SPEED_PPM = 1_000_000

MORE_THAN_LOST = 0.01
"""Part of the experts that a frugal plan may move beyond what was lost."""


def make_plan(request: PlanRequest, *, tell: Callable[[str], None] = lambda _: None) -> Planned:
    """The plan, and what there is to say about it. Equal requests give equal plans.

    Args:
        request: everything that it depends on.
        tell: is told what is being worked on; a large job takes a while.

    Raises:
        ValueError: if the request contradicts itself, or nothing fits into memory.
    """
    _check(request)
    drafter = Drafter(request, tell)
    search = _from_scratch(drafter) if request.current is None else _onward(drafter, request.current)
    if not drafter.is_large:
        search.find_changes()
    best = search.best(request.horizon_steps)
    healthy: Draft | None = best
    if not _is_healthy(request.cluster) or request.current is not None:
        tell("the same job without damage")
        healthy = _healthy(request, best.plan)
    tell("report")
    return report_on(drafter, best, search.drafts, search.refused, healthy)


def _must_copy(request: PlanRequest) -> bool:
    """Where experts are whole and places for copies are given, these are there to be filled."""
    return not request.limits.fractions and request.limits.physical_experts is not None


# From scratch.


def _from_scratch(drafter: Drafter) -> Search:
    """All ways to begin, with as many replicas as asked for, or as many as fit."""
    request, slots = drafter.request, drafter.cluster.healthy
    if request.limits.degrees is not None:
        return _as_pinned(drafter, request.limits.degrees)
    if request.num_replicas is not None:
        return _begin(drafter, request.num_replicas)
    search = Search(_must_copy(request), drafter.tell)
    number = _most_replicas(drafter)
    while number >= 1:
        search = _begin(drafter, number)
        if any(draft.allowed for draft in search.drafts):
            return search
        # One less at a time; where there are hundreds, a few at a time.
        number = min(number - 1, number - len(slots) // 500)
    return search


def _as_pinned(drafter: Drafter, degrees: Degrees) -> Search:
    """What was asked for, and for comparison what else there would be for as many replicas."""
    replicas = degrees.replicas(drafter.cluster.healthy)
    search = Search(False, drafter.tell)
    search.add(f"{degrees}, as asked for", lambda name: pinned(drafter, name, replicas, degrees))
    others = _begin(drafter, len(replicas))
    search.drafts += [replace(draft, allowed=False) for draft in others.drafts]
    search.refused += others.refused
    return search


def _most_replicas(drafter: Drafter) -> int:
    """More replicas than this do not fit, however they are cut: parameters and gradients are held by each."""
    request, slots = drafter.request, drafter.cluster.healthy
    limits = [drafter.room.bytes[slot] for slot in slots]
    known = [limit for limit in limits if limit is not None]
    if len(known) < len(limits):
        raise ValueError(
            "num_replicas (None) means as many as fit, and the memory of some slots is unknown; give num_replicas or "
            "memory_bytes"
        )
    each = request.shape.num_parameters * (request.workload.parameter_bytes + request.workload.accumulation_bytes)
    return max(1, min(len(slots), sum(known) // each))


def _begin(drafter: Drafter, num_replicas: int, current: Plan | None = None, *, cuts_alone: bool = False) -> Search:
    """All ways to form so many replicas, and lanes in them; see `_place_anew`."""
    search = Search(_must_copy(drafter.request), drafter.tell)
    for index, replicas in enumerate(replica_choices(drafter.cluster.healthy, drafter.domains, num_replicas)):
        for width in _widths(drafter, replicas):
            suffix = (", equal replicas" if index else "") + (f", lanes of {width}" if width > 1 else "")
            _place_anew(search, drafter, replicas, width, suffix, current, cuts_alone=cuts_alone)
    return search


def _widths(drafter: Drafter, replicas: Replicas) -> list[int]:
    """Slots of a lane to try: powers of two, and the most that there may be."""
    most = min(drafter.request.limits.max_tp, max(len(replica) for replica in replicas))
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def _place_anew(
    search: Search,
    drafter: Drafter,
    replicas: Replicas,
    width: int,
    suffix: str,
    current: Plan | None,
    *,
    cuts_alone: bool = False,
) -> None:
    """Every way to place experts that the limits allow; or only that with cuts, which is hardly ever beaten."""
    limits = drafter.request.limits

    def placed(way: Way) -> Callable[[str], Draft]:
        return lambda name: from_scratch(
            drafter, name, replicas, width=width, way=way, current=current, unlike=search.drafts
        )

    if limits.fractions:
        cut = search.add("fractional cuts" + suffix, placed("cut"))
        if cuts_alone and cut is not None and limits.physical_experts is None:
            return
    if limits.physical_experts is not None and width == 1:
        search.add("expert copies" + suffix, lambda name: copied(drafter, name, replicas, current))
    search.add("whole experts" + suffix, placed("whole"))
    # By the time of a step the plain way can win by a hair, since it is not what placement goes by.
    search.add("whole experts by load alone" + suffix, placed("plain"), only_if_new=True)


# From a plan in force.


def _onward(drafter: Drafter, current: Plan) -> Search:
    """All ways to go on from a plan."""
    request, healthy = drafter.request, frozenset(drafter.cluster.healthy)
    survivors = tuple(left for slots in current.replicas if (left := tuple(s for s in slots if s in healthy)))
    new = sorted(healthy - set(current.slots))
    if request.num_replicas not in (None, len(current.replicas), len(survivors)) or not survivors:
        return _begin(drafter, request.num_replicas or len(current.replicas), current)
    search = Search(_must_copy(request), drafter.tell)
    grown = _join(survivors, new, drafter)
    _carry_on(search, drafter, current, survivors, grown)
    intact = tuple(slots for slots in current.replicas if healthy.issuperset(slots))
    dropping = 0 < len(intact) < len(current.replicas)
    repaired = next((draft for draft in search.drafts if draft.frugal), None)
    width = min(max(len(lane.slots) for lane in current.lanes), request.limits.max_tp)
    if drafter.is_large and repaired is not None and width == 1:
        gain = gain_anew(drafter, repaired, grown)
        if 1 / (1 - min(gain, 0.99)) <= WORTH_MOVING:
            search.leave_out("experts placed anew", f"would gain {max(gain, 0):.1%} of a step at most, for more moving")
        else:
            _place_anew(search, drafter, grown, width, " placed anew", current, cuts_alone=True)
        least_s = seconds_without(repaired, len(intact)) if dropping else 0.0
        if least_s > repaired.time.total:
            search.leave_out("drop the replica", f"would take about {least_s:.2f} s a step")
            return search
    else:
        _place_anew(search, drafter, grown, width, " placed anew", current)
    if dropping:
        search.add("drop the replica", lambda name: by_survivors(drafter, name, intact, current))
    return search


def _carry_on(search: Search, drafter: Drafter, current: Plan, survivors: Replicas, grown: Replicas) -> None:
    """Ways that leave slots what they have."""
    limits = drafter.request.limits
    has_copies, has_slices = drafter.forms(current)
    if max(len(lane.slots) for lane in current.lanes) > limits.max_tp or (has_slices and not limits.fractions):
        return
    if has_copies and limits.physical_experts is None:
        return
    as_it_is: Draft | None = None
    damaged = sum(map(len, survivors)) < len(current.slots)
    if not damaged:
        as_it_is = search.add("keep the layout", lambda name: kept(drafter, name, current))
    if has_copies:
        search.add("copies moved where it pays", lambda name: copied(drafter, name, survivors, current, adapt=True))
    elif damaged:
        _repair(search, drafter, current, survivors, grown)
    elif limits.fractions and as_it_is is not None:
        base = as_it_is.plan
        search.add("moves that pay", lambda name: adapted(drafter, name, grown, base, current))


def _repair(search: Search, drafter: Drafter, current: Plan, survivors: Replicas, grown: Replicas) -> None:
    """Ways to go on after a loss that leave survivors what they have."""
    # A slot that has come takes over from one that is gone; where lanes are wider that takes another cut.
    single = all(len(lane.slots) == 1 for lane in current.lanes)
    left = grown if single else survivors
    repaired = search.add("repair", lambda name: by_survivors(drafter, name, left, current), frugal=True)
    if repaired is None or not drafter.request.limits.fractions:
        return
    base = repaired.plan
    if left == grown:
        search.add(
            "repair, then a few moves",
            lambda name: adapted(drafter, name, grown, base, current, budget=MORE_THAN_LOST),
            frugal=True,
        )
    search.add("repair, then moves that pay", lambda name: adapted(drafter, name, grown, base, current))


def _join(replicas: Replicas, new: list[int], drafter: Drafter) -> Replicas:
    """Adds slots that have come to the replicas that need them most: those of their own domain, slowest first."""
    grown = [list(slots) for slots in replicas]
    for slot in new:
        domain = drafter.domains[slot]

        def need(index: int, domain: int = domain) -> tuple[bool, int, int]:
            away = all(drafter.domains[other] != domain for other in grown[index])
            return away, sum(drafter.speeds_ppm[other] for other in grown[index]), index

        grown[min(range(len(grown)), key=need)].append(slot)
    return tuple(tuple(sorted(slots)) for slots in grown)


# What it would be like without damage.


def _is_healthy(cluster: Cluster) -> bool:
    return all(
        slot.health in ("idle", "spare") or (slot.health == "healthy" and slot.speed_ppm == FULL_SPEED_PPM)
        for slot in cluster.slots
    )


def _healthy(request: PlanRequest, plan: Plan) -> Draft | None:
    """The best plan from scratch if no slot had failed or were slow; None if even that does not fit."""
    slots = tuple(
        slot
        if slot.health in ("idle", "spare")
        else replace(slot, health="healthy", speed_ppm=max(slot.speed_ppm, FULL_SPEED_PPM))
        for slot in request.cluster.slots
    )
    number = request.num_replicas or len((request.current or plan).replicas)
    whole = replace(request, cluster=Cluster(slots), current=None, num_replicas=number)
    try:
        drafter = Drafter(whole)
        return _begin(drafter, number, cuts_alone=drafter.is_large).best(request.horizon_steps)
    except ValueError:
        return None


def _check(request: PlanRequest) -> None:
    """Makes sure that the request holds together.

    Raises:
        ValueError: with everything that is wrong.
    """
    cluster, limits, shape, workload = request.cluster, request.limits, request.shape, request.workload
    healthy = len(cluster.healthy)
    errors: list[str] = []
    if not healthy:
        errors.append(f"cluster has no healthy slot of {len(cluster.slots)}; repair one, or wake a spare")
    elif request.num_replicas is not None and not 1 <= request.num_replicas <= healthy:
        errors.append(
            f"num_replicas ({request.num_replicas}) must be from 1 to the healthy slots ({healthy}); every replica "
            "needs one"
        )
    if request.horizon_steps < 1:
        errors.append(f"horizon_steps ({request.horizon_steps}) must be at least 1; a plan holds for a step")
    if workload.seq_len > shape.max_seq_len:
        errors.append(f"seq_len ({workload.seq_len}) exceeds max_seq_len ({shape.max_seq_len}) of {shape.name}")
    if workload.parameter_bytes not in request.hardware.flops_per_s:
        errors.append(
            f"parameter_bytes ({workload.parameter_bytes}) is not of hardware profile {request.hardware.name!r}, which "
            f"has {sorted(request.hardware.flops_per_s)}; use one of them or calibrate with that dtype"
        )
    wanted = (shape.num_moe_layers, shape.num_experts)
    if request.loads is not None and request.loads.mean.shape != wanted:
        errors.append(f"loads have shape {request.loads.mean.shape} and {shape.name} has {wanted}; use its own")
    if limits.physical_experts is not None and limits.physical_experts < shape.num_experts:
        errors.append(
            f"physical_experts ({limits.physical_experts}) must be at least the experts ({shape.num_experts}); each "
            "needs a place"
        )
    if limits.max_tp < 1:
        errors.append(f"max_tp ({limits.max_tp}) must be at least 1; 1 means no tensor parallelism")
    if limits.degrees is not None and (request.current is not None or limits.physical_experts is not None):
        errors.append(f"degrees ({limits.degrees}) are for a plan from scratch without expert copies; leave them out")
    if not 0 < limits.memory_share <= 1:
        errors.append(f"memory_share ({limits.memory_share}) must be above 0 and at most 1")
    if request.current is not None:
        unknown = sorted(set(request.current.slots) - {slot.index for slot in cluster.slots})
        if unknown:
            errors.append(
                f"slots {unknown} of plan {request.current.number} are not of the cluster; list failed ones too"
            )
    if errors:
        raise ValueError("; ".join(errors))
    if request.current is not None:
        check_plan(request.current, Drafter(request).lines)
