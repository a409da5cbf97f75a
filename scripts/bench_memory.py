"""Measures memory: what each slot of a damaged job has alive at its peak, beside a healthy job and the planner's model.

Examples:
    python scripts/bench_memory.py
    python scripts/bench_memory.py --only bfloat16 --json

Real trainers in real processes, the last slot killed. It needs a C++ compiler (an allocator that counts is put in
front of torch's), about 6 GB of memory and a minute for each case. Bytes do not depend on the machine's load.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.table import Table

from nep.report.command_line import parse_options
from nep.report.layouts import rendered
from nep.report.terminal import print_text
from nep.testing.machine import machine_text
from nep.testing.memory_bench.cases import CASES, Case, num_parameters
from nep.testing.memory_bench.jobs import SlotMemory, measure

BAD_INPUT = 2
TARGET = 1.10
_WIDTH = 160
_KINDS = (
    "parameters",
    "gradients",
    "master",
    "moments",
    "sums",
    "mirrored master",
    "mirrored moments",
    "mirrored sums",
    "staging",
    "activations",
    "workspace",
)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Peak bytes of live tensor storages per slot: healthy jobs, damaged jobs, and what the planner says of both."""

    only: str = ""
    """Cases whose name contains this."""
    timeout_s: float = 300.0
    """Of one job."""
    json: bool = False
    """Print one object as the last line."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the jobs.

    Returns:
        0 done, 1 a job failed, 2 bad input.
    """
    try:
        options = parse_options(
            BenchOptions, prog="bench_memory.py", arguments=sys.argv[1:] if arguments is None else arguments
        )
        cases = [case for case in CASES if options.only in case.name]
        if not cases:
            raise ValueError(f"no case has {options.only!r} in its name; leave --only out to run all {len(CASES)}")
        if options.timeout_s <= 0:
            raise ValueError(f"timeout-s ({options.timeout_s}) must be positive")
    except ValueError as error:
        print(f"bench_memory: {error}", file=sys.stderr)
        return BAD_INPUT
    print_text(f"{machine_text('torch')}; {num_parameters(CASES[0].lines):,} parameters")
    results: dict[str, list[SlotMemory]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        for index, case in enumerate(cases):
            try:
                results[case.name] = measure(case, Path(folder) / str(index), timeout_s=options.timeout_s)
            except RuntimeError as error:
                print(f"bench_memory: {error}", file=sys.stderr)
                return 1
            print_text(case_text(case, results[case.name]))
    found = summary(results)
    print_text(summary_text(found))
    if options.json:
        print(json.dumps(found, separators=(",", ":"), allow_nan=False))
    return 0


def summary(results: dict[str, list[SlotMemory]]) -> dict[str, Any]:
    """One object: the worst slot of all cases, and every slot of every case."""
    name, worst = max(
        ((name, slot) for name, slots in results.items() for slot in slots), key=lambda entry: entry[1].overhead
    )
    slots = [slot for entries in results.values() for slot in entries]
    steps = [ratio for slot in slots for ratio in slot.predictions]
    changes = [ratio for slot in slots for ratio in slot.change_predictions]
    return {
        "memory_overhead": worst.overhead,
        "target": TARGET,
        "case": name,
        "slot": worst.slot,
        "raw": worst.raw,
        "raw_worst": max(slot.raw for slot in slots),
        "resident": worst.damaged_resident / worst.healthy_resident,
        "predicted_over_measured": [min(steps), max(steps)],
        "change_predicted_over_measured": [min(changes), max(changes)] if changes else None,
        "change_over_step": max((c["measured"] / s.damaged for s in slots for c in s.changes), default=None),
        "cases": {
            name: [
                asdict(slot)
                | {
                    "overhead": slot.overhead,
                    "raw": slot.raw,
                    "predictions": slot.predictions,
                    "change_predictions": slot.change_predictions,
                }
                for slot in entries
            ]
            for name, entries in results.items()
        },
    }


def summary_text(found: dict[str, Any]) -> str:
    """The keys that are judged."""
    low, high = found["predicted_over_measured"]
    text = (
        f"\nmemory_overhead {found['memory_overhead']:.3f} (target at most {TARGET:.2f}): slot {found['slot']} of "
        f"{found['case']!r}; raw {found['raw']:.3f}, resident {found['resident']:.3f}; raw of the worst slot "
        f"{found['raw_worst']:.3f}\nplanner over measured: steps {low:.3f} to {high:.3f}"
    )
    if found["change_predicted_over_measured"] is not None:
        low, high = found["change_predicted_over_measured"]
        text += f", changes {low:.3f} to {high:.3f}; the largest change took {found['change_over_step']:.2f} of a step"
    return text


def case_text(case: Case, slots: list[SlotMemory]) -> str:
    """Two tables: each slot in one line, and the worst slot by kind of buffer."""
    title = (
        f"\n{case.name}: {case.num_slots} slots, slot {case.failed} lost; {case.dtype}, redundancy {case.redundancy}, "
        f"{case.global_batch_size} sequences of {case.seq_len} tokens, {case.micro_batch_size} at a time (MB)"
    )
    lines = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("slot", "healthy", "+ units", "damaged", "raw", "overhead", "planner", "resident", "changes"):
        lines.add_column(name, no_wrap=True, header_style="", justify="right" if name != "changes" else "left")
    for one in slots:
        changes = ", ".join(
            f"{_mb(change['measured'])} (planner {ratio:.3f}"
            + (f", {_mb(change['left_over'])} left over)" if change["left_over"] > 5e6 else ")")
            for change, ratio in zip(one.changes, one.change_predictions, strict=True)
        )
        lines.add_row(
            str(one.slot),
            _mb(one.healthy),
            _mb(one.more_to_hold),
            _mb(one.damaged),
            f"{one.raw:.3f}",
            f"{one.overhead:.3f}",
            " ".join(f"{ratio:.3f}" for ratio in one.predictions),
            f"{_mb(one.healthy_resident)} > {_mb(one.damaged_resident)}",
            changes,
        )
    worst = max(slots, key=lambda one: one.overhead)
    kinds = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in (f"slot {worst.slot}", "healthy", "planner", "damaged", "planner"):
        kinds.add_column(name, no_wrap=True, header_style="", justify="left" if name.startswith("slot") else "right")
    columns = (worst.healthy_kinds, worst.predicted_healthy, worst.damaged_kinds, worst.predicted_damaged)
    for kind in _KINDS:
        if any(column.get(kind) for column in columns):
            kinds.add_row(kind, *(_mb(column.get(kind, 0)) for column in columns))
    kinds.add_row("total", *(_mb(sum(column.values())) for column in columns))
    return "\n".join([title, rendered(lines, _WIDTH), rendered(kinds, _WIDTH)])


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"


if __name__ == "__main__":
    sys.exit(main())
