"""scripts/train.py, except that the slots in NEP_TEST_LEAVING (SLOT,SLOT,...) wait after step 2 until they know that
they are to leave, and step 3 of all slots until they, and NEP_TEST_SPARES slots in reserve, have asked for something.

So a notice or a complaint counts from step 3 on, however slow the machine is.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.mixtral import build
from nep.fault_tolerance.control_store import request_key
from nep.fault_tolerance.history import Committed
from nep.train import main, trainer
from nep.train.trainer import Trainer

LIMIT_S = 28.0  # less than what the others let a slot compute
LEAVING = [int(slot) for slot in os.environ["NEP_TEST_LEAVING"].split(",")]
SPARES = int(os.environ["NEP_TEST_SPARES"])
_commit = main._View._commit
_commit_step: Any = trainer.commit_step


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def _wait_after(view: main._View, job: Trainer, committed: Committed) -> None:
    _commit(view, job, committed)
    if committed.step == 2 and job.slot in LEAVING:
        store = job.run_state.store
        until(lambda: not SPARES or store.exists(request_key(SPARES)), "those in reserve do not come")
        until(lambda: job.preemption is not None and job.preemption.reason, f"slot {job.slot} is not told to leave")


def _wait_before(run: Any, step: int, *rest: Any) -> bool:
    if step == 3:
        until(lambda: run.store.exists(request_key(SPARES + len(LEAVING))), "not all have asked to leave")
        run.requests.read(run.store)
    return bool(_commit_step(run, step, *rest))


if __name__ == "__main__":
    main._View._commit = _wait_after  # type: ignore[method-assign]
    trainer.commit_step = _wait_before  # type: ignore[assignment]
    sys.exit(main.main(build))
