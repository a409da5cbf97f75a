"""Which jobs are measured, one after the other, and what is asked of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nep.testing.machine import machine_text
from nep.testing.recovery_bench.figures import Figures, ledger
from nep.testing.recovery_bench.jobs import MeasuredJob, NepJob, RestartJob, TorchftJob
from nep.testing.recovery_bench.journal import Events
from nep.testing.recovery_bench.kills import Pace, play
from nep.testing.recovery_bench.settings import DOCUMENTED, tuned
from nep.testing.recovery_bench.work import Work

# nep twice, since each peer can do one of the two: experts spread over all ranks, and the whole model on every rank.
NEP_SPREAD, NEP_WHOLE = "nep, experts spread", "nep, whole model"
RESTART, TORCHFT_DOCUMENTED, TORCHFT_TUNED = "torchrun restart", "torchft documented", "torchft tuned"
NEP = (NEP_SPREAD, NEP_WHOLE)
KINDS = {"nep": NEP, "restart": (RESTART,), "torchft": (TORCHFT_DOCUMENTED, TORCHFT_TUNED)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job that is measured.

    Attributes:
        kind: one of those in KINDS.
        ranks: how many processes train.
    """

    kind: str
    ranks: int

    def job(self, work: Work, kills: int, torchft_python: Path | None) -> MeasuredJob:
        """Its processes, not started yet."""
        common: dict[str, Any] = {"work": work, "num_ranks": self.ranks, "kills": kills}
        if self.kind in NEP:
            return NepJob(**common, replicas=1 if self.kind == NEP_SPREAD else self.ranks)
        if self.kind == RESTART:
            return RestartJob(**common)
        assert torchft_python is not None
        settings = DOCUMENTED if self.kind == TORCHFT_DOCUMENTED else tuned(self.ranks)
        return TorchftJob(**common, python=torchft_python, settings=settings)


def cases_of(peers: Sequence[str], ranks: Sequence[int], torchft_python: Path | None) -> tuple[list[Case], list[Case]]:
    """What to measure, and what cannot be."""
    every = [Case(kind=kind, ranks=size) for size in ranks for peer in peers for kind in KINDS[peer]]
    without = {TORCHFT_DOCUMENTED, TORCHFT_TUNED} if torchft_python is None else set()
    return [case for case in every if case.kind not in without], [case for case in every if case.kind in without]


def measure(
    case: Case,
    pace: Pace,
    *,
    torchft_python: Path | None = None,
    keep: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run one job and kill in it.

    Args:
        keep: where the folder of the job stays; None: nothing is kept.
        say: gets a line now and then.

    Returns:
        Its figures; with `failed` in place of them if the job did not come back.
    """
    facts = {"kind": case.kind, "ranks": case.ranks, "when": time.strftime("%Y-%m-%d %H:%M")}
    with tempfile.TemporaryDirectory(prefix="recovery-") as temporary:
        folder = Path(temporary)
        if keep is not None:
            folder = keep / f"{case.kind.replace(',', '').replace(' ', '-')}-{case.ranks}"
            folder.mkdir(parents=True)
        work = Work(folder=folder)
        job = case.job(work, pace.kills, torchft_python)
        try:
            figures, events = play(job, pace, lambda done: say(f"{case.kind}, {case.ranks} ranks: {done} kills"))
        except (RuntimeError, ValueError) as error:
            return {**facts, "machine": machine_text("torch"), "failed": str(error)}
    return {**facts, "machine": machine_text("torch"), **figures.summary(), **_samples(case, figures, events, work)}


def _samples(case: Case, figures: Figures, events: Events, work: Work) -> dict[str, int | None]:
    """Samples that no committed step has used, and those that were used again."""
    if case.kind in NEP:
        return ledger(events, work.batch)
    if case.kind == RESTART:
        undone = sum(one.undone_steps for one in figures.outcomes)
        return {"lost_steps": 0, "lost_samples": 0, "repeated_samples": undone * work.batch}
    # What a rank had taken for a step that was given up; of the killed rank itself nothing is known.
    lost = sum(one["samples"] for rank in events for one in events[rank] if one["kind"] == "dropped")
    return {"lost_steps": figures.summary()["dropped_steps"], "lost_samples": lost, "repeated_samples": None}
