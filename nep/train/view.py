"""What people see while a job trains, and what it leaves at its end: the lowest live slot prints and writes."""

from __future__ import annotations

import sys
import time

from nep.checkpoint.weights import gather_parameters, save_parameters
from nep.fault_tolerance.corruption import Corruption
from nep.fault_tolerance.history import Committed
from nep.fault_tolerance.timeline import Recovery
from nep.planning.shapes import ModelShape
from nep.report.summary import summary
from nep.report.terminal import ProgressLine, print_text, terminal_width
from nep.train.config import TrainConfig
from nep.train.hooks import Hooks
from nep.train.outcome import outcome, write_json, write_loads, write_router_stats
from nep.train.trainer import Trainer


class View:
    """What people see of a job.

    Args:
        shape: of the model.
        config: of the job.
    """

    def __init__(self, shape: ModelShape, config: TrainConfig):
        self._shape, self._config = shape, config
        self._progress = ProgressLine(config.steps, stream=sys.stdout)
        self._last = time.perf_counter()

    def hooks(self) -> Hooks:
        return Hooks(
            on_commit=self._commit,
            on_recovery=self._recovery,
            on_corruption=self._corruption,
            on_end=self._end,
            on_message=self._message,
        )

    def close(self) -> None:
        self._progress.close()

    def _commit(self, trainer: Trainer, committed: Committed) -> None:
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        if trainer.reports:
            self._progress.update(
                committed.step,
                loss=committed.loss,
                tokens_per_s=committed.tokens / elapsed,
                generation=trainer.run_state.current.number,
                live_slots=trainer.members,
            )

    def _message(self, trainer: Trainer, line: str) -> None:
        self._progress.message(line)

    def _corruption(self, trainer: Trainer, corruption: Corruption) -> None:
        if trainer.reports:
            self._progress.message(str(corruption))

    def _recovery(self, trainer: Trainer, recovery: Recovery) -> None:
        if trainer.reports:
            phases = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in recovery.phases_s().items())
            since = "from the last step" if recovery.planned else "from failure"
            self._progress.message(
                f"generation {recovery.generation}: {recovery.reason}; {recovery.total_s * 1e3:.0f} ms {since} "
                f"to the next committed step ({phases})"
            )

    def _end(self, trainer: Trainer) -> None:
        """After the last step, while all slots are there."""
        shape, config, run = self._shape, self._config, trainer.run_state
        lines = run.recipe.lines
        if config.save_params is not None:
            tensors = gather_parameters(
                run.state,
                lines,
                run.recipe.dtype,
                to=trainer.plan.slots[0],
                communicator=run.current.groups.transfer,
                waiter=run.current.waiter,
            )
            if trainer.reports:
                save_parameters(config.save_params, shape, lines, tensors, run.routing)
        if not trainer.reports:
            return
        self.close()
        result = outcome(trainer, shape.name)
        if config.loads_out is not None:
            write_loads(config.loads_out, trainer, shape.name)
        if config.balance.router_stats_out is not None:
            write_router_stats(config.balance.router_stats_out, trainer, shape.name)
        if config.json is not None:
            write_json(config.json, result)
        page = summary(
            result, before=trainer.plans[0], after=trainer.plan, lines=lines, width=terminal_width(sys.stdout)
        )
        print_text(f"\n{page}\n\nlogs: {run.job.run_dir}")
