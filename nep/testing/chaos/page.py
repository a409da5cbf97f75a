"""docs/reliability.md from the results of played series. Rows are what was played, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from nep.testing.chaos.cases import BASE_S, LOSSES, PAIR, PHASES, SLOW, STORE, Case, Series, matrix
from nep.testing.chaos.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Result:
    """A series that was played.

    Attributes:
        series: its name.
        date, machine: when and where.
        commit: of the code, with a mark if it was changed.
        jobs: how many processes of torchrun's kind it took, one after the other.
        seconds: all of them together.
        base_s, slack_s: base time-out, and by how much answers could be late (0 on a quiet machine).
        verdicts: by case.
    """

    series: str
    date: str
    machine: str
    commit: str
    jobs: int
    seconds: float
    base_s: float
    slack_s: float
    verdicts: list[Verdict]

    def write(self, folder: Path) -> Path:
        path = folder / f"{slug(self.series)}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        value = json.loads(path.read_text())
        return cls(**{**value, "verdicts": [Verdict(**one) for one in value["verdicts"]]})


def slug(text: str) -> str:
    """As part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def results_in(folder: Path) -> list[Result]:
    """In the order of the matrix; what is no series of it any more comes last."""
    order = [slug(one.name) for one in matrix()]
    paths = sorted(folder.glob("*.json"), key=lambda path: [*order, path.stem].index(path.stem))
    return [Result.read(path) for path in paths]


def page(results: Sequence[Result]) -> str:
    """The Markdown page."""
    live = [one for one in results if not one.verdicts[0].case.ends_job]
    ends = [one for one in results if one.verdicts[0].case.ends_job]
    parts = [_HEAD, _summary(results)]
    if live:
        parts += [_LIVE, _table(live, lambda verdict: _seconds(verdict.answered_s, verdict))]
        parts += [_FULL, _table(live, lambda verdict: _seconds(verdict.full_size_s, verdict))]
    if ends:
        parts += [_ENDS, _table(ends, _end_cell)]
    parts += [_failures(results), _measured(results), _TAIL]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(results: Sequence[Result]) -> str:
    verdicts = [verdict for one in results for verdict in one.verdicts]
    left = [verdict for verdict in verdicts if verdict.not_played]
    verdicts = [verdict for verdict in verdicts if not verdict.not_played]
    good = sum(not verdict.wrong for verdict in verdicts)
    planned = sum(len(one.cases) for one in matrix())
    kept = [verdict for verdict in verdicts if not verdict.case.ends_job and verdict.answered_s is not None]
    text = f"**{good} of {len(verdicts)} cases played came out as promised** (the matrix has {planned})."
    if left:
        text += f" {len(left)} could not be played: in the plan in force no such slots could be lost together."
    for name, chosen in (
        ("Kills, exits and exceptions", [one for one in kept if not one.case.is_hang]),
        ("Hangs", [one for one in kept if one.case.is_hang]),
    ):
        times = sorted(one.answered_s for one in chosen if one.answered_s is not None)
        if times:
            text += f" {name}: median {times[len(times) // 2]:.2f} s, longest {times[-1]:.2f} s."
    return text


def _table(results: Iterable[Result], cell: Mapping[str, str] | object) -> str:
    assert callable(cell)
    rows = ["| fails | who | " + " | ".join(PHASES) + " |", "| --- | --- |" + " --- |" * len(PHASES)]
    for one in results:
        by_phase: dict[str, list[Verdict]] = {}
        for verdict in one.verdicts:
            by_phase.setdefault(verdict.phase, []).append(verdict)
        kinds = sorted({verdict.kind for verdict in one.verdicts}, key=lambda kind: [*LOSSES, kind].index(kind))
        cells = [
            "<br>".join((f"{v.kind} " if len(kinds) > 1 else "") + str(cell(v)) for v in by_phase.get(phase, ()))
            for phase in PHASES
        ]
        victims = one.verdicts[0].victims
        rows.append(f"| {', '.join(kinds)} | {_WHO.get(victims, victims)} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _seconds(seconds: float | None, verdict: Verdict) -> str:
    text = "no loss" if seconds is None else f"{seconds:.2f}"
    text = "nobody" if verdict.not_played else text
    return f"**{text}** (!)" if verdict.wrong else text


def _end_cell(verdict: Verdict) -> str:
    if verdict.answered_s is None or verdict.resumed_step is None:
        return "**none** (!)"
    back = verdict.step - 1 - verdict.resumed_step
    text = f"{verdict.answered_s:.1f} s, " + ("nothing lost" if back <= 0 else f"{back} steps again")
    return f"**{text}** (!)" if verdict.wrong else text


def _failures(results: Sequence[Result]) -> str:
    rows = [
        f"- {verdict.case.name} (slots {', '.join(map(str, verdict.slots)) or 'none'}): {'; '.join(verdict.wrong)}"
        for one in results
        for verdict in one.verdicts
        if verdict.wrong
    ]
    return "## What did not come out as promised (!)\n\n" + "\n".join(rows) if rows else ""


def _measured(results: Sequence[Result]) -> str:
    rows = ["## Where and when", ""]
    if any(one.slack_s for one in results):
        rows += ["Rows with slack were played on a machine that did other things: their times are not judged.", ""]
    rows.append("| series | date (UTC) | code | base | slack | jobs | seconds | machine |")
    rows.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in results:
        how = f"{one.base_s:g} s | {one.slack_s:g} s | {one.jobs} | {one.seconds:.0f}"
        rows.append(f"| {one.series} | {one.date} | {one.commit} | {how} | {one.machine} |")
    missing = [one.name for one in matrix() if one.name not in {result.series for result in results}]
    if missing:
        rows += ["", f"Not played: {'; '.join(missing)}."]
    return "\n".join(rows)


def ends_with_checkpoint(series: Iterable[Series]) -> list[Case]:
    """Cases in which the job cannot go on."""
    return [case for one in series for case in one.cases if case.ends_job]


_WHO = {
    "one": "one slot",
    "two of a replica": "two slots of one replica",
    "two of two replicas": "two slots of two replicas",
    "replica": "a whole replica",
    PAIR: "an owner and its mirror",
}

_HEAD = f"""# Reliability

What is promised when something fails, and what came of it when everything was made to fail, everywhere.

- **Nothing is lost.** No step, no sample, and no sample is used twice. Losses equal those of one process without
  failures to 1e-12, weights to 1e-11 (float64).
- **A trainer that dies** (killed, exits with 0, raises) is answered within 2 s: by then the others have committed the
  next step.
- **A trainer that hangs** (SIGSTOP, an extension that keeps the interpreter's lock, a loop) is answered within the base
  time-out and 2 s. The base is `--timeout-base-s`, here {BASE_S:g} s if nothing else is said. The first step of a
  generation has three times as long.
- **A slot that is merely slow** (three times its computing time, for three steps) is not taken for dead.
- **Several at once**, a whole replica, and failures inside a recovery are answered like one, as long as every interval
  of the training state keeps its owner or its mirror. They come back, and the job trains at full size again.
- **Otherwise the job ends with a checkpoint**, and the same command goes on from it to the same losses. These cases
  follow from the plan and from what launchers do:
  - *an owner and its mirror together*: their optimizer state is nowhere else. The job goes on from the last checkpoint
    that was whole. Which pairs these are is computed from the plan in force (`nep.planning.planner.lost_intervals`).
  - *a supervisor*, the parent process of a trainer: its launcher stops all the others when a worker dies. They commit
    or drop the step, write a checkpoint and end: no step is lost.
  - *the control store* for good: nobody can agree on anything any more. The same.
- **No process is left behind.**
- A failure of what only writes checkpoints (an exception or an endless loop in that thread) costs that checkpoint, not
  the slot.

The suite is `nep/testing/chaos`. Two replicas of three slots, each on a node of its own (pretended, on one machine);
model `debug` in float64. One job goes through all phases, and grows back to full size between two failures. Victims are
computed from the plan in force, so that every interval survives (or, in the last rows, does not), and rotate over the
slots. Each failure is known to have fired.

```bash
python -m nep.testing.chaos                     # all series, then this page
python -m nep.testing.chaos --only "kill" "gil, one"
```"""

_LIVE = """## Answered while training

Seconds from the last failure of a case to the next committed step. For *inside recovery* the first slot fails in a
step, and the second while the others recover."""

_FULL = """## Back at full size

Seconds from the first failure until all slots train again. Training waits for them here."""

_ENDS = """## Ended with a checkpoint, and went on

Seconds from the failure until all processes had left, and what the next job had to train again."""

_TAIL = """A partition from the control store and the loss of whole nodes are tested by `tests/unit/fault_tolerance` and
`tests/endtoend`; random kills from outside by `tests/endtoend/test_random_kills.py`. About twenty cases of this matrix
are in every test run (`tests/endtoend/test_chaos.py`), all of it in `make soak`."""

assert STORE and SLOW  # names that the page speaks of
