"""The control store's part in a save, in memory: for savers of several slots in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


class MemoryBoard:
    """Keys and values shared by threads; a `nep.checkpoint.board.Board`.

    Args:
        before_set: called with each key before it is written, outside of the lock (to fail there).
    """

    def __init__(self, before_set: Callable[[str], None] = lambda key: None):
        self.values: dict[str, str] = {}
        self._before_set = before_set
        self._lock = threading.Lock()

    def get(self, key: str) -> str | None:
        """The value of `key`, or None."""
        with self._lock:
            return self.values.get(key)

    def set(self, key: str, value: str) -> None:
        """Write `key`."""
        self._before_set(key)
        with self._lock:
            self.values[key] = value

    def compare_and_set(self, key: str, expected: str, value: str) -> str:
        """Write `key` if it holds `expected` ("": if it is absent); what it holds now."""
        self._before_set(key)
        with self._lock:
            if self.values.get(key, "") == expected:
                self.values[key] = value
            return self.values.get(key, "")

    def exists(self, keys: str | Iterable[str]) -> bool:
        """Whether all of `keys` are present."""
        with self._lock:
            return all(key in self.values for key in ([keys] if isinstance(keys, str) else keys))

    def add(self, key: str, amount: int) -> int:
        """Add to the integer at `key` and return the sum."""
        with self._lock:
            total = int(self.values.get(key, "0")) + amount
            self.values[key] = str(total)
            return total
