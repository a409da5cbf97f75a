"""A plan as one page: map of slots and experts before and after, the step, transfers, what was considered.

The page is one file that asks the network for nothing.
"""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from nep.planning.cost.step_time import PARTS
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.search.request import Planned, PlanRequest
from nep.planning.shapes import parameter_lines
from nep.report.plan_figures import (
    HeldExperts,
    bytes_between,
    bytes_text,
    gib_text,
    held_experts,
    samples_per_s,
    time_text,
    transfer_figures,
)
from nep.report.plan_page_template import TEMPLATE
from nep.report.plan_table import PART_NAMES, question_rows, result_rows
from nep.report.terminal import ranges

# A map of more rows cannot be read, and would make a file of many megabytes.
MAX_SLOTS = 256
_MAX_PAIRS = 200


def plan_page(request: PlanRequest, planned: Planned, *, notes: Sequence[str] = ()) -> str:
    """The page, complete.

    Args:
        request: what was asked; its current plan is the map's other half.
        planned: what came out.
        notes: sentences about the input.
    """
    drawn = _drawn_slots(request.current, planned.plan)
    data = json.dumps(_data(request, planned, drawn), separators=(",", ":"), allow_nan=False)
    left_out = len(_all_slots(request.current, planned.plan)) - len(drawn)
    parts = {
        "TITLE": escape(f"{request.shape.name}: plan {planned.plan.number}"),
        "FACTS": _list(question_rows(request, notes)),
        "TILES": _tiles(request, planned),
        "RESULT": _list(result_rows(request, planned)),
        "MAP_NOTE": _map_note(request, left_out),
        "STEPS": _steps(planned),
        "TRANSFERS": _transfers(request, planned),
        "ALTERNATIVES": _alternatives(planned),
        "SLOTS": _slots(planned),
        # A closing tag inside a string would end the script.
        "DATA": data.replace("<", "\\u003c"),
    }
    page = TEMPLATE
    for name, text in parts.items():
        page = page.replace(f"@{name}@", text)
    return page


def _map_note(request: PlanRequest, left_out: int) -> str:
    parts = []
    if request.current is not None:
        parts.append("What a slot gains is marked in the second colour.")
    if left_out:
        parts.append(f"{left_out} slots of replicas that are not drawn are left out; those that change come first.")
    return " ".join(parts)


def _replicas(plan: Plan) -> dict[int, tuple[int, ...]]:
    return {slot: slots for slots in plan.replicas for slot in slots}


def _all_slots(before: Plan | None, after: Plan) -> set[int]:
    return {*after.slots, *(before.slots if before is not None else ())}


def _drawn_slots(before: Plan | None, after: Plan) -> list[int]:
    """Slots of the map, replica by replica; where there are too many, replicas that change come first."""
    members = dict(_replicas(before)) if before is not None else {}
    groups: dict[tuple[int, ...], set[int]] = {}
    for slots in after.replicas:
        former = {other for slot in slots for other in members.get(slot, ())} & (set(slots) | _gone(before, after))
        groups[slots] = {*slots, *former}
    rest = _all_slots(before, after) - {slot for slots in groups.values() for slot in slots}
    rows = [sorted(slots) for slots in groups.values()] + ([sorted(rest)] if rest else [])
    if sum(map(len, rows)) <= MAX_SLOTS:
        return [slot for slots in rows for slot in slots]
    rows.sort(key=lambda members: (not _changes(before, after, members), members))
    drawn: list[int] = []
    for row in rows:
        if drawn and len(drawn) + len(row) > MAX_SLOTS:
            break
        drawn += row[:MAX_SLOTS]
    return drawn


def _gone(before: Plan | None, after: Plan) -> set[int]:
    return set(before.slots) - set(after.slots) if before is not None else set()


def _changes(before: Plan | None, after: Plan, slots: Iterable[int]) -> bool:
    return before is not None and any(
        before.holders.intervals(axis, slot) != after.holders.intervals(axis, slot)
        for axis in after.holders.cuts
        for slot in slots
    )


def _data(request: PlanRequest, planned: Planned, drawn: Sequence[int]) -> dict[str, Any]:
    """What the page's script draws."""
    lines = parameter_lines(request.shape)
    plan, before = planned.plan, request.current
    held = held_experts(plan, lines)
    layers, experts = len(held.layers), held.rows.shape[1]
    loads = (request.loads or ExpertLoads.uniform(layers, experts)).normalised().mean * experts
    speeds = request.cluster.speeds_ppm
    replica = {slot: index for index, slots in enumerate(plan.replicas) for slot in slots}
    if before is not None:
        # A slot that is gone stays with those that it shared a replica with.
        for slots in before.replicas:
            index = next((replica[slot] for slot in slots if slot in replica), len(plan.replicas))
            replica |= {slot: index for slot in slots if slot not in replica}
    report = planned.report
    steps = [("healthy", report.healthy), ("current", report.current), ("planned", report.predicted)]
    return {
        "layers": list(held.layers),
        "experts": experts,
        "size": held.units_per_expert,
        "loads": np.round(loads, 4).tolist(),
        "rows": [
            {
                "slot": slot,
                "replica": replica[slot],
                "speed": speeds.get(slot, 1_000_000) / 1e6,
                "before": before is not None and slot in before.slots,
                "after": slot in plan.slots,
            }
            for slot in drawn
        ],
        "before": None if before is None else _tables(before, held_experts(before, lines), drawn),
        "after": _tables(plan, held, drawn),
        "parts": {part: PART_NAMES.get(part, part) for part in PARTS},
        "steps": [
            {"name": name, "total": step.total, "text": time_text(step.total), "parts": dict(step.parts)}
            for name, step in steps
            if step is not None
        ],
    }


def _tables(plan: Plan, held: HeldExperts, drawn: Sequence[int]) -> dict[str, Any]:
    """Rows of expert, units, expert, units, ... by layer; layers that are cut alike share a table."""
    place = {slot: index for index, slot in enumerate(plan.slots)}
    known: dict[str, int] = {}
    tables: list[list[list[int]]] = []
    which = []
    for layer in range(len(held.layers)):
        rows: list[list[int]] = []
        for slot in drawn:
            units = held.units(layer, place[slot]) if slot in place else np.zeros(0, dtype=np.int64)
            found = units.nonzero()[0]
            rows.append(np.stack([found, units[found]], axis=1).ravel().tolist())
        key = json.dumps(rows)
        if key not in known:
            known[key] = len(tables)
            tables.append(rows)
        which.append(known[key])
    return {"tables": tables, "of": which}


def _tiles(request: PlanRequest, planned: Planned) -> str:
    report = planned.report
    rate, healthy = samples_per_s(report.predicted, request), samples_per_s(report.healthy, request)
    fullest = max(report.slots, key=lambda figures: figures.memory_bytes, default=None)
    tiles = [
        (time_text(report.predicted.total), "a step"),
        (f"{rate / healthy:.1%}" if healthy else "-", "of the healthy pace"),
        (f"{report.balance:.3f}", "balance"),
        (bytes_text(report.moved_bytes), f"to move, {time_text(report.move_s)}"),
    ]
    if fullest is not None:
        tiles.append((f"{gib_text(fullest.memory_bytes)} GiB", f"on the fullest slot ({fullest.slot})"))
    return "".join(f"<div><span>{escape(value)}</span>{escape(name)}</div>" for value, name in tiles)


def _steps(planned: Planned) -> str:
    report = planned.report
    columns = [("healthy", report.healthy), ("current", report.current), ("planned", report.predicted)]
    shown = [(name, step) for name, step in columns if step is not None]
    rows = []
    for part in PARTS:
        times = [step.parts.get(part, 0.0) for _, step in shown]
        if any(times):
            bound = report.predicted.binding.get(part)
            waits = "" if bound is None else f"slot {bound.slot}, {bound.resource}"
            rows.append([PART_NAMES.get(part, part), *map(time_text, times), waits])
    rows.append(["total", *(time_text(step.total) for _, step in shown), ""])
    return _html_table(["part", *(name for name, _ in shown), "the planned one waits for"], rows, text=(0, -1))


def _transfers(request: PlanRequest, planned: Planned) -> str:
    figures = transfer_figures(request, planned)
    if not figures:
        return "<p>Nothing.</p>"
    kinds = _html_table(
        ["kind", "pieces", "bytes", "busiest slot", "seconds alone", "from", "to"],
        [
            [
                one.kind,
                str(one.pieces),
                bytes_text(one.num_bytes),
                bytes_text(one.busiest_bytes),
                time_text(one.seconds),
                ranges(one.sources),
                ranges(one.destinations),
            ]
            for one in figures
        ],
        text=(0, -2, -1),
    )
    pairs = sorted(bytes_between(request, planned).items(), key=lambda item: (-item[1], item[0]))
    rows = [[str(src), str(dst), bytes_text(size)] for (src, dst), size in pairs[:_MAX_PAIRS]]
    more = f"<p class='quiet'>and {len(pairs) - _MAX_PAIRS} other pairs</p>" if len(pairs) > _MAX_PAIRS else ""
    table = _html_table(["from slot", "to slot", "bytes"], rows)
    return (
        f"{kinds}<p></p><details><summary>by pair of slots</summary><div class='scroll'>{table}</div>{more}</details>"
    )


def _alternatives(planned: Planned) -> str:
    rows = [
        [
            one.name,
            "-" if one.step_s is None else time_text(one.step_s),
            "-" if one.move_s is None else time_text(one.move_s),
            "-" if one.samples_per_s is None else f"{one.samples_per_s:.2f}",
            one.why,
        ]
        for one in planned.report.alternatives
    ]
    chosen = {index for index, one in enumerate(planned.report.alternatives) if one.chosen}
    return _html_table(["", "step", "move", "sequences/s", "why"], rows, text=(0, -1), chosen=chosen)


def _slots(planned: Planned) -> str:
    plan = planned.plan
    rows = [
        [
            str(one.slot),
            str(plan.replica_of(one.slot)),
            f"{one.speed:.2f}",
            f"{one.load:.3f}",
            f"{one.rows:.2f}",
            gib_text(one.memory_bytes),
            "-" if one.memory_limit_bytes is None else gib_text(one.memory_limit_bytes),
            time_text(one.step_s),
        ]
        for one in planned.report.slots[:1024]
    ]
    titles = ["slot", "replica", "speed", "load", "rows", "GiB", "GiB it has", "busy in a step"]
    return _html_table(titles, rows)


def _list(rows: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows) + "</dl>"


def _html_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[int] = (), chosen: Iterable[int] = ()
) -> str:
    """Columns in `text` are left aligned (negative from the end), rows in `chosen` stand out."""
    left = {index % len(titles) for index in text}
    marked = set(chosen)

    def cells(values: Sequence[str], tag: str) -> str:
        classes = dict.fromkeys(left, " class='text'")
        return "".join(f"<{tag}{classes.get(index, '')}>{escape(value)}</{tag}>" for index, value in enumerate(values))

    body = "".join(
        f"<tr{' class=chosen' if index in marked else ''}>{cells(row, 'td')}</tr>" for index, row in enumerate(rows)
    )
    return f"<table><thead><tr>{cells(titles, 'th')}</tr></thead><tbody>{body}</tbody></table>"
