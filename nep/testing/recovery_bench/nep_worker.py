"""A slot of nep's job: `scripts/train.py` with a journal.

    torchrun --standalone --nproc-per-node N nep/testing/recovery_bench/nep_worker.py FOLDER OPTIONS OF TRAIN.PY...

The trainer is the one of `scripts/train.py`, and so is the command line; it writes down its commits and recoveries, and
marks when it waits for others.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from models.mixtral import build
from nep.distributed.waiting import Waiter
from nep.fault_tolerance.history import Committed
from nep.fault_tolerance.job import Job
from nep.fault_tolerance.timeline import Recovery
from nep.planning.plan import Plan
from nep.testing.recovery_bench.journal import Journal, Marks
from nep.train import main as command_line
from nep.train.trainer import Trainer


class ObservedTrainer(Trainer):
    """A trainer that keeps a journal."""

    folder: Path

    def run(self, job: Job) -> int:
        """As the trainer does."""
        self._journal, self._marks = Journal(self.folder, job.slot), Marks(self.folder, job.slot)
        mark_waits(self._marks)
        self._known: int | None = None  # committed steps that are written down, or that others wrote down
        given = self.hooks

        def on_plan(trainer: Trainer, plan: Plan) -> None:
            if self._known is None:
                self._known = len(self.run_state.history.steps)
                probe = self.run_state.probe
                self.run_state.probe = lambda phase, step: (self._marks.come_by(phase), probe(phase, step))[1]
            given.on_plan(trainer, plan)

        def on_commit(trainer: Trainer, committed: Committed) -> None:
            self._write_steps()
            given.on_commit(trainer, committed)

        def on_recovery(trainer: Trainer, recovery: Recovery) -> None:
            self._journal.write("recovery", **dataclasses.asdict(recovery))
            given.on_recovery(trainer, recovery)

        self.hooks = dataclasses.replace(given, on_plan=on_plan, on_commit=on_commit, on_recovery=on_recovery)
        return super().run(job)

    def _write_steps(self) -> None:
        """The step just committed, and one before it that a recovery has rolled forward."""
        assert self._known is not None
        steps = self.run_state.history.steps
        for committed in steps[self._known :]:
            self._journal.write(
                "step",
                step=committed.step,
                size=len(self.members),
                generation=self.run_state.current.number,
                samples=committed.samples,
                sample_hash=committed.sample_hash,
                rolled=committed is not steps[-1],
                cpu_s=time.process_time(),
            )
        self._known = len(steps)


def mark_waits(marks: Marks) -> None:
    """Mark every wait for others of this process: all of them go through `Waiter.wait`."""
    wait = Waiter.wait

    def marked(self: Waiter, pending: Any, what: str, deadline_s: float | None = None) -> None:
        marks.enter(what)
        try:
            wait(self, pending, what, deadline_s)
        finally:
            marks.leave()

    Waiter.wait = marked  # type: ignore[method-assign]


if __name__ == "__main__":
    ObservedTrainer.folder = Path(sys.argv[1])
    command_line.Trainer = ObservedTrainer  # type: ignore[misc]
    sys.exit(command_line.main(build, sys.argv[2:]))
