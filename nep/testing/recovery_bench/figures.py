"""From journals and kills to figures. No process is touched here.

One rule for all jobs: every membership has a number (nep's generation, torchrun's attempt, torchft's quorum), and a
kill is over with the first step that is committed under a later number than the kill found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from nep.fault_tolerance.history import Committed, History
from nep.fault_tolerance.timeline import PHASES
from nep.testing.recovery_bench.journal import Event, Events, Mark
from nep.train.data import expected_hash


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One SIGKILL.

    Attributes:
        rank: whose process it ended.
        at: when, seconds since the epoch.
        generation: the membership that it broke.
        mark: where the process was, if it marked that.
    """

    rank: int
    at: float
    generation: int
    mark: Mark | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a kill cost.

    Attributes:
        recovery_s: from the kill to the next step that is committed, by whichever rank knows first.
        caught_up_s: to the first step that had not been committed before.
        full_size_s: to the first step of all ranks.
        undone_steps: steps that had been committed and were not any more.
        dropped_steps: steps that were begun and given up with their samples.
        phases_s: parts of `recovery_s`, for nep.
    """

    kill: Kill
    recovery_s: float
    caught_up_s: float
    full_size_s: float
    undone_steps: int
    dropped_steps: int
    phases_s: Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One job's.

    Attributes:
        outcomes: one for each kill, in order.
        step_s: median of the steps of all ranks.
        num_ranks: how many train.
    """

    outcomes: Sequence[Outcome]
    step_s: float
    num_ranks: int

    @classmethod
    def of(cls, events: Events, kills: Sequence[Kill], num_ranks: int) -> Figures:
        """Read them off the journals."""
        ends = [kill.at for kill in kills[1:]] + [float("inf")]
        outcomes = [_outcome(events, kill, end, num_ranks) for kill, end in zip(kills, ends, strict=True)]
        return cls(outcomes=outcomes, step_s=_step_s(events, num_ranks), num_ranks=num_ranks)

    def summary(self) -> dict[str, Any]:
        """Figures of all kills together, for JSON."""
        result: dict[str, Any] = {
            "ranks": self.num_ranks,
            "kills": len(self.outcomes),
            "step_s": self.step_s,
            "recovery_s": spread(one.recovery_s for one in self.outcomes),
            "recovery_less_step_s": spread(one.recovery_s - self.step_s for one in self.outcomes),
            "caught_up_s": spread(one.caught_up_s for one in self.outcomes),
            "full_size_s": spread(one.full_size_s for one in self.outcomes),
            "undone_steps": sum(one.undone_steps for one in self.outcomes),
            "dropped_steps": sum(one.dropped_steps for one in self.outcomes),
        }
        parts = [one.phases_s for one in self.outcomes if one.phases_s is not None]
        if parts:
            result["phases_s"] = {phase: spread(one[phase] for one in parts) for phase in PHASES}
        marked = [(one.kill.mark, one.recovery_s) for one in self.outcomes if one.kill.mark is not None]
        if marked:
            result["inside_collective"] = spread(seconds for mark, seconds in marked if mark.waiting)
            result["between_collectives"] = spread(seconds for mark, seconds in marked if not mark.waiting)
            result["where"] = [
                {"rank": one.kill.rank, "waiting": mark.waiting, "what": mark.what, "phase": mark.phase, "s": seconds}
                for one, (mark, seconds) in zip(self.outcomes, marked, strict=True)
            ]
        return result


def spread(values: Iterable[float]) -> dict[str, Any]:
    """Median, 95th percentile, and all of them."""
    known = [float(value) for value in values]
    if not known:
        return {"p50": None, "p95": None, "all": []}
    p50, p95 = np.quantile(known, (0.5, 0.95))
    return {"p50": float(p50), "p95": float(p95), "all": known}


def steps_of(events: Iterable[Event]) -> list[Event]:
    """Committed steps."""
    return [event for event in events if event["kind"] == "step"]


def newest_generation(events: Events) -> int:
    """Of all steps so far."""
    return max(int(event["generation"]) for rank in events for event in steps_of(events[rank]))


def full_since(events: Iterable[Event], kill: Kill, num_ranks: int) -> list[Event]:
    """Steps of a rank in which all trained, after a kill."""
    return [event for event in _after(events, kill) if event["size"] == num_ranks]


def committed_before(events: Events, kill: Kill) -> int:
    """The last step of the membership that a kill broke, as those who outlive it know: what only the killed rank saw
    committed, nobody else has applied."""
    return max(
        int(step["step"])
        for rank in events
        for step in steps_of(events[rank])
        if step["generation"] <= kill.generation and not (rank == kill.rank and step["generation"] == kill.generation)
    )


def num_full_steps(events: Iterable[Event], num_ranks: int) -> int:
    """Steps of a rank in which all trained."""
    return sum(event["size"] == num_ranks for event in steps_of(events))


def _after(events: Iterable[Event], kill: Kill, end: float = float("inf")) -> list[Event]:
    """Steps of a rank that are committed because a kill is over, not those that others had committed before it."""
    return [
        step
        for step in steps_of(events)
        if kill.at < step["t"] < end and step["generation"] > kill.generation and not step.get("rolled")
    ]


def _outcome(events: Events, kill: Kill, end: float, num_ranks: int) -> Outcome:
    """Raises:
    ValueError: no step was committed after the kill, or none by all ranks.
    """
    later = sorted(
        ((step["t"], rank, step) for rank in events for step in _after(events[rank], kill, end)),
        key=lambda one: one[0],
    )
    done = committed_before(events, kill)
    new = [(t, step["step"]) for t, _, step in later if step["step"] > done]
    full = [t for t, _, step in later if step["size"] == num_ranks]
    if not new or not full:
        raise ValueError(f"no step of all {num_ranks} ranks follows the kill of rank {kill.rank}; wait longer for it")
    first_t, first_rank, first = later[0]
    return Outcome(
        kill=kill,
        recovery_s=first_t - kill.at,
        caught_up_s=new[0][0] - kill.at,
        full_size_s=full[0] - kill.at,
        undone_steps=max(0, done + 1 - min(step["step"] for _, _, step in later)),
        dropped_steps=max(
            sum(one["kind"] == "dropped" and kill.at < one["t"] < full[0] for one in events[rank])
            for rank in events
            if rank != kill.rank
        ),
        phases_s=_phases(events[first_rank], kill, first, first_t),
    )


def _phases(events: Iterable[Event], kill: Kill, first: Event, resumed_at: float) -> dict[str, float] | None:
    """Of the recovery that led to the step, as its rank wrote it down; they add up to the whole."""
    for one in events:
        if one["kind"] == "recovery" and one["generation"] == first["generation"]:
            marks = (kill.at, one["entered_at"], one["agreed_at"], one["rebuilt_at"], one["moved_at"], resumed_at)
            return {phase: end - start for phase, (start, end) in zip(PHASES, pairwise(marks), strict=True)}
    return None


def _step_s(events: Events, num_ranks: int) -> float:
    """Median time between two steps of all ranks, one after the other in one membership."""
    times = [
        b["t"] - a["t"]
        for rank in events
        for a, b in pairwise(steps_of(events[rank]))
        if a["size"] == b["size"] == num_ranks
        and a["generation"] == b["generation"]
        and b["step"] == a["step"] + 1
        and not b.get("rolled")
    ]
    return float(np.median(times))


def ledger(events: Events, batch: int) -> dict[str, int]:
    """Compare what was committed with what should have been: every step once, with its own samples.

    A step counts as often as the rank has written it down that did so most often.

    Args:
        batch: samples of a step.

    Returns:
        lost_steps, lost_samples, repeated_samples, and disagreements: steps of which two ranks say different things.
    """
    counted: dict[int, int] = {}
    said: dict[int, set[tuple[int, int]]] = {}
    for rank in events:
        for step, times in Counter(int(one["step"]) for one in steps_of(events[rank])).items():
            counted[step] = max(counted.get(step, 0), times)
        for one in steps_of(events[rank]):
            said.setdefault(int(one["step"]), set()).add((int(one["samples"]), int(one["sample_hash"])))
    last = max(counted)
    history = History(
        steps=[
            Committed(
                step=step,
                loss=0.0,
                tokens=0,
                samples=samples,
                sample_hash=sample_hash,
                grad_norm=0.0,
                skipped=False,
            )
            for step, times in sorted(counted.items())
            for samples, sample_hash in [min(said[step])]
            for _ in range(times)
        ]
    )
    expected = {step: (batch, expected_hash((step - 1) * batch, batch)) for step in range(1, last + 1)}
    lost, repeated = history.samples_lost_and_repeated(expected)
    return {
        "lost_steps": history.lost_steps(last),
        "lost_samples": lost,
        "repeated_samples": repeated,
        "disagreements": sum(len(what) > 1 for what in said.values()),
    }
