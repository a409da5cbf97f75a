"""Finds the plan for a request: drafts every sensible way to go on, and takes the one that trains fastest.

The measure is time: seconds to get there and then the predicted seconds of the steps for which the plan will
hold. A plan that balances better and is slower loses.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from nep.planning.cluster import Cluster
from nep.planning.holding.replica_cuts import Way
from nep.planning.holding.replicas import replica_choices
from nep.planning.plan import Plan
from nep.planning.search.drafts import Draft, Drafter, NothingNew, Replicas
from nep.planning.search.report import Refused, report_on
from nep.planning.search.request import Planned, PlanRequest
from nep.planning.validation import check_plan

FULL_SPEED_PPM = 1_000_000

MORE_THAN_LOST = 0.01
"""Part of the experts that a frugal plan may move beyond what was lost."""

WORTH_MOVING = 1.02
"""After a loss, how many times the seconds of the best plan a frugal one may take."""


def make_plan(request: PlanRequest) -> Planned:
    """The plan, and what there is to say about it. Equal requests give equal plans.

    Args:
        request: everything that it depends on.

    Raises:
        ValueError: if the request contradicts itself, or nothing fits into memory.
    """
    _check(request)
    drafter = Drafter(request)
    search = _from_scratch(drafter) if request.current is None else _onward(drafter, request.current)
    best = search.best(request.horizon_steps)
    healthy: Draft | None = best
    if not _is_healthy(request.cluster) or request.current is not None:
        healthy = _healthy(request, best.plan)
    return report_on(drafter, best, search.drafts, search.refused, healthy)


@dataclass(eq=False)
class _Search:
    """Drafts, and ways that led nowhere.

    Attributes:
        must_copy: only plans with expert copies may be chosen.
    """

    must_copy: bool
    drafts: list[Draft] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def add(
        self, name: str, make: Callable[[str], Draft], *, frugal: bool = False, only_if_new: bool = False
    ) -> Draft | None:
        """Tries one way; None if it led nowhere, or where another one leads."""
        try:
            draft = make(name)
            draft = replace(draft, frugal=frugal, allowed=draft.shares is not None or not self.must_copy)
        except NothingNew as same:
            if not only_if_new:
                self.refused.append(Refused(name, f"comes to the same as {same}"))
            return None
        except ValueError as error:
            self.refused.append(Refused(name, str(error)))
            return None
        self.drafts.append(draft)
        return draft

    def best(self, steps: int) -> Draft:
        """The draft with the fewest seconds until so many steps are done; the first of equals.

        After a loss a frugal one is preferred: the job stands still while state travels, and what others gain can
        still be had when it runs.

        Raises:
            ValueError: if there is none.
        """
        allowed = [draft for draft in self.drafts if draft.allowed]
        if not allowed:
            raise ValueError(self.refused[0].why)
        best = min(allowed, key=lambda draft: draft.seconds(steps))
        frugal = [draft for draft in allowed if draft.frugal]
        first = min(frugal, key=lambda draft: draft.seconds(steps), default=best)
        return first if first.seconds(steps) <= WORTH_MOVING * best.seconds(steps) else best


def _must_copy(request: PlanRequest) -> bool:
    """Where experts are whole and places for copies are given, these are there to be filled."""
    return not request.limits.fractions and request.limits.physical_experts is not None


# From scratch.


def _from_scratch(drafter: Drafter) -> _Search:
    """All ways to begin, with as many replicas as asked for, or as many as fit."""
    request, slots = drafter.request, drafter.cluster.healthy
    if request.num_replicas is not None:
        return _begin(drafter, request.num_replicas)
    search = _Search(must_copy=_must_copy(request))
    number = _most_replicas(drafter)
    while number >= 1:
        search = _begin(drafter, number)
        if any(draft.allowed for draft in search.drafts):
            return search
        # One less at a time; where there are hundreds, a few at a time.
        number = min(number - 1, number - len(slots) // 500)
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


def _begin(drafter: Drafter, num_replicas: int, current: Plan | None = None) -> _Search:
    """All ways to form so many replicas, and lanes in them."""
    search = _Search(must_copy=_must_copy(drafter.request))
    for index, replicas in enumerate(replica_choices(drafter.cluster.healthy, drafter.domains, num_replicas)):
        for width in _widths(drafter, replicas):
            suffix = (", equal replicas" if index else "") + (f", lanes of {width}" if width > 1 else "")
            _place_anew(search, drafter, replicas, width, suffix, current)
    return search


def _widths(drafter: Drafter, replicas: Replicas) -> list[int]:
    """Slots of a lane to try: powers of two, and the most that there may be."""
    most = min(drafter.request.limits.max_tp, max(len(replica) for replica in replicas))
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def _place_anew(
    search: _Search, drafter: Drafter, replicas: Replicas, width: int, suffix: str, current: Plan | None
) -> None:
    """Every way to place experts that the limits allow."""
    limits = drafter.request.limits

    def placed(way: Way) -> Callable[[str], Draft]:
        return lambda name: drafter.from_scratch(
            name, replicas, width=width, way=way, current=current, unlike=search.drafts
        )

    if limits.fractions:
        search.add("fractional cuts" + suffix, placed("cut"))
    if limits.physical_experts is not None and width == 1:
        search.add("expert copies" + suffix, lambda name: drafter.copied(name, replicas, current))
    search.add("whole experts" + suffix, placed("whole"))
    # By the time of a step the plain way can win by a hair, since it is not what placement goes by.
    search.add("whole experts by load alone" + suffix, placed("plain"), only_if_new=True)


# From a plan in force.


def _onward(drafter: Drafter, current: Plan) -> _Search:
    """All ways to go on from a plan."""
    request, healthy = drafter.request, frozenset(drafter.cluster.healthy)
    survivors = tuple(left for slots in current.replicas if (left := tuple(s for s in slots if s in healthy)))
    new = sorted(healthy - set(current.slots))
    if request.num_replicas not in (None, len(current.replicas), len(survivors)) or not survivors:
        return _begin(drafter, request.num_replicas or len(current.replicas), current)
    search = _Search(must_copy=_must_copy(request))
    grown = _join(survivors, new, drafter)
    _carry_on(search, drafter, current, survivors, grown)
    width = max(len(lane.slots) for lane in current.lanes)
    _place_anew(search, drafter, grown, min(width, request.limits.max_tp), " placed anew", current)
    intact = tuple(slots for slots in current.replicas if healthy.issuperset(slots))
    if 0 < len(intact) < len(current.replicas):
        search.add("drop the replica", lambda name: drafter.survivors(name, intact, current))
    return search


def _carry_on(search: _Search, drafter: Drafter, current: Plan, survivors: Replicas, grown: Replicas) -> None:
    """Ways that leave slots what they have."""
    limits = drafter.request.limits
    copied, cut = drafter.forms(current)
    if max(len(lane.slots) for lane in current.lanes) > limits.max_tp or (cut and not limits.fractions):
        return
    if copied and limits.physical_experts is None:
        return
    kept: Draft | None = None
    damaged = sum(map(len, survivors)) < len(current.slots)
    if not damaged:
        kept = search.add("keep the layout", lambda name: drafter.kept(name, current))
    if copied:
        search.add("copies moved where it pays", lambda name: drafter.copied(name, survivors, current, adapt=True))
    elif damaged:
        _repair(search, drafter, current, survivors, grown)
    elif limits.fractions and kept is not None:
        base = kept.plan
        search.add("moves that pay", lambda name: drafter.adapted(name, grown, base, current))


def _repair(search: _Search, drafter: Drafter, current: Plan, survivors: Replicas, grown: Replicas) -> None:
    """Ways to go on after a loss that leave survivors what they have."""
    # A slot that has come takes over from one that is gone; where lanes are wider that takes another cut.
    single = all(len(lane.slots) == 1 for lane in current.lanes)
    left = grown if single else survivors
    repaired = search.add("repair", lambda name: drafter.survivors(name, left, current), frugal=True)
    if repaired is None or not drafter.request.limits.fractions:
        return
    base = repaired.plan
    if left == grown:
        search.add(
            "repair, then a few moves",
            lambda name: drafter.adapted(name, grown, base, current, budget=MORE_THAN_LOST),
            frugal=True,
        )
    search.add("repair, then moves that pay", lambda name: drafter.adapted(name, grown, base, current))


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
        return _begin(Drafter(whole), number).best(request.horizon_steps)
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
