"""How the slots agree on the next generation, through the control store: RECOVER 2 to 4 of the protocol."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from nep.distributed.timeouts import Timeouts
from nep.fault_tolerance.control_store import ControlStore, decision_key, end_key, exit_key, fence_key, record_key
from nep.fault_tolerance.leases import LeaseWatch
from nep.fault_tolerance.records import Decision, Progress
from nep.fault_tolerance.requests import incarnation_of
from nep.fault_tolerance.unsupervised import report_unsupervised

log = logging.getLogger(__name__)

_POLL_S = 0.002
# A slot that could decide waits this long for each member before it, so that usually only one makes a plan.
_TURN_S = 0.05
_LOOK_S = 0.1  # between two looks at the supervisors of those that are silent


class LeftOut(RuntimeError):
    """The others went on without this slot: it was taken for dead."""


class Drained(RuntimeError):
    """This slot holds nothing any more and may leave: it was asked to, and the others know."""


class JobEnded(RuntimeError):
    """The job is over: a member saw that all had finished, and has left or is leaving.

    Args:
        exit_code: the job's.
    """

    def __init__(self, exit_code: int):
        super().__init__(f"the job has ended with exit code {exit_code}")
        self.exit_code = exit_code


def dead_members(
    store: ControlStore, members: tuple[int, ...], incarnations: Mapping[int, int] | None = None
) -> set[int]:
    """Members whose supervisors have reported the end of their trainers.

    Args:
        incarnations: which trainer of each slot is the member; the first where nothing is said.
    """
    of = incarnations or {}
    return {slot for slot in members if store.exists(exit_key(slot, incarnation_of(of, slot)))}


def agree(
    store: ControlStore,
    generation: int,
    members: tuple[int, ...],
    own: Progress,
    timeouts: Timeouts,
    decide: Callable[[Mapping[int, Progress], set[int]], Decision],
    incarnations: Mapping[int, int] | None = None,
    silent_s: float | None = None,
) -> Decision:
    """Post this slot's record and return the decision that founds `generation`.

    A decision is made when every member of the generation before has posted or is confirmed dead, and is
    written once by compare-and-set. Whoever does neither in time is fenced: its supervisor kills it.

    Args:
        members: of the generation before.
        own: what this slot can prove.
        decide: makes the decision from the live members' records and the dead slots; any slot may be the one.
        incarnations: see `dead_members`.
        silent_s: after which a slot that has not posted is fenced; by default the longest time that it may compute.
            Less if it has been waited for so long already.

    Raises:
        Drained: the decision says that this slot may leave.
        LeftOut: the decision was made without this slot.
        JobEnded: nobody will answer any more. A member that dies after it has finished breaks the generation for
            those who still wait, while others find that all have finished.
        RuntimeError: some member neither answered nor could be fenced.
    """
    store.set(record_key(generation, own.slot), own.to_json())
    deadline = time.monotonic() + timeouts.agree_s
    fence_at = time.monotonic() + (timeouts.wait_s if silent_s is None else silent_s)
    look_at = time.monotonic() + _LOOK_S
    # Keys are never deleted, so what was there once is not asked for again: with it, the requests of a poll grow as the
    # square of the members, and one thread answers them all.
    posted: set[int] = set()
    turn_at: float | None = None
    leases, looked_at = LeaseWatch(store, timeouts.lease_s), time.monotonic()
    while True:
        text = store.get(decision_key(generation))
        if text is not None:
            return _checked(Decision.from_json(text), own.slot)
        ended = store.get(end_key())
        if ended is not None:
            raise JobEnded(int(ended))
        now = time.monotonic()
        if now - looked_at > timeouts.wait_s / 4:
            # The store was out of reach, for the others too, or this process was stopped.
            deadline, fence_at = deadline + now - looked_at, fence_at + now - looked_at
        looked_at = now
        posted |= {s for s in members if s not in posted and store.exists(record_key(generation, s))}
        silent = [slot for slot in members if slot not in posted]
        gone = dead_members(store, tuple(silent), incarnations)
        silent = [slot for slot in silent if slot not in gone]
        if silent and now > look_at:
            report_unsupervised(store, silent, incarnations, leases)
            look_at = now + _LOOK_S
        if not silent:
            turn_at = now + _TURN_S * sorted(posted).index(own.slot) if turn_at is None else turn_at
            if now >= turn_at:
                dead = dead_members(store, members, incarnations)  # also of those that have posted
                live = sorted(posted - dead)
                records = {slot: Progress.from_json(_require(store, record_key(generation, slot))) for slot in live}
                mine = decide(records, dead).to_json()
                return _checked(Decision.from_json(store.compare_and_set(decision_key(generation), "", mine)), own.slot)
        elif now > deadline:
            raise RuntimeError(
                f"slots {silent} neither answered nor ended within {timeouts.agree_s:g} s of recovery; "
                "see their logs, and give a larger --timeout-base-s if they were only slow"
            )
        elif now > fence_at:
            _fence(store, silent, incarnations or {})
            fence_at = deadline
        time.sleep(_POLL_S)


def _checked(decision: Decision, slot: int) -> Decision:
    if slot in decision.leavers and decision.action == "checkpoint":
        return decision  # there may be nobody else to say so
    if slot in decision.leavers:
        raise Drained(f"slot {slot} is drained and leaves; {decision.reason}")
    if slot not in decision.members:
        raise LeftOut(f"slot {slot} is not in generation {decision.generation}: {decision.reason}")
    return decision


def _fence(store: ControlStore, slots: list[int], incarnations: Mapping[int, int]) -> None:
    for slot in slots:
        log.warning("slot %d does not answer; asking its supervisor to kill it", slot)
        store.set(fence_key(slot), str(incarnation_of(incarnations, slot)))


def _require(store: ControlStore, key: str) -> str:
    text = store.get(key)
    assert text is not None, f"{key} was there a moment ago"
    return text


def fault_reason(kind: str, slot: int, detail: str) -> dict[str, Any]:
    """What a fault flag says."""
    return {"reason": kind, "slot": slot, "detail": detail, "time": time.time()}
