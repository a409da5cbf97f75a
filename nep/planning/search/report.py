"""What there is to say about a plan: figures of its slots, bounds, and why other ways lost."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nep.planning.cost.dispatch_rows import hit_chance, inclusion
from nep.planning.cost.held import expert_units
from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.cost.step_time import StepTime, step_time
from nep.planning.holding.lanes import make_lanes
from nep.planning.holding.reliability import chance_of, death_graph
from nep.planning.holding.replica_cuts import Prices
from nep.planning.placement.bounds import BINDING_WORDS, Binding, lower_bound
from nep.planning.placement.problem import Problem
from nep.planning.plan import Plan
from nep.planning.search.drafts import Draft, Drafter
from nep.planning.search.request import Alternative, Planned, PlanReport, SlotFigures
from nep.planning.search.room import DoesNotFit

Floats = NDArray[np.float64]

# Deaths at one moment that the survival probability is told for.
_DEATHS = 4
# A placement so near its bound is as good as the bound says.
_AT_BOUND = 1.02
_LEVEL = 0.98


@dataclass(frozen=True)
class Refused:
    """A way that led nowhere.

    Attributes:
        name: of the way.
        why: the sentence that says so.
        error: all that there is to say, if a slot has too little memory.
    """

    name: str
    why: str
    error: DoesNotFit | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class _ReplicaFigures:
    """Expert layers of one replica.

    Attributes:
        load: [slots], routed tokens times units over an even share, mean over layers.
        rows: [slots], rows received over the mean, mean over layers.
        balance: mean over max of load per speed, mean over layers.
        placement_s: seconds of the expert layers, as placement counts them.
        bound_s: at least so many.
        binds: what binds, layer by layer.
    """

    load: Floats
    rows: Floats
    balance: float
    placement_s: float
    bound_s: float
    binds: tuple[Binding, ...]


def report_on(
    drafter: Drafter,
    chosen: Draft,
    drafts: Sequence[Draft],
    refused: Sequence[Refused],
    healthy: Draft | None,
) -> Planned:
    """The chosen draft with its report.

    Args:
        drafter: who made the drafts.
        chosen: one of them.
        drafts: all of them.
        refused: ways that led nowhere.
        healthy: the plan as if every slot were healthy; None if that does not fit.
    """
    request, plan = drafter.request, chosen.plan
    replicas = _replicas(drafter, chosen)
    slowest = max(replicas, key=lambda one: one.placement_s)
    deadly = death_graph(plan, drafter.cluster)
    best_s = healthy.time if healthy is not None else chosen.time
    report = PlanReport(
        predicted=chosen.time,
        healthy=best_s,
        current=None if request.current is None else _current_time(drafter, request.current),
        balance=min(one.balance for one in replicas),
        bound_s=slowest.bound_s,
        placement_s=slowest.placement_s,
        binds=_binds(drafter, chosen, slowest),
        slots=_slots(drafter, chosen, replicas),
        copies=_copies(drafter, chosen),
        transfers=chosen.change.transfers,
        flows=chosen.change.flows,
        moved_bytes=chosen.change.moved_bytes,
        move_s=chosen.change.seconds,
        survival={
            deaths: chance_of(deadly, deaths).probability for deaths in range(1, min(_DEATHS, len(plan.slots)) + 1)
        },
        alternatives=_alternatives(drafter, chosen, drafts, refused, best_s),
        skipped=_skipped(drafter, chosen, drafts),
        change_parts=chosen.change.parts,
        lost=chosen.change.lost,
    )
    return Planned(plan=plan, report=report)


def _replicas(drafter: Drafter, draft: Draft) -> list[_ReplicaFigures]:
    """Figures of each replica; replicas that are alike are computed once."""
    plan = draft.plan
    width = max(len(lane.slots) for lane in plan.lanes)
    prices = drafter.prices(plan.replicas, width)
    place = {slot: index for index, slot in enumerate(plan.slots)}
    known: dict[object, _ReplicaFigures] = {}
    found: list[_ReplicaFigures] = []
    for slots in plan.replicas:
        cuts = [plan.holders.by_slot(axis) for axis in drafter.experts.names]
        key = (
            prices.cost_of(slots),
            tuple(prices.speeds(slots)),
            tuple(tuple(by_slot.get(slot, ()) for slot in slots) for by_slot in cuts),
        )
        if key not in known or draft.shares is not None:
            shares = None if draft.shares is None else draft.shares[:, :, [place[slot] for slot in slots]]
            known[key] = _replica(drafter, prices, plan, slots, shares)
        found.append(known[key])
    return found


def _replica(
    drafter: Drafter, prices: Prices, plan: Plan, slots: tuple[int, ...], shares: Floats | None
) -> _ReplicaFigures:
    units, even = expert_units(plan.holders, slots, drafter.lines)
    shares = even if shares is None else shares
    popularity = drafter.loads.normalised().mean
    cost, speeds = prices.cost_of(slots), np.array(prices.speeds(slots))
    load = np.einsum("le,les->ls", popularity, shares * units) / cost.units_per_expert
    rows = np.einsum("le,les->ls", popularity, shares)
    pieces = (units > 0).sum(axis=1)
    seconds = (load * cost.tokens * cost.token_s + pieces * cost.piece_s) / speeds + rows * cost.tokens * cost.row_s
    bound = lower_bound(Problem.of(drafter.loads, speeds=speeds, cost=cost))
    # With copies an expert's tokens may be split, so only the work of all of them counts.
    copied = bool((units.sum(axis=1) > cost.units_per_expert).any())
    work: Binding = "work"
    busy = (load / speeds).max(axis=1)
    top_k = drafter.request.shape.top_k
    hits = hit_chance(inclusion(popularity, top_k), shares, top_k)
    return _ReplicaFigures(
        load=load.mean(axis=0) * len(slots),
        rows=(hits / np.maximum(hits.mean(axis=1, keepdims=True), 1e-300)).mean(axis=0),
        balance=float((1 / speeds.sum() / busy).mean()),
        placement_s=float(seconds.max(axis=1).sum()),
        bound_s=len(load) * _bound_with_copies(cost, speeds) if copied else bound.total_s,
        binds=(work,) * len(bound.binds) if copied else bound.binds,
    )


def _bound_with_copies(cost: PlacementCost, speeds: Floats) -> float:
    """Seconds of a layer if all slots share its tokens as they like."""
    token_s = cost.token_s / speeds + cost.row_s
    return float(cost.tokens / (1 / token_s).sum()) if token_s.all() else 0.0


def _slots(drafter: Drafter, draft: Draft, replicas: Sequence[_ReplicaFigures]) -> tuple[SlotFigures, ...]:
    plan = draft.plan
    figures: dict[int, SlotFigures] = {}
    speeds = dict(zip(plan.slots, plan.speeds_ppm, strict=True))
    for slots, of_replica in zip(plan.replicas, replicas, strict=True):
        for index, slot in enumerate(slots):
            size = drafter.room.size(slot)
            figures[slot] = SlotFigures(
                slot=slot,
                speed=speeds[slot] / 1e6,
                load=float(of_replica.load[index]),
                rows=float(of_replica.rows[index]),
                memory_bytes=draft.memory.total(slot),
                memory_limit_bytes=size,
                step_s=sum(draft.time.by_slot[slot].values()),
            )
    return tuple(figures[slot] for slot in plan.slots)


def _copies(drafter: Drafter, draft: Draft) -> NDArray[np.int64] | None:
    if not drafter.forms(draft.plan)[0]:
        return None
    units, _ = expert_units(draft.plan.holders, draft.plan.slots, drafter.lines)
    return (units > 0).astype(np.int64)


def _current_time(drafter: Drafter, current: Plan) -> StepTime | None:
    """The step of the plan in force at the speeds of now; None if slots of it are gone."""
    if not set(current.slots) <= set(drafter.cluster.live):
        return None
    request, lanes = drafter.request, current.lanes
    if current.global_batch_size != request.workload.global_batch_size:
        places = [(lane.replica, lane.slots) for lane in lanes]
        lanes = make_lanes(places, drafter.speeds_ppm, request.workload.global_batch_size)
    speeds = tuple(drafter.speeds_ppm[slot] for slot in current.slots)
    return step_time(
        replace(current, lanes=lanes, speeds_ppm=speeds),
        shape=request.shape,
        workload=request.workload,
        cluster=drafter.cluster,
        hardware=request.hardware,
        loads=drafter.loads,
    )


# Words.


def _binds(drafter: Drafter, draft: Draft, replica: _ReplicaFigures) -> str:
    """What keeps the step from being shorter."""
    time = draft.time
    part = time.binds
    what = f"{part.replace('_', ' ')} takes most of the step ({time[part] / time.total:.0%})" if time.total > 0 else ""
    bound = time.binding.get(part)
    where = f", on slot {bound.slot} by {bound.resource}" if bound is not None else ""
    return f"{what}{where}; expert layers: {_experts_bind(drafter, draft, replica)}"


def _experts_bind(drafter: Drafter, draft: Draft, replica: _ReplicaFigures) -> str:
    if draft.limited:
        return "memory limits where experts can be: more of it, or fewer replicas, would help"
    if replica.placement_s <= replica.bound_s * _AT_BOUND:
        counts = Counter(replica.binds)
        name = min(counts, key=lambda name: (-counts[name], name))
        layers = f" (in {counts[name]} of {len(replica.binds)} layers)" if len(counts) > 1 else ""
        return BINDING_WORDS[name] + layers
    above = (
        f"{replica.placement_s / replica.bound_s - 1:.1%} above the bound" if replica.bound_s > 0 else "above the bound"
    )
    if replica.balance >= _LEVEL:
        return f"{above}: slots are level, the rest are rows and pieces of slices and copies"
    copied, cut = drafter.forms(draft.plan)
    if not cut and not drafter.request.limits.fractions:
        more = "more copies" if copied else "copies"
        return f"{above}: whole experts come out uneven; {more} would help, or cutting them"
    return f"{above}: no cut was found that levels slots for less than its rows and pieces cost"


def _alternatives(
    drafter: Drafter, chosen: Draft, drafts: Sequence[Draft], refused: Sequence[Refused], healthy: StepTime
) -> tuple[Alternative, ...]:
    batch = drafter.request.workload.global_batch_size
    found = [
        Alternative(
            name=draft.name,
            step_s=draft.time.total,
            move_s=draft.change.seconds if draft.has_change else None,
            samples_per_s=batch / draft.time.total if draft.time.total > 0 else None,
            chosen=draft is chosen,
            why=_why(drafter, draft, chosen),
        )
        for draft in drafts
    ]
    found += [
        Alternative(name=one.name, step_s=None, move_s=0.0, samples_per_s=None, chosen=False, why=one.why)
        for one in refused
    ]
    if any(slot.health in ("failed", "draining") for slot in drafter.cluster.slots):
        found.append(_waiting(drafter, chosen, healthy))
    return tuple(found)


def _why(drafter: Drafter, draft: Draft, chosen: Draft) -> str:
    """Why a draft lost, or won."""
    steps = drafter.request.horizon_steps
    gain = chosen.time.total - draft.time.total
    moving = draft.change.seconds - chosen.change.seconds if draft.has_change else 0.0
    asked = drafter.request.limits.degrees is not None
    if draft is chosen and asked:
        return "degrees are pinned"
    if draft is chosen:
        moves = draft.change.seconds > 0
        return f"fewest seconds over {steps} steps, the move included" if moves else "fewest predicted seconds"
    share = abs(gain) / chosen.time.total if chosen.time.total > 0 else 0.0
    if not draft.allowed:
        why = "has other degrees" if asked else "leaves places for copies empty"
        return f"{share:.1%} {'faster' if gain > 0 else 'slower'} a step; {why}"
    if gain == 0 and moving == 0:
        return "as fast, and not simpler"
    if not draft.has_change:
        if gain <= 0:
            return f"{share:.1%} slower a step; what it moves was not worked out"
        return (
            f"{share:.1%} faster a step, if what it moves (not worked out) were free: after a loss what was lost comes "
            "first, and the rest can follow when the job runs"
        )
    if gain <= 0:
        return f"{share:.1%} slower a step" + (f", and moves {moving:.2f} s longer" if moving > 0 else "")
    if draft.seconds(steps) < chosen.seconds(steps):
        more = draft.change.moved_bytes - chosen.change.moved_bytes
        return (
            f"{share:.1%} faster a step, and moves {more / 1e9:.1f} GB more: after a loss what was lost comes first, "
            "and the rest can follow when the job runs"
        )
    return (
        f"{share:.1%} faster a step, which in {steps} steps gains {steps * gain:.2f} s, less than the {moving:.2f} s "
        "that it moves longer"
    )


def _waiting(drafter: Drafter, chosen: Draft, healthy: StepTime) -> Alternative:
    steps = drafter.request.horizon_steps
    within = max(0.0, chosen.change.seconds + steps * (chosen.time.total - healthy.total))
    pace = healthy.total / chosen.time.total if chosen.time.total > 0 else 1.0
    return Alternative(
        name="wait for repair",
        step_s=healthy.total,
        move_s=0.0,
        samples_per_s=0.0,
        chosen=False,
        why=f"nothing is trained meanwhile, and the plan keeps {pace:.1%} of the pace; over {steps} steps waiting pays "
        f"only if all slots are back within {within:.1f} s",
    )


def _skipped(drafter: Drafter, chosen: Draft, drafts: Sequence[Draft]) -> str | None:
    """Why nothing is changed, if nothing is."""
    if chosen.plan is not drafter.request.current:
        return None
    faster = [draft for draft in drafts if draft.time.total < chosen.time.total]
    if not faster:
        return "no other plan is predicted to be faster"
    best = min(faster, key=lambda draft: draft.time.total)
    return f"the best other way ({best.name}) is {_why(drafter, best, chosen)}"
