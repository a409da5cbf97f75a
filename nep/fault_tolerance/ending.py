"""END of the protocol: nobody leaves before the store says that all members have finished."""

from __future__ import annotations

import logging
import time

from torch.distributed import DistError

from nep.fault_tolerance.control_store import ControlStore, end_key, finished_key
from nep.fault_tolerance.runtime import SlotRun

log = logging.getLogger(__name__)


def finish_together(run: SlotRun, exit_code: int) -> None:
    """Wait for the other members, then end the job. All members call it.

    Args:
        exit_code: of the job.

    Raises:
        Fault: a member has not finished.
    """
    number, store = run.current.number, run.store
    everybody = [finished_key(number, slot) for slot in run.current.members]
    try:
        # A network that is cut is waited for: without this slot's word the others would take it for dead.
        with store.patience(run.recipe.timeouts.partition_s, run.stop_requested):
            store.set(finished_key(number, run.slot), "1")
            run.current.waiter.wait(_StoreKeys(store, everybody), "the end of the others")
            store.compare_and_set(end_key(), "", str(exit_code))
    except DistError as error:
        # The launcher that hosts it has died. Nobody can ask for anything any more, and all is done here.
        log.warning("the control store is gone (%s); leaving", type(error).__name__)


class _StoreKeys:
    """Keys that other slots write, as something to wait for."""

    _PAUSE_S = 0.005

    def __init__(self, store: ControlStore, keys: list[str]):
        self._store = store
        self._keys = keys

    def done(self) -> bool:
        time.sleep(self._PAUSE_S)
        return self._store.exists(self._keys)

    def check(self) -> None:
        return None

    def ended(self) -> bool:
        return True
