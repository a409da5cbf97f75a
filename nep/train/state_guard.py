"""What a trainer does about wrong bits in somebody's memory: it tells people, and asks for the slot to be drained."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from nep.fault_tolerance.connections import lent
from nep.fault_tolerance.control_store import corruption_key
from nep.fault_tolerance.corruption import Corruption
from nep.fault_tolerance.requests import Request
from nep.fault_tolerance.runtime import SlotRun
from nep.train.log import follow_generation

if TYPE_CHECKING:
    from nep.train.trainer import Trainer

log = logging.getLogger(__name__)

_LOG_AT = (10, 100, 1000, 10_000, 100_000)  # checks after which their cost is in the log


class StateGuard:
    """The time before each step of one trainer.

    Args:
        trainer: whose.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._told: int | None = None  # corruptions that hooks know of
        self._asking: threading.Thread | None = None
        self._logged = 0

    def before_step(self, step: int) -> None:
        """All that is to be done before a step is run, or run again. No waits.

        The step is put into the log's lines, a new state sealed, what was found passed on, and slots that were named
        are asked to leave.
        """
        run, trainer = self._trainer.run_state, self._trainer
        follow_generation(run.current.number, trainer.plan.replica_of(run.slot), run.slot, step)
        run.integrity.seal_for(run, step)
        found = run.history.corruptions
        if self._told is None:  # what came before is not news, on a slot that comes back
            self._told = sum(one.step < step for one in found)
        for one in found[self._told :]:
            trainer.hooks.on_corruption(trainer, one)
        self._told = len(found)
        self._ask(found)
        self._log_cost()

    def _ask(self, found: list[Corruption]) -> None:
        """Drain by the way that operators take. A request is known by its nonce, so it is posted once for the job:
        by the slot that comes first, or by any other if that one is gone."""
        run = self._trainer.run_state
        known = {request.nonce for request in run.requests.known}
        wanted = {(one.step, one.slot) for one in found if one.action == "drain" and one.slot in run.current.members}
        missing = sorted((step, slot) for step, slot in wanted if _nonce(step, slot) not in known)  # type: ignore[arg-type]
        if missing and (self._asking is None or not self._asking.is_alive()):
            members = run.current.members
            self._asking = threading.Thread(target=_post, args=(run, missing, members), name="drain-named", daemon=True)
            self._asking.start()

    def _log_cost(self) -> None:
        integrity, steps = self._trainer.run_state.integrity, self._trainer.run_state.history.steps
        if integrity.checks in _LOG_AT and integrity.checks != self._logged and steps:
            self._logged = integrity.checks
            log.info(
                "state checks: %d so far, %.2f ms each, every %d steps",
                integrity.checks,
                1e3 * integrity.seconds / integrity.checks,
                integrity.every,
            )


def _nonce(step: int, slot: int) -> str:
    return f"corruption-{step}-{slot}"


def _post(run: SlotRun, missing: list[tuple[int, int]], members: tuple[int, ...]) -> None:
    """In a thread of its own: no step waits for the store."""
    try:
        with lent(run.connections) as store:
            for step, slot in missing:
                run.requests.read(store)
                if any(request.nonce == _nonce(step, slot) for request in run.requests.known):
                    continue
                asks = int(store.compare_and_set(corruption_key(step, slot), "", str(run.slot)))
                if asks == run.slot or asks not in members:
                    why, nonce = "the check of its memory", _nonce(step, slot)
                    run.requests.post(store, Request(kind="drain", slot=slot, nonce=nonce, why=why))
    except RuntimeError as error:  # tried again before the next step
        log.warning("slots that were named cannot be asked to leave yet: %s", error)
