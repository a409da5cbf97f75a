"""scripts/train.py, except that slot 0 sends a signal when a step is committed: NEP_TEST_SIGNAL=NAME@launcher, or
NAME@supervisor (its own).

It then waits until it is told to stop (or dies with its supervisor), and the others do so one step later: however
long the news takes, it does not come after the last step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.mixtral import build
from nep.fault_tolerance.history import Committed
from nep.train import main
from nep.train.trainer import Trainer

STEP = 3
LIMIT_S = 20.0  # less than what the others let a slot compute
_commit = main._View._commit


def _stop_after(view: main._View, trainer: Trainer, committed: Committed) -> None:
    _commit(view, trainer, committed)
    if trainer.slot == 0 and committed.step == STEP:
        name, _, target = os.environ["NEP_TEST_SIGNAL"].partition("@")
        pid = os.getppid()
        if target == "launcher":
            pid = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
        os.kill(pid, signal.Signals[name])
    if committed.step == STEP + (trainer.slot != 0):
        deadline = time.monotonic() + LIMIT_S
        while trainer._signals.received is None:
            assert time.monotonic() < deadline, f"slot {trainer.slot} is not told to stop"
            time.sleep(0.01)


if __name__ == "__main__":
    main._View._commit = _stop_after  # type: ignore[method-assign]
    sys.exit(main.main(build))
