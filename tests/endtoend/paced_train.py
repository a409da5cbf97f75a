"""scripts/train.py, but `--hold STEP:N` (repeatable) makes that step wait until N requests are in the control store.

Steps before it see none but those of earlier holds. So a test knows after which step a slot leaves or comes back,
however slow the machine is.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.mixtral import build
from nep.fault_tolerance import runtime
from nep.fault_tolerance.control_store import ControlStore, request_key
from nep.fault_tolerance.requests import Request, Requests
from nep.train import trainer
from nep.train.main import main

LIMIT_S = 60.0


def hold(at: dict[int, int]) -> None:
    """Make these steps wait before their vote."""
    commit_step: Any = trainer.commit_step
    now = {"step": 0, "posting": 0}

    class Paced(Requests):
        def read(self, store: ControlStore) -> int:
            waits = any(step > now["step"] for step in at) and not now["posting"]
            visible = max((number for step, number in at.items() if step <= now["step"]), default=0)
            while not waits or len(self.known) < visible:
                number = len(self.known) + 1
                text = store.get(request_key(number))
                if text is None:
                    break
                self.add(number, Request.from_json(text))
            return len(self.known)

        def post(self, store: ControlStore, request: Request) -> int:
            now["posting"] = 1
            number = super().post(store, request)
            now["posting"] = 0
            return number

    def held(run: Any, step: int, *rest: Any) -> bool:
        now["step"] = step
        deadline = time.monotonic() + LIMIT_S
        while step in at and not run.store.exists(request_key(at[step])):
            assert time.monotonic() < deadline, f"step {step} waits for request {at[step]} in vain"
            time.sleep(0.005)
        run.requests.read(run.store)
        return commit_step(run, step, *rest)

    trainer.commit_step = held  # type: ignore[assignment]
    init = runtime.SlotRun.__init__

    def paced(self: Any, **fields: Any) -> None:
        init(self, **fields)
        self.requests = Paced()

    runtime.SlotRun.__init__ = paced  # type: ignore[method-assign]


def take_holds(arguments: list[str]) -> tuple[dict[int, int], list[str]]:
    """The holds, and the arguments without them."""
    holds: dict[int, int] = {}
    while "--hold" in arguments:
        place = arguments.index("--hold")
        step, _, number = arguments[place + 1].partition(":")
        holds[int(step)] = int(number)
        arguments = arguments[:place] + arguments[place + 2 :]
    return holds, arguments


if __name__ == "__main__":
    holds, arguments = take_holds(sys.argv[1:])
    hold(holds)
    sys.exit(main(build, arguments))
