"""The start of a job: nobody is late for generation 1 by coming up slowly."""

from __future__ import annotations

import time
from collections.abc import Callable

from nep.fault_tolerance.control_store import FIRST_GENERATION, ControlStore, arrived_key, end_key, fault_key
from nep.fault_tolerance.membership import JobEnded

_PAUSE_S = 0.01
_REMIND_S = 30.0


def wait_for_everybody(
    store: ControlStore, slot: int, num_slots: int, timeout_s: float, say: Callable[[str], None]
) -> None:
    """Return when all trainers have come up, or cannot: building groups may take its own short time-out then.

    A trainer that dies before it comes up raises the fault flag of generation 1 through its supervisor, and one that
    does not come in time is left to the time-outs of generation 1.

    Args:
        slot: this one, which is ready.
        timeout_s: how long to wait for the others.
        say: gets a line now and then while slots are missing.

    Raises:
        JobEnded: some slot has found that it cannot begin.
    """
    store.set(arrived_key(slot), "1")
    missing = [other for other in range(num_slots) if other != slot]
    broken = fault_key(FIRST_GENERATION)
    start = said = time.monotonic()
    while missing and not store.exists([broken]):
        if store.exists([arrived_key(other) for other in missing]):
            return
        if (ended := store.get(end_key())) is not None:
            raise JobEnded(int(ended))
        now = time.monotonic()
        if now - start > timeout_s:
            say(f"slots {_missing(store, missing)} have not come up in {timeout_s:g} s; no longer waiting for them")
            return
        if now - said > _REMIND_S:
            missing, said = _missing(store, missing), now
            say(f"waiting for slots {missing} to come up")
        time.sleep(_PAUSE_S)


def _missing(store: ControlStore, slots: list[int]) -> list[int]:
    return [slot for slot in slots if not store.exists([arrived_key(slot)])]
