"""Leases: how slots learn that a supervisor is gone whose process they cannot see.

Each supervisor writes another value into its key several times a term. Nobody compares clocks of two hosts: who wants
to know looks at the key and counts terms of its own clock in which it has not changed. One term may be the observer's
own pause (it was stopped, or the control store was out of reach), hence two in a row, each begun with a look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nep.fault_tolerance.control_store import ControlStore, lease_key

TERMS = 2


@dataclass
class _Seen:
    value: str
    since_s: float
    terms: int = 0


class LeaseWatch:
    """Watches the leases of some slots.

    Args:
        store: the caller's connection.
        lease_s: a term.
        clock: seconds that only ever grow.

    Attributes:
        renewed: slots whose lease was renewed since they were first asked about.
    """

    def __init__(self, store: ControlStore, lease_s: float, clock: Callable[[], float] = time.monotonic):
        self._store = store
        self._lease_s = lease_s
        self._clock = clock
        self._seen: dict[int, _Seen] = {}
        self.renewed: set[int] = set()

    def expired(self, slots: Iterable[int]) -> set[int]:
        """Those whose lease has expired twice since they were first asked about. One that never had any has not."""
        found = set()
        for slot in slots:
            value = self._store.get(lease_key(slot))
            if value is None:
                continue
            now = self._clock()
            seen = self._seen.get(slot)
            if seen is None or seen.value != value:
                if seen is not None:
                    self.renewed.add(slot)
                self._seen[slot] = _Seen(value, now)
                continue
            if now - seen.since_s >= self._lease_s:
                seen.terms, seen.since_s = seen.terms + 1, now
            if seen.terms >= TERMS:
                found.add(slot)
        return found
