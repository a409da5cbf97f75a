"""The comparison as a part of a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nep.fault_tolerance.timeline import PHASES

BEGIN, END = "<!-- results: written by scripts/bench_recovery.py --page -->", "<!-- end of results -->"
_LOAD = re.compile(r", load ([0-9.]+)")  # in a machine's text
_PLACES = (("inside_collective", "inside a collective"), ("between_collectives", "between two"))


def replace_results(page: Path, report: Mapping[str, Any]) -> None:
    """Put a report's tables between the two marks of a page.

    Raises:
        ValueError: the page has no such marks.
    """
    head, begin, rest = page.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"page ({page}) has no lines {BEGIN!r} and {END!r}; put them where the tables belong")
    page.write_text(f"{head}{BEGIN}\n\n{markdown(report)}\n\n{END}{tail}")


def markdown(report: Mapping[str, Any]) -> str:
    """Where the figures are from, and all tables."""
    results: Sequence[Mapping[str, Any]] = report["results"]
    whole = [one for one in results if "failed" not in one]
    parts = [_from(report, results), _main(results), _ratios(report), _phases(whole), _places(whole), _targets(report)]
    parts += [f"**Broken promise:** {line}" for line in report["broken"]]
    return "\n\n".join(part for part in parts if part)


def _from(report: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    machines = sorted({_LOAD.sub("", one["machine"]) for one in results})
    when = sorted(one["when"] for one in results)
    days = f"{when[0]} to {when[-1]}" if when else "nothing is measured"
    return f"**{days}**, commit {report['commit']}. " + "; ".join(machines) + "."


def _main(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for one in results:
        if "failed" in one:
            rows.append((one["kind"], one["ranks"], str(one["failed"]).splitlines()[0], *[""] * 9))
            continue
        times = (one["recovery_s"]["p50"], one["recovery_s"]["p95"], one["recovery_less_step_s"]["p50"])
        times += (one["caught_up_s"]["p50"], one["full_size_s"]["p50"])
        each = [f"{one[name] / one['kills']:.1f}" for name in ("undone_steps", "dropped_steps")]
        load = _LOAD.search(one["machine"])
        facts = (one["kind"], one["ranks"], one["kills"], load[1] if load else "-", f"{one['step_s']:.3f}")
        rows.append((*facts, *map(_s, times), *each))
    head = (
        "",
        "ranks",
        "kills",
        "load",
        "step s",
        "`recovery_s` p50",
        "p95",
        "less a step",
        "new step",
        "`full_size_s`",
    )
    return _table((*head, "steps undone", "dropped"), rows)


def _ratios(report: Mapping[str, Any]) -> str:
    rows = [
        (
            one["kind"],
            one["than"],
            one["ranks"],
            *(f"{one[name]:.1f}" for name in ("recovery", "caught_up", "full_size")),
        )
        for one in report["ratios"]
    ]
    return _table(("times as long as nep", "with the same layout", "ranks", "next step", "new step", "full size"), rows)


def _phases(results: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        (one["kind"], one["ranks"], *(f"{one['phases_s'][phase]['p50'] * 1e3:.0f}" for phase in PHASES))
        for one in results
        if "phases_s" in one
    ]
    return _table(("median ms", "ranks", *PHASES), rows)


def _places(results: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        (one["kind"], one["ranks"], label, len(one[name]["all"]), _s(one[name]["p50"]), _s(one[name]["p95"]))
        for one in results
        for name, label in _PLACES
        if name in one
    ]
    return _table(("", "ranks", "the killed rank was", "kills", "p50", "p95"), rows)


def _targets(report: Mapping[str, Any]) -> str:
    rows = [
        (one["target"], one["limit"], f"{one['value']:.3f}", "met" if one["met"] else "missed")
        for one in report["targets"]
    ]
    return _table(("target", "aimed at", "measured", ""), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
