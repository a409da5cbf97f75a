"""Kills ranks of a running job at random moments, one after the other, and notes what happened."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nep.testing.recovery_bench.figures import (
    Figures,
    Kill,
    committed_before,
    full_since,
    newest_generation,
    num_full_steps,
)
from nep.testing.recovery_bench.jobs import MeasuredJob
from nep.testing.recovery_bench.journal import Events, Mark, Marks, Reader

_LOOK_S = 0.05
_WARM_STEPS = 8
_DRAWS = 30
_REDRAW_S = 0.2
_REST_STEPS = 3  # that all ranks train together between a return and the pause before the next kill


@dataclass(frozen=True, kw_only=True)
class Pace:
    """When to kill, and how long to wait for what.

    Attributes:
        kills: how many.
        seed: of victims and moments.
        pause_s: a kill comes at a random moment of so many seconds after the job is whole again.
        start_s: until all ranks train, at most.
        back_s: until they train again after a kill, at most.
    """

    kills: int
    seed: int
    pause_s: float = 1.5
    start_s: float = 120.0
    back_s: float = 90.0


def play(job: MeasuredJob, pace: Pace, say: Callable[[int], None]) -> tuple[Figures, Events]:
    """Start the job, kill in it, and end it.

    Args:
        say: called with the number of kills so far.

    Returns:
        The figures, and all that the ranks have written down.

    Raises:
        RuntimeError: the job does not begin, or does not come back after a kill.
    """
    rng = random.Random(f"{pace.seed}/{job.num_ranks}")
    reader = Reader(folder=job.work.folder)
    kills: list[Kill] = []
    try:
        job.start()
        _wait(job, reader, lambda: _is_warm(job, reader), pace.start_s, "does not train")
        for number in range(pace.kills):
            say(number)
            rank = rng.randrange(job.num_ranks)
            time.sleep(rng.uniform(0, pace.pause_s))
            redraw(job.work.folder, rank, number % 2 == 0, rng)
            kill = _kill(job, reader, rank)
            kills.append(kill)
            job.replace(kill.rank)
            what = f"has not come back after kill {number + 1} (rank {kill.rank})"
            _wait(job, reader, lambda: _is_whole_again(job, reader, kill), pace.back_s, what)  # noqa: B023
        say(pace.kills)
        events = reader.look()
        return Figures.of(events, kills, job.num_ranks), events
    finally:
        job.stop()


def redraw(folder: Path, rank: int, waiting: bool, rng: random.Random) -> None:
    """Draw moments until the rank is inside a collective, or is not, as wanted: so there are kills of both kinds. Each
    moment is as random as the first; what the mark says after the kill is what counts."""
    for _ in range(_DRAWS):
        mark = _mark(folder, rank)
        if mark is None or mark.waiting is waiting:
            return
        time.sleep(rng.uniform(0, _REDRAW_S))


def _kill(job: MeasuredJob, reader: Reader, rank: int) -> Kill:
    events = reader.look()
    pid, generation = reader.pid(rank), newest_generation(events)
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    mark = _mark(job.work.folder, rank)
    return Kill(rank=rank, at=at, generation=generation, mark=mark)


def _mark(folder: Path, rank: int) -> Mark | None:
    try:
        return Marks.read(folder, rank)
    except FileNotFoundError:
        return None  # a peer that marks nothing


def _is_warm(job: MeasuredJob, reader: Reader) -> bool:
    events = reader.look()
    return len(events) == job.num_ranks and all(
        num_full_steps(events[rank], job.num_ranks) >= _WARM_STEPS for rank in events
    )


def _is_whole_again(job: MeasuredJob, reader: Reader, kill: Kill) -> bool:
    events = reader.look()
    done = committed_before(events, kill)
    full = [full_since(events[rank], kill, job.num_ranks) for rank in events]
    return all(len(steps) >= _REST_STEPS and steps[-1]["step"] > done for steps in full)


def _wait(job: MeasuredJob, reader: Reader, there: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not there():
        if job.ended or time.monotonic() > deadline:
            raise RuntimeError(f"the job {what} within {limit_s:g} s:\n{job.tail()}")
        time.sleep(_LOOK_S)
