"""RECOVER of the protocol: from a fault to the next generation, as often as it takes."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence

from nep.distributed.groups import Rendezvous, build_groups
from nep.distributed.waiting import Fault, Waiter
from nep.fault_tolerance import transaction
from nep.fault_tolerance.commit import adopt, apply, commit_layout
from nep.fault_tolerance.control_store import exit_key
from nep.fault_tolerance.detection import FaultWatch
from nep.fault_tolerance.membership import agree, dead_members, fault_reason
from nep.fault_tolerance.records import NO_LAYOUT, Decision, Progress
from nep.fault_tolerance.requests import drained, incarnation_of, standing, taken_in
from nep.fault_tolerance.returning import share_bytes, share_routing
from nep.fault_tolerance.runtime import Generation, SlotRun
from nep.fault_tolerance.timeline import Recovery
from nep.parallel.migrate import migrate
from nep.planning.plan import Plan
from nep.planning.planner import lost_intervals, plan_after_failure, plan_with_slots

log = logging.getLogger(__name__)


# Kinds of faults: members break a generation on purpose; one was waited for in vain.
PLANNED, DEADLINE = "planned", "deadline"


class CheckpointNeeded(RuntimeError):
    """Some interval has neither a live owner nor a live mirror: only a checkpoint can help."""


def enter_generation(run: SlotRun, number: int, members: tuple[int, ...], plan: Plan) -> Generation:
    """Build the communicators of a generation. All members call it.

    Raises:
        Fault: this generation is broken already.
    """
    run.job.report_generation(number)
    timeouts = run.recipe.timeouts
    # Alone there is nobody who could raise the flag, and nothing to wait for.
    fault = FaultWatch(run.connections, number).reason if len(members) > 1 else _no_fault
    waiter = Waiter(fault, timeouts.first_step_s)
    # A supervisor writes the exit before it reads decisions, and we read the decision before the exits: so
    # whoever died around now is seen by one of the two.
    dead = dead_members(run.store, members, run.incarnations)
    if dead:
        reason = f"slots {sorted(dead)} ended before generation {number} began"
        run.store.raise_fault(number, fault_reason("exit", run.slot, reason))
        run.generation = None
        raise Fault("flag", reason)
    groups = build_groups(
        rendezvous(run, number, waiter),
        slots=members,
        replica=plan.replicas[plan.replica_of(run.slot)],
        lane=plan.lanes[plan.lane_of(run.slot)].slots,
    )
    return Generation(number=number, members=members, groups=groups, waiter=waiter)


def rendezvous(run: SlotRun, generation: int, waiter: Waiter) -> Rendezvous:
    """How this slot meets the others of a generation, on a connection to the store of its own."""
    connection = run.connections.take()
    return Rendezvous(
        generation=generation,
        slot=run.slot,
        store=connection.torch_store(run.recipe.timeouts.rebuild_s),
        transport=run.transport,
        waiter=waiter,
        group_timeout_s=run.recipe.timeouts.group_s,
        rebuild_timeout_s=run.recipe.timeouts.rebuild_s,
        finished=lambda: run.connections.give_back(connection),
    )


def recover(run: SlotRun, fault: Fault, number: int, members: tuple[int, ...], recovery: Recovery) -> Recovery:
    """Go from the broken generation `number` to one that works. Every live member calls it.

    Args:
        recovery: where to note times; one that has not ended in a committed step is gone on with.

    Returns:
        When each phase ended; `resumed_at` is filled in after the next committed step.

    Raises:
        CheckpointNeeded: owner and mirror of something are both lost.
        LeftOut: the others went on without this slot.
    """
    while True:
        recovery.attempts += 1
        log.warning("generation %d is broken: %s", number, fault)
        # Steps go on without the control store; a recovery cannot, and waits for it.
        with run.store.patience(run.recipe.timeouts.partition_s, run.stop_requested):
            stands = run.store.raise_fault(number, fault_reason(fault.kind, run.slot, fault.detail))
            recovery.planned = recovery.planned and stands.get("reason") == PLANNED
            _park(run)
            hung = stands.get("reason") == DEADLINE
            decision = _agree(run, number, members, run.recipe.timeouts.hung_s if hung else None)
        recovery.agreed_at = time.time()
        _describe(recovery, run, decision, members)
        try:
            _settle(run, decision)
            enter_decided(run, decision, recovery)
            return recovery
        except Fault as again:
            fault, number, members = again.without_frames(), decision.generation, decision.members


def _park(run: SlotRun) -> None:
    """RECOVER 1: never look at the old groups, operations and their memory again."""
    if run.generation is not None:
        run.parking.park(run.generation.groups, run.generation.waiter.parked)
    run.generation = run.returning = None


def _agree(run: SlotRun, number: int, members: tuple[int, ...], silent_s: float | None) -> Decision:
    """RECOVER 2 to 4."""
    own = dataclasses.replace(run.progress, params_version=run.state.params_version)

    def decide(records: Mapping[int, Progress], dead: set[int]) -> Decision:
        def plan_of(digest: str) -> Plan:
            known = [run.state.plan] + ([run.next_state.plan] if run.next_state else [])
            return next(plan for plan in known if plan.digest == digest)

        def lost(digest: str, live: tuple[int, ...]) -> list[tuple[str, int, int]]:
            return lost_intervals(plan_of(digest), live, run.recipe.lines)

        here = {slot: record for slot, record in records.items() if slot not in dead}
        named = plan_of(transaction.choose_layout(here)[1]).slots
        request, came = _registered(run, [slot for slot, post in here.items() if not transaction.has_left(post, named)])

        def plan(digest: str, live: tuple[int, ...]) -> str:
            before = plan_of(digest)
            has = {slot for slot, post in here.items() if post.layout != NO_LAYOUT or post.next_digest == digest}
            return next_plan(run, before, [slot for slot in before.slots if slot in has], live).canonical_json()

        def decided(came: Mapping[int, int]) -> Decision:
            return transaction.decide(
                number + 1,
                members,
                records,
                dead,
                lost=lost,
                plan=plan,
                returners=tuple(came),
                named=lambda digest: plan_of(digest).slots,
                origin=lambda digest: plan_of(digest).canonical_json(),
                incarnations={**run.incarnations, **came},
                request=request,
            )

        try:
            return decided(came)
        except ValueError as error:
            if not came:
                raise
            log.error("slots %s cannot be taken in: %s", sorted(came), error)
            return decided({})

    decision = agree(run.store, number + 1, members, own, run.recipe.timeouts, decide, run.incarnations, silent_s)
    if decision.action == "checkpoint":
        axis, lo, hi = decision.lost[0]
        lost_slots = sorted(set(run.state.plan.slots) - set(decision.members) | set(decision.returners))
        together = "together" if len(lost_slots) > 1 else "before mirrors were complete again"
        raise CheckpointNeeded(
            f"slots {lost_slots} were lost {together}, and with them owner and "
            f"mirror of {len(decision.lost)} intervals (the first: units {lo} to {hi} of {axis}); "
            "the training state can only come from a checkpoint"
        )
    return decision


def _registered(run: SlotRun, here: Collection[int]) -> tuple[int, dict[int, int]]:
    """Who comes with the next decision: the last request that it answers, and slot -> which trainer.

    As many as are missing of those that wait, spares included: they have asked before and were not needed then. Members
    that shall leave, and have not yet, are missing already.

    Args:
        here: members of the generation before that have posted and live, as far as this slot knows, and stay.
    """
    run.requests.read(run.store)
    known = run.requests.known
    request = len(known)
    for number, one in enumerate(known[run.considered :], run.considered + 1):
        if one.kind == "join" and one.slot in here:
            # Its predecessor is dead, and this slot has not heard of it: the next decision will take it.
            request = number - 1
            break
    waiting = standing(known[:request])
    live = {slot: one for slot, one in waiting.items() if not run.store.exists(exit_key(slot, one))}
    about_to_leave = len(drained(known[:request]) & set(here))
    return request, taken_in(live, here, run.wanted_members + about_to_leave)


def _settle(run: SlotRun, decision: Decision) -> None:
    """RECOVER 5 to 7: layout first, then the decision itself, then roll forward if the step was committed."""
    if run.slot in decision.returners:
        run.next_state, run.progress = None, transaction.join(run.slot, decision)
        return
    roll = transaction.must_apply(run.progress, decision)
    if transaction.settle_layout(run.progress, decision) == "adopt":
        adopt(run)
    run.next_state = None
    run.progress = transaction.record_committed(run.progress, decision)
    if roll:
        log.warning("step %d was committed: rolling forward", decision.committed)
        apply(run)
    run.progress = dataclasses.replace(run.progress, prepared=None, next_layout=None, next_digest=None)


def next_plan(run: SlotRun, before: Plan, holding: Sequence[int], members: Sequence[int]) -> Plan:
    """The plan for the members of a new generation.

    Args:
        before: the plan of layout LN.
        holding: members that hold what it names for them.
    """
    lines, came = run.recipe.lines, [slot for slot in members if slot not in holding]
    cluster = run.cluster.fail([slot for slot in run.cluster.live if slot not in holding])
    # In a recovery without returners the plan is made as if nothing had ever come.
    after = plan_after_failure(before, cluster.with_health(holding, "healthy"), lines)
    if came:
        after = plan_with_slots(
            after,
            cluster.with_health(members, "healthy"),
            lines,
            num_replicas=run.recipe.num_replicas,
            lane_slots=run.recipe.lane_slots,
        )
    return dataclasses.replace(after, number=before.number + 1)


def enter_decided(run: SlotRun, decision: Decision, recovery: Recovery) -> None:
    """RECOVER 8 and 9: new groups, state into fresh memory, vote on the layout. All its members call it.

    Raises:
        Fault: the layout may or may not be committed; recovery goes on towards the next generation.
    """
    assert decision.plan is not None
    plan = Plan.from_json(decision.plan)
    members, returning = decision.members, decision.returners
    live = tuple(slot for slot in members if slot not in returning)
    run.incarnations, run.considered = dict(decision.incarnations), decision.request
    run.cluster = (
        run.cluster.fail([slot for slot in run.cluster.live if slot not in members])
        .with_health([slot for slot in standing(run.requests.known) if slot not in members], "spare")
        .with_health(members, "healthy")
        .with_speeds(dict(zip(plan.slots, plan.speeds_ppm, strict=True)))
    )
    run.generation = enter_generation(run, decision.generation, members, plan)
    recovery.rebuilt_at = time.time()
    waiter = run.generation.waiter
    first_step_s, waiter.deadline_s = waiter.deadline_s, run.recipe.timeouts.wait_s
    run.sync.release_grads()
    if returning:
        _tell_returners(run, returning)
    moved = migrate(
        run.state,
        plan,
        live=live,
        params_versions=decision.params_versions,
        version=decision.committed,
        lines=run.recipe.lines,
        dtype=run.recipe.dtype,
        communicator=run.generation.groups.transfer,
        waiter=waiter,
        probe=run.probe_at(decision.committed + 1),
    )
    commit_layout(run, moved)
    waiter.deadline_s = first_step_s
    recovery.moved_at = time.time()


def _tell_returners(run: SlotRun, returning: Sequence[int]) -> None:
    """What slots that hold nothing must know beside their tensors. All members call it."""
    generation, (tell, take) = run.current, run.story
    told = share_bytes(tell, generation.groups.transfer, generation.waiter, returning)
    if told is not None:
        take(told)
    if run.routing is not None:
        share_routing(run.routing, generation.groups.vote, generation.waiter, returning)


def _describe(recovery: Recovery, run: SlotRun, decision: Decision, members: tuple[int, ...]) -> None:
    recovery.generation = decision.generation
    recovery.step = decision.committed
    gone = [slot for slot in members if slot not in decision.leavers and _ended(run, decision, slot)]
    recovery.planned = recovery.planned and not gone
    recovery.failed_slots = (*recovery.failed_slots, *gone)
    exits = [run.store.get(exit_key(slot, incarnation_of(run.incarnations, slot))) for slot in gone]
    times = [float(json.loads(text)["time"]) for text in exits if text]
    if times:
        earliest = min(times)
        recovery.failed_at = earliest if recovery.failed_at is None else min(recovery.failed_at, earliest)
    recovery.reasons = (*recovery.reasons, decision.reason)
    members_text = ",".join(map(str, decision.members))
    log.warning("generation %d: slots %s, step %d is committed", decision.generation, members_text, decision.committed)


def _ended(run: SlotRun, decision: Decision, slot: int) -> bool:
    """Whether the trainer of a member of the generation before is no member of this one."""
    now = incarnation_of(decision.incarnations, slot) if slot in decision.members else None
    return now != incarnation_of(run.incarnations, slot)


def _no_fault() -> None:
    return None
