"""A preemption notice (SIGUSR1): the slot asks to leave before its machine goes; a job that all must leave stops."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed import DistError

from nep.fault_tolerance.requests import Request, drained
from nep.fault_tolerance.runtime import SlotRun
from nep.train.signals import StopSignals


class Preemption:
    """What one trainer does about a notice.

    Args:
        signals: has heard it or not.
        run: this slot's.
        can_stop: whether there is a place for a checkpoint; without one the job rather goes on as long as it may.
        announce: says a line to people.
    """

    def __init__(self, signals: StopSignals, run: SlotRun, can_stop: bool, announce: Callable[[str], None]):
        self._signals, self._run, self._can_stop, self._announce = signals, run, can_stop, announce
        self._told = False

    def tell(self) -> None:
        """Ask once that this slot may leave. Between two steps, in the main thread; it waits for nobody."""
        run = self._run
        if not self._signals.noticed or self._told:
            return
        try:
            if run.slot not in drained(run.requests.known):
                run.requests.post(run.store, Request(kind="drain", slot=run.slot))
        except DistError:
            return  # the store cannot be reached: the next boundary asks again
        self._told = True
        self._announce("preemption notice: this slot leaves after the next step")

    def ends_job(self) -> bool:
        """Whether every slot that trains shall leave, so that a checkpoint is all that can be done."""
        asked = drained(self._run.requests.known)
        return self._signals.noticed and self._can_stop and asked.issuperset(self._run.state.plan.slots)
