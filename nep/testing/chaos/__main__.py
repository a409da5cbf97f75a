"""Plays the matrix of failures and writes docs/reliability.md.

Examples:
    python -m nep.testing.chaos
    python -m nep.testing.chaos --only kill "gil, one" --results runs/chaos
    python -m nep.testing.chaos --page-only

Real processes on this machine, which should have nothing else to do: time-outs are short. Results are kept for each
series, so that some can be played again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nep.report.command_line import parse_options
from nep.report.terminal import print_text
from nep.testing.chaos.cases import BASE_S, Series, chosen, matrix
from nep.testing.chaos.page import Result, page, results_in, slug
from nep.testing.chaos.play import Shape, Twin, play
from nep.testing.chaos.verdict import judge
from nep.testing.jobs import REPOSITORY
from nep.testing.machine import machine_text

BAD_INPUT = 2


@dataclass(frozen=True, kw_only=True)
class Options:
    """Every kind of failure in every phase of a step, on one slot and on several."""

    only: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Series whose names begin so; repeatable. By default all."""
    results: Path = Path("runs/chaos")
    """Folder with a file for each series that was played; those of other series are kept."""
    page: Path = Path("docs/reliability.md")
    """Page to write from all results."""
    page_only: bool = False
    """Write the page only."""
    missing: bool = False
    """Play only series that have no results yet."""
    budget_s: float = float("inf")
    """Begin no series after so many seconds."""
    base_s: float = BASE_S
    """Base time-out of the jobs. Times are promised for 1 s; a busy machine needs more."""
    slack_s: float = 0.0
    """Let answers be so much later than promised, on a busy machine; said on the page."""
    keep: Path | None = None
    """Keep what the jobs wrote in this folder."""


def main(arguments: list[str] | None = None) -> int:
    """Plays series.

    Returns:
        0 all cases came out as promised, 1 some did not, 2 bad input.
    """
    try:
        options = parse_options(
            Options, prog="nep.testing.chaos", arguments=sys.argv[1:] if arguments is None else arguments
        )
        wanted = [] if options.page_only else chosen(options.only)
        if not wanted and not options.page_only:
            raise ValueError(
                f"no series begins with {options.only}; there are {', '.join(one.name for one in matrix())}"
            )
    except ValueError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return BAD_INPUT
    options.results.mkdir(parents=True, exist_ok=True)
    results, start = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        for one in wanted:
            if time.monotonic() - start > options.budget_s:
                break
            if options.missing and (options.results / f"{slug(one.name)}.json").exists():
                continue
            folder = (options.keep or Path(scratch)) / f"{slug(one.name)}-{time.strftime('%H%M%S')}"
            results.append(played(one, folder, Path(scratch), base_s=options.base_s, slack_s=options.slack_s))
            results[-1].write(options.results)
            print_text(text(results[-1]))
    options.page.write_text(page(results_in(options.results)))
    return int(any(verdict.wrong for result in results for verdict in result.verdicts))


def played(series: Series, folder: Path, twins: Path, *, base_s: float, slack_s: float) -> Result:
    """Play one series.

    Args:
        folder: for what the jobs write, fresh.
        twins: folder of trainings without failures, which series of equal length share.
        base_s, slack_s: see `Options`.
    """
    twin = Twin.train(series.steps, twins)
    machine, start = machine_text("torch"), time.monotonic()
    jobs = play(series, twin, folder, Shape(base_s=base_s))
    return Result(
        series=series.name,
        date=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        machine=machine,
        commit=_commit(),
        jobs=len(jobs),
        seconds=time.monotonic() - start,
        base_s=base_s,
        slack_s=slack_s,
        verdicts=judge(series, jobs, twin, base_s=base_s, slack_s=slack_s),
    )


def text(result: Result) -> str:
    """A line for each case."""
    lines = [f"{result.series}: {result.jobs} jobs, {result.seconds:.0f} s"]
    for verdict in result.verdicts:
        good = "not played: nobody qualifies" if verdict.not_played else "as promised"
        times = "" if verdict.answered_s is None else f"{verdict.answered_s:.2f} s"
        lines.append(f"  {verdict.case.name:50} {times:8} {'; '.join(verdict.wrong) or good}")
    return "\n".join(lines)


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if git("status", "--porcelain", "nep") else "")


if __name__ == "__main__":
    sys.exit(main())
