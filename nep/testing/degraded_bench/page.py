"""The measured part of the benchmark's page, from the object that the script prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nep.testing.degraded_bench.failures import WHERE

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_DETAILED = ("ours", "ours, re-planned", "ours, 1.3x power")


def write_page(path: Path, result: Mapping[str, Any], origin: str) -> None:
    """Replaces what was measured before, and nothing else.

    Args:
        path: of the page.
        result: see the script's `--json`.
        origin: date, commit.

    Raises:
        ValueError: the page has no place for it.
    """
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} must have lines {BEGIN!r} and {END!r}; what is measured goes between them")
    path.write_text("\n".join([before + BEGIN, "", measured(result, origin), "", END + after]))


def measured(result: Mapping[str, Any], origin: str) -> str:
    """Markdown of all parts that were run."""
    parts = [f"**{origin}**, {result['machine']}; {_pace(result)}. All of it is {result['label']}."]
    for job, by_where in result.get("failed", {}).items():
        parts.append(_failures(job, by_where))
    if result.get("slow"):
        parts.append(_slow(result["slow"]))
    if result.get("skewed"):
        parts.append(_skewed(result["skewed"]))
    return "\n\n".join(parts)


def _pace(result: Mapping[str, Any]) -> str:
    if not result["pace"]:
        return "time lines, nothing slept"
    return "slept" if result["pace"] < 0 else f"slept, {result['pace']:g} wall seconds for an emulated one"


def _failures(job: str, by_where: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    rows = [f"## {job}: slots fail"]
    for where in WHERE:
        policies = by_where.get(where, {})
        if not policies:
            continue
        counts = list(next(iter(policies.values())))
        rows.append(
            f"Failed slots of {where}: share of ideal (share of healthy)."
            if where == WHERE[0]
            else f"Failed {where} over both replicas."
        )
        rows.append(
            _table(
                ["policy", *counts],
                (
                    [name, *(f"{one['share_of_ideal']:.3f} ({one['share_of_healthy']:.3f})" for one in shares.values())]
                    for name, shares in policies.items()
                ),
            )
        )
    rows.append("What explains it, one replica:")
    heads = ["policy", "failed", "step s", "predicted s", "ratio", "healthy slots", "sequences", "blocks", "CPU"]
    details = [
        [
            name,
            count,
            f"{one['step_s']:.4f}",
            f"{one['predicted_s']:.4f}",
            f"{one['predicted_over_emulated']:.3f}",
            f"{one['healthy_slots']:.3f}",
            f"{one['granularity']['sequences']:.3f}",
            f"{one['granularity']['blocks']:.3f}",
            f"{one['cpu_share']:.0%}",
        ]
        for name in _DETAILED
        for count, one in by_where[WHERE[0]].get(name, {}).items()
    ]
    rows.append(_table(heads, details))
    ratios = [
        one["predicted_over_emulated"]
        for policies in by_where.values()
        for shares in policies.values()
        for one in shares.values()
        if one["predicted_over_emulated"] is not None
    ]
    rows.append(f"Predicted over emulated, all policies: {min(ratios):.3f} to {max(ratios):.3f}.")
    return "\n\n".join(rows)


def _slow(jobs: Mapping[str, Any]) -> str:
    heads = ["job", "without", "with", "flagged after", "changes s", "CPU"]
    rows = [
        [
            job,
            f"{one['share_of_speeds_without']:.3f}",
            f"**{one['share_of_speeds']:.3f}**",
            "never" if one["flagged_after_steps"] is None else f"{one['flagged_after_steps']} steps",
            f"{one['moved_s']:.2f}",
            f"{one['cpu_share']:.0%}",
        ]
        for job, one in jobs.items()
    ]
    first = next(iter(jobs.values()))
    lines = [f"{job}, step {entry['step']}: {entry['line']}" for job, one in jobs.items() for entry in one["log"]]
    title = (
        f"## One slot {first['slower']}x slow\n\nShare of the sum of speeds, {first['steps']} steps after it slowed."
    )
    return "\n\n".join([title, _table(heads, rows), "```\n" + "\n".join(lines) + "\n```"])


def _skewed(jobs: Mapping[str, Any]) -> str:
    heads = [
        "loads",
        "most over mean",
        "experts",
        "static s",
        "step s",
        "over static",
        "over equal loads",
        "ratio",
        "moved s",
    ]
    rows = [
        [
            job,
            f"{one['static_imbalance']:.2f}",
            name,
            f"{way['static_s']:.4f}",
            f"{way['step_s']:.4f}",
            f"**{way['over_static']:.3f}**",
            f"{way['step_s'] / one['equal_loads_s']:.3f}",
            f"{way['predicted_over_emulated']:.3f}",
            f"{way['moved_s']:.2f}",
        ]
        for job, one in jobs.items()
        for name, way in one["ways"].items()
    ]
    return "\n\n".join(["## Skewed routers", _table(heads, rows)])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    numbers = ["---" if index == 0 else "---:" for index in range(len(heads))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, numbers, *rows))
