"""How a slot learns that its generation has a fault."""

from __future__ import annotations

import logging
import threading
import time

from nep.fault_tolerance.connections import Connections
from nep.fault_tolerance.control_store import fault_key

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_RENEW_S = 86_400.0  # how long one blocking request lasts; a time-out costs the store a warning


class FaultWatch:
    """Watches the fault flag of one generation in a thread of its own.

    The control store notifies; nothing is polled. While it cannot be reached there are no news of this kind; once it
    can, the watch goes on. The thread ends when the flag is raised, which every generation but the last does, or with
    the process.

    Args:
        connections: where to take one from; it is given back when the flag is raised.
        generation: whose flag.
    """

    def __init__(self, connections: Connections, generation: int):
        self._connections = connections
        self._store = connections.take()
        self._key = fault_key(generation)
        self._reason: str | None = None
        threading.Thread(target=self._watch, name=f"fault-{generation}", daemon=True).start()

    def _watch(self) -> None:
        told = False
        while True:
            try:
                while not self._store.wait(self._key, _RENEW_S):
                    pass
                self._reason = self._store.get(self._key) or "a fault"
                self._connections.give_back(self._store)
                return
            except RuntimeError as error:
                # That alone is no fault: the slots hear each other, and a lost one shows on the data path.
                if not told:
                    log.warning("the control store cannot be reached (%s); going on without", type(error).__name__)
                    told = True
            time.sleep(_RETRY_S)

    def reason(self) -> str | None:
        """Why the generation has a fault, or None."""
        return self._reason
