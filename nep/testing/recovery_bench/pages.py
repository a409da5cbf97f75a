"""The comparison as people read it: tables, ratios between the jobs, and what was aimed at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from nep.fault_tolerance.timeline import PHASES
from nep.report.layouts import rendered
from nep.testing.recovery_bench.compare import NEP, NEP_SPREAD, NEP_WHOLE, RESTART, TORCHFT_DOCUMENTED, TORCHFT_TUNED

Result = Mapping[str, Any]

# Seconds from a kill to the next committed step by number of ranks; what is between has no target.
_P50_S = {4: 0.25, 8: 0.5}
_P95_S = 1.0
_FULL_SIZE_S = 1.5
_INSIDE = 1.2  # no longer; the rest is for chance, since each median is of a few kills only
_FASTER_THAN = {TORCHFT_TUNED: 3.0, RESTART: 20.0}
# Which of nep's two jobs has the peer's layout.
_LIKE = {RESTART: NEP_SPREAD, TORCHFT_DOCUMENTED: NEP_WHOLE, TORCHFT_TUNED: NEP_WHOLE}


def ratios(results: Sequence[Result]) -> list[dict[str, Any]]:
    """How many times longer the others stand still than nep with their layout, by the medians: [{kind, than, ranks,
    recovery, caught_up, full_size}]."""
    there = {(one["kind"], one["ranks"]): one for one in results if "failed" not in one}
    found = []
    for (kind, ranks), one in there.items():
        nep = there.get((_LIKE.get(kind, ""), ranks))
        if nep is None:
            continue
        factors = {
            name: one[f"{name}_s"]["p50"] / nep[f"{name}_s"]["p50"] for name in ("recovery", "caught_up", "full_size")
        }
        found.append({"kind": kind, "than": nep["kind"], "ranks": ranks, **factors})
    return found


def broken_promises(results: Sequence[Result]) -> list[str]:
    """What must not happen to nep on any machine."""
    found = []
    for one in results:
        if one["kind"] not in NEP:
            continue
        where = f"{one['kind']}, {one['ranks']} ranks"
        if "failed" in one:
            found.append(f"{where}: {one['failed']}")
            continue
        counts = ("lost_steps", "lost_samples", "repeated_samples", "disagreements", "undone_steps")
        found += [f"{where}: {name} is {one[name]}, not 0" for name in counts if one[name]]
    return found


def targets(results: Sequence[Result]) -> list[dict[str, Any]]:
    """What was aimed at and what came out: [{target, limit, value, met}]. Times are this machine's, so none is a
    promise."""
    found: list[dict[str, Any]] = []

    def at_most(name: str, value: float, limit: float) -> None:
        found.append({"target": name, "limit": f"<= {limit:g}", "value": value, "met": value <= limit})

    for one in results:
        if one["kind"] not in NEP or "failed" in one:
            continue
        where = f"{one['kind']}, {one['ranks']} ranks"
        if one["ranks"] in _P50_S:
            at_most(f"{where}: recovery p50, s", one["recovery_s"]["p50"], _P50_S[one["ranks"]])
        at_most(f"{where}: recovery p95, s", one["recovery_s"]["p95"], _P95_S)
        at_most(f"{where}: full size p50, s", one["full_size_s"]["p50"], _FULL_SIZE_S)
        places = [one.get(name, {}).get("p50") for name in ("inside_collective", "between_collectives")]
        if None not in places:
            at_most(f"{where}: killed inside a collective / between two, p50", places[0] / places[1], _INSIDE)
    for one in ratios(results):
        if one["kind"] in _FASTER_THAN:
            limit, value = _FASTER_THAN[one["kind"]], one["recovery"]
            name = f"{one['ranks']} ranks: times faster than {one['kind']}"
            found.append({"target": name, "limit": f">= {limit:g}", "value": value, "met": value >= limit})
    return found


def picture(results: Sequence[Result], width: int) -> str:
    """All tables."""
    parts = [_main_table(results, width), _phase_table(results, width), _place_table(results, width)]
    return "\n\n".join(part for part in parts if part)


def target_table(found: Sequence[Mapping[str, Any]], width: int) -> str:
    """What was aimed at."""
    table = _table("target", "aimed at", "measured", "")
    for one in found:
        table.add_row(one["target"], one["limit"], f"{one['value']:.3f}", "met" if one["met"] else "missed")
    return rendered(table, width)


def _main_table(results: Sequence[Result], width: int) -> str:
    table = _table(
        "", "ranks", "step", "next step p50", "p95", "less a step", "new step", "full size", "undone", "dropped"
    )
    for one in results:
        if "failed" in one:
            table.add_row(one["kind"], str(one["ranks"]), "failed: " + str(one["failed"]).splitlines()[0])
            continue
        times = [one["step_s"], *(one["recovery_s"][name] for name in ("p50", "p95"))]
        times += [one[name]["p50"] for name in ("recovery_less_step_s", "caught_up_s", "full_size_s")]
        table.add_row(
            one["kind"],
            str(one["ranks"]),
            *(_seconds(value) for value in times),
            f"{one['undone_steps'] / one['kills']:.1f}",
            f"{one['dropped_steps'] / one['kills']:.1f}",
        )
    note = (
        "seconds from SIGKILL, medians; next step: any step is committed again; new step: one that had not been "
        "committed before; full size: all ranks train;\nundone, dropped: steps per kill that had been committed and "
        "were not any more, and that were given up with their samples"
    )
    return f"{rendered(table, width)}\n{note}"


def _phase_table(results: Sequence[Result], width: int) -> str:
    table = _table("phases, p50 (p95)", *PHASES)
    for one in results:
        if "phases_s" in one:
            cells = (f"{one['phases_s'][phase]['p50']:.3f} ({one['phases_s'][phase]['p95']:.3f})" for phase in PHASES)
            table.add_row(f"{one['kind']}, {one['ranks']} ranks", *cells)
    return rendered(table, width) if table.row_count else ""


def _place_table(results: Sequence[Result], width: int) -> str:
    table = _table("the killed rank was", "in", "kills", "p50", "p95")
    for one in results:
        for name in ("inside_collective", "between_collectives"):
            if name in one:
                what = "inside a collective" if name == "inside_collective" else "between two"
                place, where = one[name], f"{one['kind']}, {one['ranks']} ranks"
                table.add_row(what, where, str(len(place["all"])), _seconds(place["p50"]), _seconds(place["p95"]))
    return rendered(table, width) if table.row_count else ""


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, header_style="", justify="right" if number else "left")
    return table
