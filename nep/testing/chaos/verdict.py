"""What came of a case: everything that was promised, or what went wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from nep.testing.chaos.cases import BASE_S, END_S, PAIR, Case, Series
from nep.testing.chaos.play import Played, Twin
from nep.testing.jobs import LOSS_TOLERANCE, TENSOR_TOLERANCE


@dataclass(kw_only=True)
class Verdict:
    """One row of the table.

    Attributes:
        kind, phase, victims: the case.
        slots: that failed.
        answered_s: from the last failure to the next committed step; for a job that ends, until all had left. None: it
            cost nothing.
        full_size_s: from the first failure until all slots trained again.
        resumed_step: where the next job went on, of the step that the failure was in.
        not_played: in the plan in force no slots qualified: of two replicas, every two may be owner and mirror.
        wrong: what was promised and did not come true, empty if all did.
    """

    kind: str
    phase: str
    victims: str
    step: int
    slots: list[int] = field(default_factory=list)
    answered_s: float | None = None
    full_size_s: float | None = None
    resumed_step: int | None = None
    not_played: bool = False
    wrong: list[str] = field(default_factory=list)

    @property
    def case(self) -> Case:
        return Case(kind=self.kind, phase=self.phase, victims=self.victims, step=self.step)

    @classmethod
    def of(cls, case: Case) -> Self:
        return cls(kind=case.kind, phase=case.phase, victims=case.victims, step=case.step)


def judge(
    series: Series, played: Sequence[Played], twin: Twin, *, base_s: float = BASE_S, slack_s: float = 0.0
) -> list[Verdict]:
    """A verdict for each case of a series, and with the last one what is wrong with the whole.

    Args:
        series: what was played.
        played: its jobs.
        twin: what losses and weights must equal.
        base_s: of the jobs.
        slack_s: by how much an answer may be late, for a machine that has other things to do.
    """
    if series.ends_jobs:
        verdicts = _judge_ends(series, played)
    else:
        verdicts = [_judge_live(case, played[0], case.limit_s(base_s) + slack_s) for case in series.cases]
    for verdict in verdicts:
        last = verdict is verdicts[-1]
        losses = (played[-1].outcome.result or {}).get("loss", [])
        # Up to the next case. The job that trains to the end has the losses of all.
        end = len(twin.losses) if last else verdicts[verdicts.index(verdict) + 1].step - 1
        verdict.wrong += _wrong_losses(losses, twin.losses, verdict.step, end)
    verdicts[-1].wrong += _wrong_end(played[-1], twin)
    return verdicts


def write_verdicts(path: Path, verdicts: Sequence[Verdict]) -> None:
    path.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1) + "\n")


def read_verdicts(path: Path) -> list[Verdict]:
    return [Verdict(**one) for one in json.loads(path.read_text())]


def _failures(case: Case, job: Played, verdict: Verdict) -> list[dict[str, Any]]:
    """What failed in a case, by time; notes what should have and did not."""
    verdict.wrong += [f"not played: {event['why']}" for event in job.of("refused", case.name)][:1]
    chosen = next(job.of("chosen", case.name), None)
    failures = list(job.of("failure", case.name))
    if chosen is not None:
        missing = {int(slot) for slot in chosen["roles"]} - {one["slot"] for one in failures}
        if missing:
            verdict.wrong.append(f"the failure of slots {sorted(missing)} did not fire")
        verdict.slots = list(chosen["victims"])
    elif next(job.of("nobody", case.name), None) is not None:
        verdict.not_played = True
    elif not verdict.wrong:
        verdict.wrong.append("it was not come to")
    return failures


def _judge_live(case: Case, job: Played, limit_s: float) -> Verdict:
    verdict = Verdict.of(case)
    failures = _failures(case, job, verdict)
    if not failures:
        return verdict
    lost = {one["slot"] for one in failures if _is_lost(case, one)}
    first, last = failures[0]["time"], failures[-1]["time"]
    later = (one["time"] for one in job.of("chosen") if one["case"] != case.name and one["time"] > last)
    until = min(later, default=float("inf"))
    here = [one for one in job.of("recovery") if first <= one["resumed_at"] and one["entered_at"] < until]
    gone = {slot for one in here for slot in one["failed_slots"]}
    if gone - lost:
        verdict.wrong.append(f"slots {sorted(gone - lost)} were lost, too")
    if lost - gone:
        verdict.wrong.append(f"slots {sorted(lost - gone)} were not found to be lost")
    answers = [one["resumed_at"] for one in here if one["failed_slots"]]
    if lost and answers:
        verdict.answered_s = max(answers) - last
        if verdict.answered_s > limit_s:
            verdict.wrong.append(f"answered after {verdict.answered_s:.2f} s, {limit_s:g} s allowed")
        whole = [one["resumed_at"] for one in here if one["size"] == _size(job) and one["resumed_at"] > max(answers)]
        if whole:
            verdict.full_size_s = min(whole) - first
        else:
            verdict.wrong.append("the job did not come back to full size")
    return verdict


def _is_lost(case: Case, failure: dict[str, Any]) -> bool:
    """Whether a slot must be lost by its failure; one that helps a case to its recovery always is."""
    return failure["kind"] != case.kind or case.loses_slots


def _size(job: Played) -> int:
    return len(next(job.of("chosen"))["replicas"][0]) * len(next(job.of("chosen"))["replicas"])


def _judge_ends(series: Series, played: Sequence[Played]) -> list[Verdict]:
    verdicts = []
    for number, (case, job) in enumerate(zip(series.cases, played, strict=False)):
        verdict = Verdict.of(case)
        verdicts.append(verdict)
        failures = _failures(case, job, verdict)
        if not failures:
            continue
        if job.outcome.result is not None or job.outcome.returncode == 0:
            verdict.wrong.append(f"the job did not end (exit code {job.outcome.returncode})")
            continue
        verdict.answered_s = job.ended_at - failures[-1]["time"]
        if verdict.answered_s > END_S:
            verdict.wrong.append(f"ended after {verdict.answered_s:.1f} s, {END_S:g} s allowed")
        if job.outcome.orphans:
            verdict.wrong.append(f"{job.outcome.orphans} processes were left behind")
        verdict.resumed_step = job.newest_step
        # Who still has all of the state saves what is committed: the step before, or the one of the failure.
        least = case.step - 1 if case.victims != PAIR else 1
        if job.newest_step < least:
            verdict.wrong.append(f"the newest checkpoint is of step {job.newest_step}, not {least} or later")
        if number + 1 < len(played):
            after = played[number + 1].outcome
            went_on = f"going on from step {job.newest_step}:"
            if went_on not in after.output:
                verdict.wrong.append(f"the next job does not say {went_on!r}")
    return verdicts


def _wrong_losses(losses: Sequence[float], expected: Sequence[float], begin: int, end: int) -> list[str]:
    if len(losses) < end:
        return [f"there are no losses of steps {max(begin, len(losses) + 1)} to {end}"]
    pairs = enumerate(zip(losses[begin - 1 : end], expected[begin - 1 : end], strict=True), begin)
    wrong = [step for step, (loss, twin) in pairs if not abs(loss - twin) <= LOSS_TOLERANCE * abs(twin)]
    return [f"loss of steps {wrong} differs from the twin's"] if wrong else []


def _wrong_end(job: Played, twin: Twin) -> list[str]:
    """Of a job that trained to the last step."""
    result, params = job.outcome.result, job.outcome.params
    if job.outcome.returncode != 0 or result is None or params is None:
        return [f"the last job ended with exit code {job.outcome.returncode}"]
    wrong = [f"{name}: {result[name]}" for name in ("lost_steps", "lost_samples", "repeated_samples") if result[name]]
    if job.outcome.orphans != 0:
        wrong.append(f"{job.outcome.orphans} processes were left behind")
    if result["unprotected_intervals"]:
        wrong.append(f"{result['unprotected_intervals']} intervals have no mirror at the end")
    if params.keys() != twin.params.keys():
        wrong.append("the saved weights have other names than the twin's")
    for name in params.keys() & twin.params.keys():
        if not (params[name] - twin.params[name]).abs().max() <= TENSOR_TOLERANCE * twin.params[name].abs().max():
            wrong.append(f"{name} differs from the twin's")
    return wrong
