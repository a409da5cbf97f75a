"""Plays a series: runs its jobs, as often as it takes, and collects what they left."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nep.checkpoint.folders import whole_in
from nep.planning.shapes import preset
from nep.testing.chaos.cases import BASE_S, SAVE_EVERY, Series
from nep.testing.jobs import JobOutcome, reference_job, run_job
from nep.testing.reference import ReferenceHyper
from nep.train.data import TextCorpus

SCRIPT = Path(__file__).with_name("script.py")
SEQ_LEN, BATCH, LR, WARMUP = 16, 8, 3e-3, 2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the jobs: each replica on a node of its own (pretended), so that owners and mirrors are on different ones.

    Attributes:
        num_slots: of both nodes together.
        nodes, replicas: how many.
        base_s: from which every time-out follows.
        timeout_s: of a job.
    """

    num_slots: int = 6
    nodes: int = 2
    replicas: int = 2
    base_s: float = BASE_S
    timeout_s: float = 150.0


@dataclass(frozen=True, kw_only=True)
class Twin:
    """The same training without failures, in one process, by code that shares nothing with the distributed path.

    Attributes:
        data: the text.
        losses: of all steps.
        params: after the last, by their names in the file.
    """

    data: Path
    losses: list[float]
    params: dict[str, torch.Tensor]

    @classmethod
    def train(cls, steps: int, folder: Path) -> Twin:
        """Computed once for a number of steps: later calls with the same folder read it."""
        data, kept = folder / "text.txt", folder / f"twin-{steps}.pt"
        if not kept.exists():
            data.write_bytes(TextCorpus.generated(seed=1, num_bytes=200_000).text.tobytes())
            losses, params = reference_job(
                preset("debug"),
                data=data,
                steps=steps,
                seq_len=SEQ_LEN,
                global_batch_size=BATCH,
                seed=0,
                hyper=ReferenceHyper(lr=LR, warmup_steps=WARMUP, steps=steps),
            )
            torch.save((losses, params), kept)
        losses, params = torch.load(kept, weights_only=True)
        return cls(data=data, losses=losses, params=params)


@dataclass(frozen=True, kw_only=True)
class Played:
    """One job of a series.

    Attributes:
        outcome: what it left.
        events: what its slots noted, by time.
        newest_step: of the newest whole checkpoint afterwards, 0 if there is none.
        ended_at: when everybody had left, seconds since the epoch.
    """

    outcome: JobOutcome
    events: list[dict[str, Any]] = field(repr=False)
    newest_step: int
    ended_at: float

    def of(self, event: str, case: str | None = None) -> Iterator[dict[str, Any]]:
        """Events of one sort, perhaps of one case."""
        return (one for one in self.events if one["event"] == event and case in (None, one.get("case")))


def play(series: Series, twin: Twin, folder: Path, shape: Shape) -> list[Played]:
    """Run the jobs of a series.

    A series whose cases end their jobs takes a job for each, and one more that trains to the end.

    Args:
        series: what happens.
        twin: has the data.
        folder: for everything that the jobs write, fresh.
        shape: of the jobs.
    """
    parts = [Series(name=series.name, cases=(case,)) for case in series.cases] if series.ends_jobs else [series]
    played: list[Played] = []
    for number, part in enumerate(parts):
        played.append(_job(part, series.steps, twin, folder, str(number), shape))
        if series.ends_jobs and played[-1].outcome.result is not None:
            return played  # it did not end where it should have: nothing is left to train
    if series.ends_jobs:
        played.append(_job(Series(name="the end", cases=()), series.steps, twin, folder, "end", shape))
    return played


def _job(part: Series, steps: int, twin: Twin, folder: Path, name: str, shape: Shape) -> Played:
    here, saved = folder / name, folder / "saved"
    here.mkdir(parents=True)
    part.write(here / "series.json")
    options = f"--chaos {here / 'series.json'} --dtype float64 --steps {steps} --seq-len {SEQ_LEN} --lr {LR}"
    options += f" --global-batch-size {BATCH} --micro-batch-size 2 --warmup-steps {WARMUP} --validation-sequences 2"
    options += f" --replicas {shape.replicas} --respawn 1000 --timeout-base-s {shape.base_s} --data {twin.data}"
    options += f" --checkpoint-dir {saved} --checkpoint-every {SAVE_EVERY}"
    outcome = run_job(
        shape.num_slots, options.split(), here, script=SCRIPT, nodes=shape.nodes, timeout_s=shape.timeout_s
    )
    ended_at = time.time()
    (here / "output.txt").write_text(outcome.output)
    whole = whole_in(saved) if saved.is_dir() else []
    events = sorted(_events(here.glob("events-slot*.jsonl")), key=lambda event: float(event["time"]))
    return Played(
        outcome=outcome, events=events, newest_step=max((one.step for one in whole), default=0), ended_at=ended_at
    )


def _events(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        for line in path.read_text().splitlines():
            yield json.loads(line)
