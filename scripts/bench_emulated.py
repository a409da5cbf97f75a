"""Runs training steps on emulated accelerators and compares them with what the planner's cost model predicts.

Real ranks (threads) run the real training code on a scaled-down model; computing and sending are slept as long as the
full model's would take. Everything printed is emulated, and nothing is about this machine.

Examples:
    OMP_NUM_THREADS=1 python scripts/bench_emulated.py
    OMP_NUM_THREADS=1 python scripts/bench_emulated.py --quick --json
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.table import Table

from models.mixtral import build
from nep.report.command_line import parse_options
from nep.report.layouts import rendered
from nep.report.terminal import print_text
from nep.testing.emulation.cases import DEFAULT_CASES, QUICK_CASES, Compared, compare
from nep.testing.emulation.run import MOST_CPU_SHARE
from nep.testing.emulation.setting import LABEL
from nep.testing.machine import machine_text

BAD_INPUT = 2
OVERLAP_CASE = "16 layers: how much of the sums is hidden"
_WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Emulated steps beside predicted ones."""

    quick: bool = False
    """Three small cases on 8 slots, under a minute."""
    only: str = ""
    """Cases whose name contains this."""
    steps: int = 4
    """Steps of each case; the first is left out of the mean."""
    slept: bool = True
    """Sleep, and measure the wall clock; otherwise only the time lines count, which takes less long."""
    json: bool = False
    """Print one object, keyed by case, as the last line."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison.

    Returns:
        0 done, 2 bad input or a host too busy to emulate anything.
    """
    try:
        options = parse_options(
            BenchOptions, prog="bench_emulated.py", arguments=sys.argv[1:] if arguments is None else arguments
        )
        results = _run(options)
    except (ValueError, RuntimeError) as error:
        print(f"bench_emulated: {error}", file=sys.stderr)
        return BAD_INPUT
    if options.json:
        value = {"label": LABEL, "overlap": _overlap(results), "cases": {}}
        value["cases"] = {one.case.name: one.to_json() for one in results}
        print(json.dumps(value, separators=(",", ":"), allow_nan=False))
    return 0


def _run(options: BenchOptions) -> list[Compared]:
    if options.steps < 3:
        raise ValueError(f"steps ({options.steps}) must be at least 3: the first is left out")
    cases = [case for case in (QUICK_CASES if options.quick else DEFAULT_CASES) if options.only in case.name]
    if not cases:
        raise ValueError(f"no case has {options.only!r} in its name; leave --only out to see them")
    torch.set_num_threads(1)
    print_text(f"{LABEL} accelerators, on {machine_text('torch')}")
    start = time.monotonic()
    results = []
    for case in cases:
        results.append(compare(case, build, steps=options.steps, pace=None if options.slept else 0.0))
        one = results[-1]
        print_text(f"{one.case.name}: emulated {one.run.step_s():.3f} s, predicted over emulated {one.ratio:.3f}")
    print_text(_text(results))
    print_text(f"{time.monotonic() - start:.0f} s in all")
    return results


def _overlap(results: list[Compared]) -> float | None:
    """Of the case that is made for it, else of the first."""
    chosen = [one for one in results if one.case.name == OVERLAP_CASE] or results
    return chosen[0].run.overlap()


def _text(results: list[Compared]) -> str:
    table = Table(title=f"Seconds of a step, {LABEL} and predicted", title_justify="left")
    for name in ("case", "slots", "predicted", "slept", "ratio", "time line", "ratio", "overlap", "CPU", "layer, wall"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for one in results:
        run, overlap = one.run, one.run.overlap()
        table.add_row(
            one.case.name,
            str(one.case.slots - len(one.case.failed)),
            f"{one.predicted_s:.4f}",
            f"{run.step_s():.4f}" if run.pace else "-",
            f"{one.ratio:.3f}" if run.pace else "-",
            f"{run.timeline_s():.4f}",
            f"{one.timeline_ratio:.3f}",
            "-" if overlap is None else f"{overlap:.3f}",
            f"{run.cpu_share:.0%}",
            f"{1000 * run.pace * run.step_s() / one.case.shape.num_layers:.0f} ms" if run.pace else "-",
        )
    table.caption = (
        f"CPU: processor time over wall time and processors; refused above {MOST_CPU_SHARE:.0%} where slept."
    )
    return rendered(table, width=_WIDTH)


if __name__ == "__main__":
    sys.exit(main())
