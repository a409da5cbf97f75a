"""RECOVER of the protocol: from a fault to the next generation, as often as it takes."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping

from nep.distributed.groups import Rendezvous, build_groups
from nep.distributed.waiting import Fault, Waiter
from nep.fault_tolerance import transaction
from nep.fault_tolerance.commit import adopt, apply, commit_layout
from nep.fault_tolerance.control_store import exit_key
from nep.fault_tolerance.detection import FaultWatch
from nep.fault_tolerance.membership import agree, dead_members, fault_reason
from nep.fault_tolerance.returning import share_routing
from nep.fault_tolerance.runtime import Generation, SlotRun
from nep.fault_tolerance.timeline import Recovery
from nep.fault_tolerance.transaction import Decision, Progress
from nep.parallel.migrate import migrate
from nep.planning.plan import Plan
from nep.planning.planner import lost_intervals, plan_after_failure

log = logging.getLogger(__name__)


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
    dead = dead_members(run.store, members)
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
        device=run.device,
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
        run.store.raise_fault(number, fault_reason(fault.kind, run.slot, fault.detail))
        _park(run)
        decision = _agree(run, number, members)
        recovery.agreed_at = time.time()
        _describe(recovery, run, decision, members)
        try:
            _settle(run, decision)
            _rebuild(run, decision, recovery)
            return recovery
        except Fault as again:
            fault, number, members = again.without_frames(), decision.generation, decision.members


def _park(run: SlotRun) -> None:
    """RECOVER 1: never look at the old groups, operations and their memory again."""
    if run.generation is not None:
        run.parking.park(run.generation.groups, run.generation.waiter.parked)
    run.generation = run.returning = None


def _agree(run: SlotRun, number: int, members: tuple[int, ...]) -> Decision:
    """RECOVER 2 to 4."""
    own = dataclasses.replace(run.progress, params_version=run.state.params_version)

    def decide(records: Mapping[int, Progress], dead: set[int]) -> Decision:
        def plan_of(digest: str) -> Plan:
            known = [run.state.plan] + ([run.next_state.plan] if run.next_state else [])
            return next(plan for plan in known if plan.digest == digest)

        def lost(digest: str, live: tuple[int, ...]) -> list[tuple[str, int, int]]:
            return lost_intervals(plan_of(digest), live, run.recipe.lines)

        def plan(digest: str, live: tuple[int, ...]) -> str:
            gone = [slot for slot in plan_of(digest).slots if slot not in live]
            after = plan_after_failure(plan_of(digest), run.cluster.fail(gone), run.recipe.lines)
            return after.canonical_json()

        return transaction.decide(number + 1, members, records, dead, lost=lost, plan=plan)

    decision = agree(run.store, number + 1, members, own, run.recipe.timeouts, decide)
    if decision.action == "checkpoint":
        axis, lo, hi = decision.lost[0]
        lost_slots = sorted(set(run.state.plan.slots) - set(decision.members))
        raise CheckpointNeeded(
            f"slots {lost_slots} were lost together, and with them owner and "
            f"mirror of {len(decision.lost)} intervals (the first: units {lo} to {hi} of {axis}); "
            "the training state can only come from a checkpoint"
        )
    return decision


def _settle(run: SlotRun, decision: Decision) -> None:
    """RECOVER 5 to 7: layout first, then the decision itself, then roll forward if the step was committed."""
    roll = transaction.must_apply(run.progress, decision)
    if transaction.settle_layout(run.progress, decision) == "adopt":
        adopt(run)
    run.next_state = None
    run.progress = transaction.record_committed(run.progress, decision)
    if roll:
        log.warning("step %d was committed: rolling forward", decision.committed)
        apply(run)
    run.progress = dataclasses.replace(run.progress, prepared=None, next_layout=None, next_digest=None)


def _rebuild(run: SlotRun, decision: Decision, recovery: Recovery) -> None:
    """RECOVER 8 and 9: new groups, state into fresh memory, vote on the layout."""
    assert decision.plan is not None
    plan = Plan.from_json(decision.plan)
    live = decision.members
    run.cluster = run.cluster.fail([slot for slot in run.cluster.live if slot not in live])
    run.generation = enter_generation(run, decision.generation, live, plan)
    recovery.rebuilt_at = time.time()
    run.sync.release_grads()
    if decision.returners and run.routing is not None:
        groups = run.generation.groups
        share_routing(run.routing, groups.vote, run.generation.waiter, decision.returners)
    moved = migrate(
        run.state,
        plan,
        live=live,
        params_versions=decision.params_versions,
        version=decision.committed,
        lines=run.recipe.lines,
        dtype=run.recipe.dtype,
        communicator=run.generation.groups.transfer,
        waiter=run.generation.waiter,
        probe=run.probe_at(decision.committed + 1),
    )
    commit_layout(run, moved)
    recovery.moved_at = time.time()


def _describe(recovery: Recovery, run: SlotRun, decision: Decision, members: tuple[int, ...]) -> None:
    recovery.generation = decision.generation
    recovery.step = decision.committed
    gone = sorted(set(members) - set(decision.members))
    recovery.failed_slots = (*recovery.failed_slots, *gone)
    exits = [run.store.get(exit_key(slot)) for slot in gone]
    times = [float(json.loads(text)["time"]) for text in exits if text]
    if times:
        earliest = min(times)
        recovery.failed_at = earliest if recovery.failed_at is None else min(recovery.failed_at, earliest)
    recovery.reason = decision.reason
    members_text = ",".join(map(str, decision.members))
    log.warning("generation %d: slots %s, step %d is committed", decision.generation, members_text, decision.committed)


def _no_fault() -> None:
    return None
