"""Signals as wishes.

SIGTERM and SIGINT: finish the step, write a checkpoint, end; a second one ends the process at once. SIGUSR1 is a
preemption notice: this slot's machine will be taken away soon, so the slot shall leave.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nep.fault_tolerance.processes import NOTICE

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Remembers which signals have come.

    Attributes:
        received: name of the one that asks the job to stop, or None.
        noticed: whether a preemption notice has come.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.noticed = False

    @contextmanager
    def caught(self, *, stop: bool) -> Iterator[None]:
        """Catch signals inside; outside of the main thread, which alone could, nothing is caught.

        Args:
            stop: also those that ask the job to stop. Without a checkpoint there is nothing to do before the end.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (*_STOP_SIGNALS, NOTICE) if stop else (NOTICE,)
        before = {number: signal.signal(number, self._receive) for number in numbers}
        was_blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {NOTICE})  # one that came earlier is heard now
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, was_blocked)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == NOTICE:
            self.noticed = True
            return
        self.received = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
