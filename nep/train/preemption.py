"""A slot that leaves by itself: a preemption notice (SIGUSR1) has come, or its health check complains.

It asks to be drained, before its machine is taken away or does harm. If all slots must leave, those that wait
in reserve take over; if nobody waits, the job stops.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nep.fault_tolerance.connections import lent
from nep.fault_tolerance.control_store import exit_key
from nep.fault_tolerance.requests import Request, drained, standing
from nep.fault_tolerance.runtime import SlotRun
from nep.train.health import HealthWatch
from nep.train.signals import StopSignals

_PATIENCE_S = 2.0  # for the store's answer, until people are told that there is none


class Preemption:
    """What one trainer does about it.

    Args:
        signals: has heard a notice or not.
        health: of this slot, or None: nobody asks.
        run: this slot's.
        can_stop: whether there is a place for a checkpoint; without one the job rather goes on as long as it may.
        announce: says a line to people.
    """

    def __init__(
        self,
        signals: StopSignals,
        health: HealthWatch | None,
        run: SlotRun,
        can_stop: bool,
        announce: Callable[[str], None],
    ):
        self._signals, self._health = signals, health
        self._run, self._can_stop, self._announce = run, can_stop, announce
        self._asking: threading.Thread | None = None
        self._asked_at: float | None = None  # when first, on the monotonic clock; None: never
        self._told = False  # the job knows
        self._waiting: frozenset[int] | None = None  # slots that could go on; None: not known yet
        self._warned = False  # that the store does not answer

    @property
    def reason(self) -> str | None:
        """Why this slot shall leave, or None."""
        if self._signals.noticed:
            return "preemption notice"
        if self._health is not None and self._health.complaint is not None:
            return f"health check: {self._health.complaint}"
        return None

    def tell(self) -> None:
        """See to it that the job knows that this slot may leave. Between two steps, in the main thread; no waits.

        The store is asked in a thread of its own, again before each step until it has answered.
        """
        reason = self.reason
        if reason is None or (self._told and not self._all_leave()):
            return
        now = time.monotonic()
        self._asked_at = now if self._asked_at is None else self._asked_at
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask, args=(reason,), name="leave", daemon=True)
            self._asking.start()
        elif not self._told and now - self._asked_at > _PATIENCE_S:
            self._warn(reason, f"for {now - self._asked_at:.0f} s")

    def _ask(self, reason: str) -> None:
        run = self._run
        try:
            with lent(run.connections) as store:
                run.requests.read(store)
                waiting = standing(run.requests.known).items()
                self._waiting = frozenset(slot for slot, one in waiting if not store.exists(exit_key(slot, one)))
                if run.slot not in drained(run.requests.known):
                    run.requests.post(store, self._request())
        except RuntimeError as error:
            if not self._told:
                self._warn(reason, f"({error})")
            return
        if not self._told:
            self._told = True
            self._announce(f"{reason}: this slot leaves after the next step")

    def _request(self) -> Request:
        """After a notice only this trainer leaves: the node may come back with another. Sick hardware stays away."""
        run = self._run
        if self._signals.noticed:
            return Request(kind="drain", slot=run.slot, incarnation=run.job.incarnation, why="a preemption notice")
        return Request(kind="drain", slot=run.slot, why="its health check")

    def _warn(self, reason: str, how: str) -> None:
        """Once: people may have to do by hand what the job cannot do in time."""
        if not self._warned:
            self._warned = True
            self._announce(
                f"{reason}: the control store has not answered {how}, so the others do not know; this slot trains on "
                "and leaves after the first step at which it answers; if the machine goes before, that is a loss"
            )

    def ends_job(self) -> bool:
        """Whether every slot that trains shall leave and nobody waits, so that a checkpoint is all that can be done."""
        if self.reason is None or not self._can_stop or self._waiting is None or not self._all_leave():
            return False
        return not self._waiting - drained(self._run.requests.known) - set(self._run.state.plan.slots)

    def _all_leave(self) -> bool:
        return drained(self._run.requests.known).issuperset(self._run.state.plan.slots)

    def finish(self) -> None:
        """The training is over."""
        if self._health is not None:
            self._health.stop()
