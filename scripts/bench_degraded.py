"""How much of its pace a job keeps when slots fail, slow down or get uneven loads, by policy. All of it is emulated.

Real ranks (threads) run the real training code on a scaled-down model under the plans that each policy makes; the
planner's prediction stands beside every number. Nothing is about this machine.

Examples:
    OMP_NUM_THREADS=1 python scripts/bench_degraded.py --data DIR \\
        --page docs/benchmarks/degraded.md --svg docs/benchmarks/degraded.svg --json
    OMP_NUM_THREADS=1 python scripts/bench_degraded.py --quick --only failed
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from models.mixtral import build
from nep.report.command_line import parse_options
from nep.report.terminal import print_text
from nep.testing.degraded_bench.failures import MOST_FAILED, FailureTable, run_failures
from nep.testing.degraded_bench.jobs import JOBS, Job, small
from nep.testing.degraded_bench.measure import Bench
from nep.testing.degraded_bench.page import write_page
from nep.testing.degraded_bench.picture import picture
from nep.testing.degraded_bench.skewed import run_skewed, skewed_jobs
from nep.testing.degraded_bench.slow import WITHIN_STEPS, run_slow
from nep.testing.emulation.setting import LABEL
from nep.testing.machine import machine_text

BAD_INPUT = 2
PARTS = ("failed", "slow", "skewed")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Damaged, slow and unevenly loaded jobs, by policy."""

    only: str = ""
    """Parts to run, with commas between: failed, slow, skewed. By default all."""
    shapes: str = ""
    """Shapes to run, with commas between: mixtral, fine. By default both."""
    counts: int = 4
    """Most slots that fail."""
    quick: bool = False
    """Two layers, four slots in a replica, few sequences: shows that it runs, not what the full one would say."""
    pace: float = 0.0
    """Wall seconds of an emulated second; 0: nothing is slept and the time lines count, which no load changes.
    -1: what suits the shape."""
    data: Path | None = None
    """Folder with olmoe_routing, for the part skewed."""
    page: Path | None = None
    """A page with lines `<!-- measured: begin -->` and `end`: what is measured is written between them."""
    svg: Path | None = None
    """Where to draw the shares by number of failed slots."""
    json: bool = False
    """Print one object as the last line."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts.

    Returns:
        0 done, 2 bad input or a host too busy to emulate anything.
    """
    try:
        options = parse_options(
            BenchOptions, prog="bench_degraded.py", arguments=sys.argv[1:] if arguments is None else arguments
        )
        result = _run(options)
    except (ValueError, RuntimeError) as error:
        print(f"bench_degraded: {error}", file=sys.stderr)
        return BAD_INPUT
    if options.json:
        print(json.dumps(result, separators=(",", ":"), allow_nan=False))
    return 0


def _run(options: BenchOptions) -> dict[str, Any]:
    parts, jobs = _named("only", options.only, PARTS), _named("shapes", options.shapes, tuple(JOBS))
    if not 1 <= options.counts <= MOST_FAILED:
        raise ValueError(f"counts ({options.counts}) must be 1 to {MOST_FAILED}; a job is damaged where a slot fails")
    skewed = [] if options.data is None or "skewed" not in parts else skewed_jobs(options.data)
    torch.set_num_threads(1)
    start = time.monotonic()
    print_text(f"{LABEL} accelerators, on {machine_text('torch')}")
    result: dict[str, Any] = {"label": LABEL, "machine": machine_text("torch"), "pace": options.pace}
    chosen = [small(JOBS[name]) if options.quick else JOBS[name] for name in jobs]
    if "failed" in parts:
        result |= _failures(options, chosen)
    if "slow" in parts:
        result["slow"] = _slow(options, chosen)
    if skewed:
        result["skewed"] = _skewed(options, skewed)
    elif "skewed" in parts:
        print_text("skewed: left out; --data names the folder with real loads")
    if options.svg is not None and "failed" in result:
        options.svg.write_text(picture(result["failed"]))
    if options.page is not None:
        write_page(options.page, result, f"{datetime.date.today()}, {_commit()}")
    print_text(f"{time.monotonic() - start:.0f} s in all")
    return result


def _commit() -> str:
    """What this is about, if git says it."""
    root = Path(__file__).resolve().parent.parent
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    return f"commit {asked.stdout.strip()}" if asked.returncode == 0 else "no commit"


def _bench(options: BenchOptions, job: Job) -> Bench:
    return Bench(job, build, None if options.pace < 0 else options.pace)


def _slow(options: BenchOptions, jobs: list[Job]) -> dict[str, Any]:
    """One slot of eight, in two replicas of four, and one of sixteen, in two of eight."""
    found = {}
    for job in jobs:
        for size in (4,) if options.quick else (4, 8):
            bench = _bench(options, replace(job, slots_per_replica=size))
            table = run_slow(bench, within=8 if options.quick else WITHIN_STEPS, tell=print_text)
            print_text(table.text())
            found[f"{job.name}, {2 * size} slots"] = table.to_json()
    return found


def _skewed(options: BenchOptions, jobs: list[tuple[Job, int]]) -> dict[str, Any]:
    found = {}
    for job, copies in jobs:
        table = run_skewed(_bench(options, job), copies, tell=print_text)
        print_text(table.text())
        found[job.name] = table.to_json()
    return found


def _failures(options: BenchOptions, jobs: list[Job]) -> dict[str, Any]:
    tables: list[FailureTable] = []
    for job in jobs:
        bench = _bench(options, job)
        tables.append(run_failures(bench, most=min(options.counts, job.slots_per_replica // 2), tell=print_text))
        print_text(tables[-1].text())
    values: dict[str, Callable[[FailureTable], Any]] = {
        "share_of_ideal": lambda table: table.shares_of_ideal(),
        "share_of_healthy": lambda table: table.shares_of_healthy(),
        "failed": lambda table: table.to_json(),
    }
    return {key: {table.job.name: value(table) for table in tables} for key, value in values.items()}


def _named(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = [name for name in text.split(",") if name] or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{option} ({text}) has {', '.join(unknown)}; choose of {', '.join(known)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
