"""Compares planners on synthetic and real expert loads: ours, no balancing, and EPLB where there is a copy of it.

Examples:
    python scripts/bench_planner.py --only synthetic
    python scripts/bench_planner.py --data DIR --eplb PATH --json

Set OMP_NUM_THREADS=1, or the processor times are of several threads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.table import Table

from nep.planning.cost.workload import Workload
from nep.report.command_line import parse_options
from nep.report.layouts import rendered
from nep.report.plan_figures import bytes_text
from nep.report.readers.hardware_file import read_hardware
from nep.report.terminal import print_text
from nep.testing.machine import machine_text
from nep.testing.planner_bench.cases import Case, real_cases, synthetic_cases
from nep.testing.planner_bench.measures import Measured, measure
from nep.testing.planner_bench.planners import Planner, eplb_planners, our_planners

BAD_INPUT = 2
_WIDTH = 220


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Compare planners side by side: balance, predicted seconds, processor time, movement, memory, rows."""

    data: Path | None = None
    """Folder with deepseek_v3_sglang_ep_statistics and olmoe_routing; without it only synthetic loads."""
    eplb: Path | None = None
    """A checkout of deepseek-ai/EPLB, to compare with."""
    only: str = ""
    """Cases whose name contains this."""
    windows: int | None = None
    """Use the first so many windows of each case, three or more; by default all."""
    hardware: str = "H100"
    """Profile for the predicted seconds."""
    sequences_per_slot: int = 4
    """Of the predicted step, 4096 tokens each, one at a time."""
    repeats: int = 20
    """Plans that processor times are the median of."""
    json: bool = False
    """Print one object, keyed by case and planner, as the last line."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison.

    Returns:
        0 done, 2 bad input.
    """
    try:
        options = parse_options(
            BenchOptions, prog="bench_planner.py", arguments=sys.argv[1:] if arguments is None else arguments
        )
        results = _run(options)
    except ValueError as error:
        print(f"bench_planner: {error}", file=sys.stderr)
        return BAD_INPUT
    if options.json:
        values = {
            case: {name: one if isinstance(one, str) else one.to_json() for name, one in planners.items()}
            for case, planners in results.items()
        }
        print(json.dumps(values, separators=(",", ":"), allow_nan=False))
    return 0


def _run(options: BenchOptions) -> dict[str, dict[str, Measured | str]]:
    """Case -> planner -> what was measured, or why it cannot plan the case."""
    if options.repeats < 1 or options.sequences_per_slot < 1:
        raise ValueError("repeats and sequences-per-slot must be at least 1")
    if options.windows is not None and options.windows < 3:
        raise ValueError(
            f"windows ({options.windows}) must be at least 3: a plan is made on one and used on the next, and what "
            "moves lies between two plans"
        )
    hardware = read_hardware(options.hardware)
    cases = [case for case in _cases(options) if options.only in case.name]
    if not cases:
        raise ValueError(f"no case has {options.only!r} in its name; leave --only out to see them")
    print_text(machine_text("numpy"))
    results: dict[str, dict[str, Measured | str]] = {}
    for case in cases:
        case = replace(case, windows=case.windows[: options.windows])
        workload = Workload(
            global_batch_size=options.sequences_per_slot * case.num_slots, micro_batch_size=1, seq_len=4096
        )
        planners: list[Planner] = our_planners(case, workload, hardware)
        if options.eplb is not None:
            planners += eplb_planners(case, options.eplb)
        results[case.name] = {
            planner.name: planner.why_not
            or measure(planner, case, workload=workload, hardware=hardware, repeats=options.repeats)
            for planner in planners
        }
        print_text(_text(case, hardware.name, results[case.name]))
    return results


def _cases(options: BenchOptions) -> Iterator[Case]:
    yield from synthetic_cases()
    if options.data is not None:
        yield from real_cases(options.data)


def _death(one: Measured) -> str:
    if one.death_moved_share is None or one.death_balance is None or one.death_step_s is None:
        return "-"
    return f"{one.death_lost_share:.1%} {one.death_moved_share:.1%} {one.death_balance:.4f} {one.death_step_s:.3f}"


def _text(case: Case, hardware: str, results: dict[str, Measured | str]) -> str:
    """A table of one case: each balance with its predicted step in seconds."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in (
        "planner",
        "planned, step",
        "planned + quotas, step",
        "next, step",
        "next + quotas, step",
        "CPU ms",
        "quotas/layer",
        "moved per re-plan",
        "twice",
        "memory",
        "in all",
        "rows",
        "busiest",
        "a slot dies: lost, moved, then",
    ):
        table.add_column(title, no_wrap=True, header_style="")
    refused = []
    for name, one in results.items():
        if isinstance(one, str):
            refused.append(f"{name}: {one}")
            continue
        table.add_row(
            name,
            f"{one.planned:.4f} {one.planned_step_s:.3f}",
            f"{one.planned_quotas:.4f} {one.planned_quotas_step_s:.3f}",
            f"{one.next:.4f} {one.next_step_s:.3f}",
            f"{one.next_quotas:.4f} {one.next_quotas_step_s:.3f}",
            f"{one.cpu_ms:.1f}",
            "-" if one.quotas_ms is None else f"{one.quotas_ms:.2f} ms",
            f"{bytes_text(one.moved_bytes)} {one.moved_share:.1%}",
            f"{one.duplicates:.0f}",
            f"{one.memory:.3f}",
            f"{one.memory_total:.3f}",
            f"{one.rows_per_token:.2f}",
            f"{one.busiest_rows:.2f}",
            _death(one),
        )
    windows, layers, experts = case.windows.shape
    title = (
        f"\n{case.name}: {windows} windows of {layers} layers, {experts} experts, top {case.shape.top_k}; "
        f"{case.physical} copies where there are any; {case.source}; steps on {hardware}"
    )
    return "\n".join([title, rendered(table, _WIDTH), *refused])


if __name__ == "__main__":
    sys.exit(main())
