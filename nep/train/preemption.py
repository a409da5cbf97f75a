"""A slot that leaves by itself: a preemption notice (SIGUSR1) has come, or its health check complains.

It asks to be drained, before its machine is taken away or does harm. A job that all slots must leave stops.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import DistError

from nep.fault_tolerance.requests import Request, drained
from nep.fault_tolerance.runtime import SlotRun
from nep.train.health import HealthWatch
from nep.train.signals import StopSignals


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
        self._told = False

    @property
    def reason(self) -> str | None:
        """Why this slot shall leave, or None."""
        if self._signals.noticed:
            return "preemption notice"
        if self._health is not None and self._health.complaint is not None:
            return f"health check: {self._health.complaint}"
        return None

    def tell(self) -> None:
        """Ask once that this slot may leave. Between two steps, in the main thread; it waits for nobody."""
        run, reason = self._run, self.reason
        if reason is None or self._told:
            return
        try:
            if run.slot not in drained(run.requests.known):
                run.requests.post(run.store, Request(kind="drain", slot=run.slot))
        except DistError:
            return  # the store cannot be reached: the next boundary asks again
        self._told = True
        self._announce(f"{reason}: this slot leaves after the next step")

    def ends_job(self) -> bool:
        """Whether every slot that trains shall leave, so that a checkpoint is all that can be done."""
        asked = drained(self._run.requests.known)
        return self.reason is not None and self._can_stop and asked.issuperset(self._run.state.plan.slots)

    def finish(self) -> None:
        """The training is over."""
        if self._health is not None:
            self._health.stop()
