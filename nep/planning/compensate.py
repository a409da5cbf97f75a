"""What to do about slots that are slower than others: levers in order, the cheapest first, until it is enough.

1. Batch shares: a slow lane takes fewer sequences. Nothing moves.
2. Cuts: a slow slot gives up parts of its experts, and of whatever its lane has cut.
3. Copies: tokens of an expert with several copies go where there is time, settled anew in every step. Replicas of one
   scale-up domain hold copies of each other's experts already; as one dispatch group they need no memory for it.
4. Power: watts move to slow slots. How many, and whether one may, is decided elsewhere.

None of them changes what is computed: the batch is the same and so is the loss. A fifth lever, a bias of the router
towards fast slots, changes the model and is not used here; see `nep.planning.router_bias`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nep.planning.cost.step_time import step_time
from nep.planning.plan import Lane, Plan
from nep.planning.search.drafts import Draft, Drafter
from nep.planning.search.request import PlanRequest
from nep.planning.search.ways import adapted, from_scratch, kept
from nep.planning.search.with_copies import copied, shares_of

FULL_SPEED_PPM = 1_000_000

Lever = Literal["batch", "cuts", "copies", "power"]

LEVERS: tuple[Lever, ...] = ("batch", "cuts", "copies", "power")

ENOUGH = 0.01
"""Part of a step that may be lost to slow slots before the next lever is tried."""

WORTH: Mapping[Lever, float] = {"batch": 0.005, "cuts": 0.005, "copies": 0.03, "power": 0.01}
"""Part of a step that a lever must gain, after what it costs to get there. Replicas that become one dispatch group wait
for each other in every layer from then on, and watts are somebody's: these must be worth it."""

Boost = Callable[[Plan, Mapping[int, int]], Mapping[int, int]]
"""(plan, measured speeds in ppm) -> speeds that the slots would have with watts moved where they help."""

_COMPUTING = ("expert_gemm", "attention", "dense")

_WHAT: Mapping[Lever, str] = {
    "batch": "batch shares by speed",
    "cuts": "cuts by speed",
    "copies": "tokens shared out over copies",
    "power": "watts for slow slots",
}


@dataclass(frozen=True, kw_only=True)
class Escalation:
    """One lever that was tried.

    Attributes:
        lever: which.
        step_s: predicted seconds of a step with it; None if it could not be used.
        move_s: seconds to get there.
        moved_bytes: that travel.
        used: whether it is part of the result.
        why: one line.
    """

    lever: Lever
    step_s: float | None
    move_s: float
    moved_bytes: int
    used: bool
    why: str


@dataclass(frozen=True, kw_only=True)
class Compensation:
    """What should be done.

    Attributes:
        plan: to go on with; the plan in force, the very object, if nothing pays.
        lever: the strongest one that was used; None if none was.
        before_s: predicted seconds of a step under the plan in force, with the speeds of now.
        after_s: under `plan`.
        ideal_s: if slots shared all computing just by their speeds and sent what they send now.
        move_s: seconds to get there.
        moved_bytes: that travel.
        speeds_ppm: slot -> speed; measured ones, or those with other power limits.
        escalations: levers in the order in which they were tried.
    """

    plan: Plan
    lever: Lever | None
    before_s: float
    after_s: float
    ideal_s: float
    move_s: float
    moved_bytes: int
    speeds_ppm: Mapping[int, int]
    escalations: tuple[Escalation, ...]

    @property
    def gain(self) -> float:
        """How many times as many steps in the same time, less one."""
        return self.before_s / self.after_s - 1

    @property
    def line(self) -> str:
        """All of it in one line, for the log."""
        tried = "; ".join(one.why for one in self.escalations)
        share = f"{self.ideal_s / self.after_s:.1%} of what the speeds allow"
        if self.lever is None:
            return f"no lever pays ({tried}); stays at {share}"
        return f"{tried}; predicted gain {self.gain:.1%}, {share}"


@dataclass(frozen=True, kw_only=True)
class _Standing:
    """Where the search for levers has got to."""

    plan: Plan
    step_s: float
    move_s: float = 0.0
    moved_bytes: int = 0

    def seconds(self, steps: int) -> float:
        return self.move_s + steps * self.step_s


def compensate(request: PlanRequest, *, levers: Sequence[Lever] = LEVERS, boost: Boost | None = None) -> Compensation:
    """Find the first levers that let the job do what its slots can.

    Args:
        request: with the plan in force and a cluster whose speeds are those measured.
        levers: that may be used, in order.
        boost: the fourth lever; None: there is none.

    Raises:
        ValueError: the request has no plan, or contradicts itself.
    """
    current = request.current
    if current is None:
        raise ValueError("current (None) must be the plan in force; plan from scratch with make_plan")
    drafter = Drafter(request)
    before_s = seconds_now(drafter, current)
    speeds: Mapping[int, int] = {slot: drafter.speeds_ppm[slot] for slot in current.slots}
    ideal_s = ideal_seconds(drafter, current, speeds)
    best, strongest, tried = _Standing(plan=current, step_s=before_s), None, list[Escalation]()
    for lever in levers:
        faster = speeds
        if lever == "power":
            # Also where slots share all they have: a damaged replica may have too little of it.
            if boost is None:
                continue
            faster, raised = _powered(request, levers, boost, best, speeds)
        elif best.step_s <= ideal_s * (1 + ENOUGH):
            continue
        else:
            raised = _tried(drafter, lever, best)
        tried.append(_judged(lever, raised, best, request.horizon_steps))
        if tried[-1].used and isinstance(raised, _Standing):
            best, strongest, speeds = raised, lever, faster
    if strongest == "power":
        ideal_s = ideal_seconds(drafter, current, speeds)
    return Compensation(
        plan=best.plan,
        lever=strongest,
        before_s=before_s,
        after_s=best.step_s,
        ideal_s=ideal_s,
        move_s=best.move_s,
        moved_bytes=best.moved_bytes,
        speeds_ppm=speeds,
        escalations=tuple(tried),
    )


def seconds_now(drafter: Drafter, current: Plan) -> float:
    """Predicted seconds of a step under a plan as it is, with the speeds of the drafter's cluster."""
    slower = replace(current, speeds_ppm=tuple(drafter.speeds_ppm[slot] for slot in current.slots))
    request = drafter.request
    return step_time(
        slower,
        shape=request.shape,
        workload=request.workload,
        cluster=drafter.cluster,
        hardware=request.hardware,
        loads=drafter.loads,
        shares=_shares(drafter, current),
        known=drafter.known_times,
    ).total


def ideal_seconds(drafter: Drafter, current: Plan, speeds_ppm: Mapping[int, int]) -> float:
    """A step in which slots share all computing just by their speeds and nobody waits; messages as they are."""
    request = drafter.request
    full = replace(current, speeds_ppm=(FULL_SPEED_PPM,) * len(current.slots))
    time = step_time(
        full,
        shape=request.shape,
        workload=request.workload,
        cluster=drafter.cluster,
        hardware=request.hardware,
        loads=drafter.loads,
        shares=_shares(drafter, current),
    )
    computing = sum(time.by_slot[slot][part] for slot in current.slots for part in _COMPUTING)
    messages = sum(seconds for part, seconds in time.parts.items() if part not in _COMPUTING)
    return messages + computing * FULL_SPEED_PPM / sum(speeds_ppm[slot] for slot in current.slots)


def _shares(drafter: Drafter, plan: Plan) -> NDArray[np.float64] | None:
    copies, cut = drafter.forms(plan)
    return shares_of(drafter, plan) if copies and not cut else None


def _judged(lever: Lever, found: "_Standing | str", best: _Standing, horizon_steps: int) -> Escalation:
    """Whether a lever is worth it, in one sentence."""
    name = _WHAT[lever]
    if isinstance(found, str):
        return Escalation(lever=lever, step_s=None, move_s=0.0, moved_bytes=0, used=False, why=f"{name}: {found}")
    used = found.seconds(horizon_steps) < (1 - WORTH[lever]) * best.seconds(horizon_steps)
    why = f"{name}: step {best.step_s:.4g} -> {found.step_s:.4g} s"
    if found.moved_bytes:
        why += f", {found.moved_bytes:,} bytes in {found.move_s:.3g} s"
    if not used:
        why += f", not worth it within {horizon_steps} steps"
    return Escalation(
        lever=lever, step_s=found.step_s, move_s=found.move_s, moved_bytes=found.moved_bytes, used=used, why=why
    )


def _tried(drafter: Drafter, lever: Lever, best: _Standing) -> "_Standing | str":
    """What a lever leads to, or why it leads nowhere."""
    current = drafter.request.current
    assert current is not None
    try:
        if lever == "batch":
            draft = kept(drafter, _WHAT[lever], current)
        elif lever == "cuts":
            draft = _by_cuts(drafter, current)
        else:
            draft = _by_copies(drafter, current, best.plan)
        return _standing(draft, current)
    except ValueError as error:
        return str(error).split(";")[0]


def _standing(draft: Draft, current: Plan) -> _Standing:
    change, plan = draft.change, draft.plan
    plan = plan if plan is current else replace(plan, number=current.number + 1)
    return _Standing(plan=plan, step_s=draft.time.total, move_s=change.seconds, moved_bytes=change.moved_bytes)


def _by_cuts(drafter: Drafter, current: Plan) -> Draft:
    """Moves that pay, or copies placed where there is time if that is what the plan has."""
    has_copies, has_slices = drafter.forms(current)
    if not has_copies:
        if not drafter.request.limits.fractions:
            raise ValueError("experts may not be cut")
        return _recut(drafter, current)
    if has_slices:
        raise ValueError("experts of the plan have copies and slices")
    with_copies = drafter
    if drafter.request.limits.physical_experts is None:
        limits = replace(drafter.request.limits, physical_experts=_physical_experts(drafter, current))
        with_copies = Drafter(replace(drafter.request, limits=limits))
    return copied(with_copies, _WHAT["cuts"], current.replicas, current, adapt=True)


def _recut(drafter: Drafter, current: Plan) -> Draft:
    """The moves that pay, or experts placed anew where that is worth what more moves."""
    width = max(len(lane.slots) for lane in current.lanes)
    ways: list[Callable[[], Draft]] = [
        lambda: adapted(drafter, _WHAT["cuts"], current.replicas, current, current),
        lambda: from_scratch(drafter, _WHAT["cuts"], current.replicas, width=width, current=current),
    ]
    return _best(ways, drafter.request.horizon_steps)


def _best(ways: Sequence[Callable[[], Draft]], horizon_steps: int) -> Draft:
    """The draft with the fewest seconds, of those ways that lead somewhere.

    Raises:
        ValueError: why the first one does not, if none does.
    """
    found: list[Draft] = []
    problems: list[ValueError] = []
    for way in ways:
        try:
            found.append(way())
            found[-1].change  # noqa: B018
        except ValueError as error:
            problems.append(error)
    fitting = [draft for draft in found if draft.has_change]
    if not fitting:
        raise problems[0]
    return min(fitting, key=lambda draft: draft.seconds(horizon_steps))


def _physical_experts(drafter: Drafter, plan: Plan) -> int:
    """Copies per layer of the replica that has most."""
    size = drafter.experts.units_per_expert
    return max(
        sum(plan.holders.num_units(axis, slot) for slot in slots) // size
        for axis in drafter.experts.names
        for slots in plan.replicas
    )


def _by_copies(drafter: Drafter, current: Plan, best: Plan) -> Draft:
    """Replicas of one scale-up domain as one dispatch group, in which every expert has a copy for each of them."""
    _, has_slices = drafter.forms(current)
    if has_slices:
        raise ValueError("experts of the plan are cut, and copies are whole")
    merged = merge_replicas(current, drafter.domains)
    if merged is current:
        raise ValueError("no two replicas are in one scale-up domain")
    plan = replace(merged, speeds_ppm=tuple(drafter.speeds_ppm[slot] for slot in current.slots))
    # Replicas that are alike share each expert between the same few slots; what makes copies worth much is that each
    # slot shares with several others, so experts change places, too, where that pays.
    limits = replace(drafter.request.limits, physical_experts=_physical_experts(drafter, plan))
    together = Drafter(replace(drafter.request, limits=limits, num_replicas=len(plan.replicas)))
    ways: list[Callable[[], Draft]] = [
        lambda: drafter.fitted(_WHAT["copies"], lambda _: plan, current, lambda: shares_of(drafter, plan)),
        lambda: copied(together, _WHAT["copies"], plan.replicas, plan),
    ]
    return _best(ways, drafter.request.horizon_steps)


def merge_replicas(plan: Plan, domains: Mapping[int, int]) -> Plan:
    """The plan with the replicas of each scale-up domain as one; nobody holds anything else.

    Args:
        plan: of whole experts.
        domains: slot -> scale-up domain.

    Returns:
        The next plan, or the same object if there is nothing to merge.
    """
    places: dict[object, list[int]] = {}
    for index, slots in enumerate(plan.replicas):
        inside = {domains[slot] for slot in slots}
        places.setdefault(inside.pop() if len(inside) == 1 else ("alone", index), []).append(index)
    if len(places) == len(plan.replicas):
        return plan
    groups = sorted(places.values())
    new = {old: index for index, group in enumerate(groups) for old in group}
    return replace(
        plan,
        number=plan.number + 1,
        replicas=tuple(tuple(sorted(slot for old in group for slot in plan.replicas[old])) for group in groups),
        lanes=tuple(Lane(new[lane.replica], lane.slots, lane.num_sequences) for lane in plan.lanes),
    )


def _powered(
    request: PlanRequest, levers: Sequence[Lever], boost: Boost, best: _Standing, speeds_ppm: Mapping[int, int]
) -> tuple[Mapping[int, int], "_Standing | str"]:
    """The other levers once more, with the speeds that watts would give."""
    raised = dict(boost(best.plan, speeds_ppm))
    if all(raised.get(slot, speed) == speed for slot, speed in speeds_ppm.items()):
        return speeds_ppm, "no watts can be moved"
    faster = replace(request, cluster=request.cluster.with_speeds(raised))
    others = tuple(lever for lever in levers if lever != "power")
    found = compensate(faster, levers=others)
    plan = found.plan
    if plan is request.current:
        # Nothing else is to be done, but the plan has to know the speeds that it goes by.
        plan = replace(plan, number=plan.number + 1, speeds_ppm=tuple(raised[slot] for slot in plan.slots))
    return raised, _Standing(plan=plan, step_s=found.after_s, move_s=found.move_s, moved_bytes=found.moved_bytes)
