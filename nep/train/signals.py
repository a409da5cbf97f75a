"""SIGTERM and SIGINT as a wish: finish the step, write a checkpoint, end. A second one ends the process at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Remembers that a signal has come.

    Attributes:
        received: its name, or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch signals inside; outside of the main thread, which alone could, nothing is caught."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
