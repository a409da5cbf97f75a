"""What a slot hears from the control store and tells it while it trains: no step may wait for the store."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from nep.fault_tolerance.connections import Connections
from nep.fault_tolerance.control_store import ControlStore, request_key, step_key
from nep.fault_tolerance.requests import Requests

_RENEW_S = 86_400.0  # how long one blocking request lasts; a time-out costs the store a warning
_RETRY_S = 0.5
_PAUSE_S = 0.005
_TELL_S = 0.5  # between two words on the step


def follow_requests(connections: Connections, requests: Requests) -> None:
    """Read requests as they come, in a thread of its own. The store notifies; nothing is polled."""
    connection = connections.take()

    def follow() -> None:
        while True:
            try:
                while True:
                    number = len(requests.known)
                    if connection.wait(request_key(number + 1), _RENEW_S) and requests.read(connection) == number:
                        time.sleep(_PAUSE_S)
            except RuntimeError:
                time.sleep(_RETRY_S)  # the store cannot be reached: there are no news

    threading.Thread(target=follow, name="requests", daemon=True).start()


class StepBoard:
    """Tells the store now and then which step is committed, for `nep status`, in a thread of its own.

    Args:
        connections: where to take one from, at the first word.
    """

    def __init__(self, connections: Connections):
        self._connections = connections
        self._news = threading.Event()
        self._last: dict[str, Any] = {}
        self._thread: threading.Thread | None = None

    def tell(self, **step: Any) -> None:
        """The newest step; what it replaces may never have been told."""
        self._last = step
        self._news.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="step", daemon=True)
            self._thread.start()

    def _write(self) -> None:
        connection: ControlStore | None = None
        while self._news.wait():
            self._news.clear()
            with contextlib.suppress(RuntimeError):  # the store cannot be reached: nobody is told meanwhile
                connection = connection or self._connections.take()
                connection.set_json(step_key(), self._last)
            time.sleep(_TELL_S)
