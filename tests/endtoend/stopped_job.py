"""scripts/train.py, except that slot 0 sends a signal when a step is committed: NEP_TEST_SIGNAL=NAME@launcher, or
NAME@supervisor (its own).
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
_commit = main._View._commit


def _stop_after(view: main._View, trainer: Trainer, committed: Committed) -> None:
    _commit(view, trainer, committed)
    if trainer.slot == 0 and committed.step == STEP:
        name, _, target = os.environ["NEP_TEST_SIGNAL"].partition("@")
        pid = os.getppid()
        if target == "launcher":
            pid = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
        os.kill(pid, signal.Signals[name])
        time.sleep(1.0)  # the others wait; the signal has come round by then


if __name__ == "__main__":
    main._View._commit = _stop_after  # type: ignore[method-assign]
    sys.exit(main.main(build))
