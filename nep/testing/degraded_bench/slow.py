"""A slot becomes slow while the job trains: with and without compensation, from measured votes alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from nep.report.layouts import rendered
from nep.testing.degraded_bench.jobs import Job
from nep.testing.degraded_bench.measure import Bench
from nep.testing.emulation.run import EmulatedRun, run_emulated
from nep.testing.emulation.setting import LABEL, SpeedChange
from nep.testing.emulation.steering import Steersman

SLOWER = 1.5
WITHIN_STEPS = 20
_SLOT, _FROM_STEP = 2, 4
_LAST = 3
"""Steps at the end that a pace is the mean of."""


@dataclass(frozen=True, kw_only=True)
class SlowTable:
    """One job with one slot that is slower than the others from some step on.

    Attributes:
        job: which.
        steps: steps after the change.
        healthy_s, without_s, with_s: seconds of a step before it, after it without compensation, and with.
        cpu_share: of the processors, with compensation.
        flagged_after: steps until the slot was known to be slow; None: never.
        moved_s: seconds that all changes of layout took.
        lines: what was done: (step, line).
    """

    job: Job
    steps: int
    healthy_s: float
    without_s: float
    with_s: float
    cpu_share: float
    flagged_after: int | None
    moved_s: float
    lines: tuple[tuple[int, str], ...]

    @property
    def speeds(self) -> float:
        """Sum of speeds over the number of slots."""
        return 1 - (1 - 1 / SLOWER) / self.job.num_slots

    def of_speeds(self, step_s: float) -> float:
        """Samples per second over those of the healthy job times what is left of the speeds."""
        return self.healthy_s / step_s / self.speeds

    def to_json(self) -> dict[str, Any]:
        return {
            "slots": self.job.num_slots,
            "slower": SLOWER,
            "steps": self.steps,
            "share_of_speeds": self.of_speeds(self.with_s),
            "share_of_speeds_without": self.of_speeds(self.without_s),
            "share_of_healthy": self.healthy_s / self.with_s,
            "step_s": {"healthy": self.healthy_s, "without": self.without_s, "with": self.with_s},
            "flagged_after_steps": self.flagged_after,
            "moved_s": self.moved_s,
            "cpu_share": self.cpu_share,
            "log": [{"step": step, "line": line} for step, line in self.lines],
        }

    def text(self) -> str:
        """A table."""
        table = Table(
            title=f"{self.job.name}, {self.job.num_slots} slots, one of them {SLOWER}x slow: {LABEL}, mean of the last "
            f"{_LAST} of {self.steps} steps",
            title_justify="left",
        )
        table.add_column("")
        for name in ("step s", "of healthy", "of the sum of speeds"):
            table.add_column(name, justify="right")
        for name, seconds in (("without compensation", self.without_s), ("with", self.with_s)):
            table.add_row(name, f"{seconds:.4f}", f"{self.healthy_s / seconds:.4f}", f"{self.of_speeds(seconds):.4f}")
        found = "never flagged" if self.flagged_after is None else f"flagged after {self.flagged_after} steps"
        table.caption = f"{found}; changes of layout took {self.moved_s:.2f} s; CPU {self.cpu_share:.0%}"
        return "\n".join([rendered(table, width=120), *(f"  step {step}: {line}" for step, line in self.lines)])


def run_slow(bench: Bench, *, within: int = WITHIN_STEPS, tell: Callable[[str], None] = lambda _: None) -> SlowTable:
    """Runs the job with a slot that becomes slow.

    Args:
        bench: of the job.
        within: steps after the change.
        tell: is told each result.
    """
    job = bench.job
    emulation = job.emulation(bench.build, bench.pace, lambda slot, step, now_s: 1.0)
    change = SpeedChange(step=_FROM_STEP, slot=_SLOT, factor=1 / SLOWER)
    few = run_emulated(job.healthy, emulation, steps=_FROM_STEP + _LAST, schedule=[change])
    healthy_s = statistics.fmean(step.seconds for step in few.steps if 1 < step.number < _FROM_STEP)
    without_s = _last(few)
    tell(f"{job.name}, one slot slow, without compensation: {without_s:.4f} s after {healthy_s:.4f} s")
    steersman = Steersman(emulation=emulation)
    run = run_emulated(job.healthy, emulation, steps=_FROM_STEP - 1 + within, schedule=[change], steer=steersman)
    flagged = [step for step, found in steersman.changes if found.slot == _SLOT]
    return SlowTable(
        job=job,
        steps=within,
        healthy_s=healthy_s,
        without_s=without_s,
        with_s=_last(run),
        cpu_share=run.cpu_share,
        flagged_after=flagged[0] - _FROM_STEP + 1 if flagged else None,
        moved_s=sum(run.moved_s.values()),
        lines=tuple((step, found.line) for step, found in steersman.compensations),
    )


def _last(run: EmulatedRun) -> float:
    """Seconds of a step at the end: as slept where time is slept."""
    slept = sum(step.wall_s for step in run.steps) / sum(step.seconds for step in run.steps) if run.pace else 1.0
    return slept * statistics.fmean(step.seconds for step in run.steps[-_LAST:])
