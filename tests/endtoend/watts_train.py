"""scripts/train.py on slots that all measure the same speed, and `--hold STEP:SLOT` (repeatable): that slot does not
end that step before its board in the file of simulated boards has another limit than at first, and whoever watches
that file has seen it (and written it to a file beside it, `SEEN`).

So what is decided, and when, does not depend on how busy the machine is.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.mixtral import build
from nep.planning.pace import PaceMeter
from nep.power.simulated_file import open_file
from nep.train import trainer
from nep.train.main import main

LIMIT_S = 28.0  # less than what the others let a slot compute
SEEN = ".seen"  # suffix: the limits that were seen last


def alike(meter: PaceMeter, *, least_change: float = 0.0) -> dict[int, int]:
    return dict.fromkeys(sorted(meter._slots), 1_000_000)


def hold(holds: dict[int, int], file: Path) -> None:
    """Make these steps wait."""
    commit_step: Any = trainer.commit_step

    def held(run: Any, step: int, *rest: Any) -> bool:
        if holds.get(step) == run.slot:
            board, deadline = open_file(file)[run.slot], time.monotonic() + LIMIT_S
            seen = file.with_suffix(SEEN)
            while board.limit_w() == board.range_w().default_w or json.loads(seen.read_text())[run.slot] != (
                board.limit_w()
            ):
                assert time.monotonic() < deadline, f"step {step} waits for another limit in vain"
                time.sleep(0.02)
        return commit_step(run, step, *rest)

    trainer.commit_step = held  # type: ignore[assignment]


def take_holds(arguments: list[str]) -> tuple[dict[int, int], list[str]]:
    """The holds, and the arguments without them."""
    holds: dict[int, int] = {}
    while "--hold" in arguments:
        place = arguments.index("--hold")
        step, _, slot = arguments[place + 1].partition(":")
        holds[int(step)] = int(slot)
        arguments = arguments[:place] + arguments[place + 2 :]
    return holds, arguments


if __name__ == "__main__":
    holds, arguments = take_holds(sys.argv[1:])
    PaceMeter.speeds_ppm = alike  # type: ignore[method-assign]
    (file,) = [one.removeprefix("simulated:") for one in arguments if one.startswith("simulated:")]
    hold(holds, Path(file))
    sys.exit(main(build, arguments))
