"""A live change of layout: the same members go on under another plan, without a restart."""

from __future__ import annotations

import dataclasses
import logging

from nep.distributed.groups import Groups, regroup
from nep.fault_tolerance.commit import commit_layout, settle
from nep.fault_tolerance.recovery import rendezvous
from nep.fault_tolerance.runtime import SlotRun
from nep.parallel.migrate import migrate
from nep.parallel.state import SlotState
from nep.planning.plan import Plan

log = logging.getLogger(__name__)


def change_layout(run: SlotRun, plan: Plan, reason: str) -> None:
    """Move parameters, master weights and moments to where `plan` wants them: one layout transaction.

    All members call it with the same plan after the same committed step. Until the vote is seen the layout before is
    whole, so a failure in between costs no more than at any other time: recovery adopts the new layout if anybody saw
    the vote, and drops it otherwise.

    Args:
        plan: one that `nep.planning.validation.check_runnable` accepts for the members; its number becomes the next.
        reason: for the log.

    Raises:
        Fault: the layout may or may not be committed; recovery finds out.
    """
    plan = _next(run, plan, reason)
    groups = _groups(run, plan)
    run.sync.release_grads()
    try:
        commit_layout(run, _moved(run, plan))
    except BaseException:
        _close_new(groups, run.current.groups)
        raise
    before, run.generation = run.current.groups, dataclasses.replace(run.current, groups=groups)
    run.cluster = run.cluster.with_speeds(dict(zip(plan.slots, plan.speeds_ppm, strict=True)))
    _close_new(before, groups)


def drain_layout(run: SlotRun, plan: Plan, reason: str) -> None:
    """Move everything off slots that shall leave: a layout transaction to a plan without them.

    All members call it, those that leave too, after the same committed step. Groups stay as they are, for the next
    thing to do is to recover towards a generation without those slots; steps cannot be run in this one any more.

    Args:
        plan: for the others; its number becomes the next.
        reason: for the log.

    Raises:
        Fault: the layout may or may not be committed; recovery finds out.
    """
    plan = _next(run, plan, reason)
    run.sync.release_grads()
    commit_layout(run, _moved(run, plan))


def _next(run: SlotRun, plan: Plan, reason: str) -> Plan:
    """The plan with the number of the next layout, once parameters are where the one in force wants them."""
    plan = dataclasses.replace(plan, number=run.state.plan.number + 1)
    settle(run)
    log.warning("layout %d: %s", plan.number, reason)
    return plan


def _moved(run: SlotRun, plan: Plan) -> SlotState:
    """This slot's state under another plan, in fresh memory."""
    return migrate(
        run.state,
        plan,
        live=run.current.members,
        params_versions=dict.fromkeys(run.current.members, run.progress.tx),
        version=run.progress.tx,
        lines=run.recipe.lines,
        dtype=run.recipe.dtype,
        communicator=run.current.groups.transfer,
        waiter=run.current.waiter,
        probe=run.probe_at(run.progress.tx + 1),
    )


def _groups(run: SlotRun, plan: Plan) -> Groups:
    """Communicators for the plan: those there are where replicas and lanes stay."""
    now = run.state.plan
    same = plan.replicas == now.replicas and [lane.slots for lane in plan.lanes] == [lane.slots for lane in now.lanes]
    if same:
        return run.current.groups
    return regroup(
        rendezvous(run, run.current.number, run.current.waiter),
        run.current.groups,
        layout=plan.number,
        replica=plan.replicas[plan.replica_of(run.slot)],
        lane=plan.lanes[plan.lane_of(run.slot)].slots,
    )


def _close_new(groups: Groups, others: Groups) -> None:
    """Close the communicators that are not among the others."""
    kept = {id(communicator) for communicator in others.all}
    for communicator in groups.all:
        if id(communicator) not in kept:
            communicator.close()
