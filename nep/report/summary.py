"""What a run did, on one page: from the dictionary that `--json` writes (train.json, schema 1)."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from nep.planning.layout import Lines
from nep.planning.plan import Plan
from nep.report.layouts import layouts_before_after, rendered
from nep.report.terminal import ranges

PHASES = ("detect", "agree", "rebuild", "transfer", "replay")


def summary(
    result: Mapping[str, Any],
    *,
    before: Plan | None = None,
    after: Plan | None = None,
    lines: Lines | None = None,
    width: int = 100,
) -> str:
    """The page that the trainer prints at its end.

    Args:
        result: train.json's entries; `loss`, `generations`, `lost_steps`, `lost_samples`, `repeated_samples`,
            `recovery_s`, `recovery_phases_s`, `live_slots`, `validation_loss` and so on. What is missing is
            not shown.
        before: The first layout of the run.
        after: The last one. Without both of them, or if they are equal, no layouts are drawn.
        lines: The model's parameters, needed for the layouts.
        width: Columns to use.

    Returns:
        Text without a newline at the end.
    """
    parts = [_facts(result), _generations(result, width), _recoveries(result, width)]
    if before is not None and after is not None and lines is not None and before != after:
        parts.append(layouts_before_after(before, after, lines, width))
    return "\n\n".join(part for part in parts if part)


def _facts(result: Mapping[str, Any]) -> str:
    rows: list[tuple[str, str]] = []
    if "model" in result:
        digest = result.get("data_digest")
        rows.append(("model", f"{result['model']}" + (f", data {digest[:12]}" if digest else "")))
    losses: Sequence[float] = result.get("loss") or ()
    if losses:
        rows.append(("loss", f"{losses[0]:.4f} (first step) -> {losses[-1]:.4f} (step {len(losses)})"))
    if result.get("validation_loss") is not None:
        rows.append(("validation loss", _validation(result["validation_loss"])))
    counts = [
        f"{result[key]} {label}"
        for key, label in (
            ("lost_steps", "steps lost"),
            ("lost_samples", "samples lost"),
            ("repeated_samples", "samples repeated"),
        )
        if key in result
    ]
    if counts:
        rows.append(("ledger", ", ".join(counts)))
    if "live_slots" in result:
        live = result["live_slots"]
        rows.append(("live slots", f"{ranges(live)} ({len(live)})"))
    if result.get("full_size_s"):
        after = ", ".join(_seconds(seconds) for seconds in result["full_size_s"])
        rows.append(("full size", f"all slots trained again after {after} from a loss"))
    name_width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{name_width}}  {value}" for name, value in rows)


def _validation(value: float | Sequence[float]) -> str:
    """One number, or several over the run."""
    if isinstance(value, Sequence):
        return " -> ".join(f"{loss:.4f}" for loss in value)
    return f"{value:.4f}"


def _generations(result: Mapping[str, Any], width: int) -> str:
    """One row per membership: who was in it, why it came to be, and the loss across its beginning."""
    generations: Sequence[Mapping[str, Any]] = result.get("generations") or ()
    if not generations:
        return ""
    table = _table("generation", "from step", "slots", "loss before", "loss after", "reason")
    losses: Sequence[float] = result.get("loss") or ()
    for entry in generations:
        step = int(entry["step"])
        slots = entry["slots"]
        table.add_row(
            str(entry["gen"]),
            str(step),
            f"{ranges(slots)} ({len(slots)})",
            f"{losses[step - 2]:.4f}" if 2 <= step <= len(losses) + 1 else "-",
            f"{losses[step - 1]:.4f}" if 1 <= step <= len(losses) else "-",
            str(entry.get("reason") or "start"),
        )
    return rendered(table, width)


def _recoveries(result: Mapping[str, Any], width: int) -> str:
    """Seconds from a kill to the next committed step, and what they went into."""
    totals: Sequence[float] = result.get("recovery_s") or ()
    if not totals:
        return ""
    phases: Sequence[Mapping[str, float]] = result.get("recovery_phases_s") or ()
    table = _table("recovery", "kill to next committed step", *PHASES)
    for number, total in enumerate(totals):
        parts = phases[number] if number < len(phases) else {}
        table.add_row(
            str(number + 1),
            _seconds(total),
            *(_seconds(parts[phase]) if phase in parts else "-" for phase in PHASES),
        )
    return rendered(table, width)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, header_style="")
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
