"""scripts/train.py, except that after each step named in NEP_TEST_GATES (STEP,STEP,...) the slot that reports writes
NEP_TEST_GATE_DIR/at<STEP> and waits for go<STEP>. The others wait for it in the next step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.mixtral import build
from nep.fault_tolerance.history import Committed
from nep.train import main
from nep.train.trainer import Trainer

LIMIT_S = 100.0
_commit = main._View._commit


def _wait_after(view: main._View, trainer: Trainer, committed: Committed) -> None:
    _commit(view, trainer, committed)
    folder = Path(os.environ["NEP_TEST_GATE_DIR"])
    if trainer.reports and str(committed.step) in os.environ["NEP_TEST_GATES"].split(","):
        (folder / f"at{committed.step}").touch()
        deadline = time.monotonic() + LIMIT_S
        while not (folder / f"go{committed.step}").exists():
            assert time.monotonic() < deadline, f"the gate after step {committed.step} stays shut"
            time.sleep(0.005)


if __name__ == "__main__":
    main._View._commit = _wait_after  # type: ignore[method-assign]
    sys.exit(main.main(build))
