"""Connections to the control store, opened before they are needed.

Opening one asks the resolver for the peer's name, and where that does not answer it takes seconds (5 s at a time,
measured in one of thirty connections on a machine with a lossy resolver). Nothing on the way of a recovery may
wait for that, so a few idle connections are kept ready. The store's server asks for the peer's name, too, and answers
nobody meanwhile: so new ones are not opened at once in place of those that a recovery takes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator

from nep.fault_tolerance.control_store import ControlStore


class Connections:
    """Idle connections of one slot; any thread may take one and give it back.

    Args:
        store: the connection that others are cloned from, by one thread at a time.
        ready: how many to keep idle.
        pause_s: from taking one until another is opened; in a recovery others are given back soon.
    """

    def __init__(self, store: ControlStore, ready: int, pause_s: float = 2.0):
        self._store = store.clone()
        self._ready = ready
        self._pause_s = pause_s
        self._refilling = False
        self._idle: deque[ControlStore] = deque()
        self._lock = threading.Lock()  # guards the clones' parent, which is one connection
        self._refreshing = threading.Lock()
        self._refill()

    def take(self) -> ControlStore:
        """A connection that nobody else uses; opened now if none is idle."""
        try:
            while True:
                connection = self._idle.popleft()
                # Idle ones fail with the others when the network does. One round trip: nobody waits for a name.
                if connection.works():
                    connection.on_reopen = self._refresh_soon
                    return connection
        except IndexError:
            with self._lock:
                return self._store.clone()
        finally:
            if not self._refilling:
                self._refilling = True
                threading.Thread(target=self._refill_later, name="connections", daemon=True).start()

    def give_back(self, connection: ControlStore) -> None:
        """The connection is idle again: no call on it is in progress."""
        self._idle.append(connection)

    def _refresh_soon(self) -> None:
        """One connection had to be opened anew: the idle ones have failed, too. Not when a recovery needs them."""
        threading.Thread(target=self._refresh, name="connections", daemon=True).start()

    def _refresh(self) -> None:
        if not self._refreshing.acquire(blocking=False):
            return
        try:
            for _ in range(len(self._idle)):
                connection = self._idle.popleft()
                if connection.works():
                    self._idle.append(connection)
        except IndexError:
            pass  # somebody has taken the last one
        finally:
            self._refreshing.release()
        self._refill()

    def _refill_later(self) -> None:
        time.sleep(self._pause_s)
        self._refilling = False
        self._refill()

    def _refill(self) -> None:
        with self._lock:
            try:
                while len(self._idle) < self._ready:
                    self._idle.append(self._store.clone())
            except RuntimeError:
                return  # the store is gone; whoever needs it will say so


@contextlib.contextmanager
def lent(connections: Connections) -> Iterator[ControlStore]:
    """A connection for the time of a few calls in one thread, given back however they end.

    One that has failed is given back, too: whoever takes it next finds out first whether it works, and opens another.
    """
    connection = connections.take()
    try:
        yield connection
    finally:
        connections.give_back(connection)
