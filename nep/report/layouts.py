"""Layouts as text: which part of the experts' line each slot holds."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nep.planning.layout import Intervals, Line, LineKind, Lines, axis_lines, axis_unit_numel
from nep.planning.plan import Plan
from nep.report.terminal import ranges

# How much of a column's stretch is held: nothing, up to a third, up to two thirds, less than all, all.
_SHADES = "·░▒▓█"
# Narrower than this, two pictures stand one below the other.
_SIDE_BY_SIDE_WIDTH = 96
_GAP = 3
# Layers are shown once for each way of cutting them, and no more ways than this.
_MAX_PICTURES = 3


def layout_picture(plan: Plan, lines: Lines, width: int = 100) -> str:
    """Draw where the experts are: one row per slot, from the first expert (left) to the last.

    Layers that are cut alike share a picture. To the right of a row its experts by number, with fractions.

    Args:
        plan: Whose holders to draw.
        lines: The model's parameters.
        width: Columns to use.

    Returns:
        Lines of at most `width` characters, without a newline at the end.
    """
    return _drawn(plan, lines, width, content_width=_content_width(plan, lines, width))


def layouts_before_after(before: Plan, after: Plan, lines: Lines, width: int = 100) -> str:
    """Two layouts side by side, or one below the other where `width` is small.

    Slots that only the first has are drawn as gone in the second, and both are drawn to one scale.
    """
    side_by_side = width >= _SIDE_BY_SIDE_WIDTH
    each = (width - _GAP) // 2 if side_by_side else width
    content_width = max(_content_width(plan, lines, each) for plan in (before, after))
    first = _drawn(before, lines, each, content_width=content_width)
    second = _drawn(after, lines, each, content_width=content_width, earlier=before)
    if not side_by_side:
        return f"before\n{first}\n\nafter\n{second}"
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_edge=False)
    for title in ("before", "after"):
        table.add_column(title, no_wrap=True, header_style="", width=each)
    table.add_row(Text(first), Text(second))
    return rendered(table, width)


def rendered(renderable: object, width: int) -> str:
    """What rich would print, as plain text without trailing blanks."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, color_system=None, highlight=False, emoji=False, markup=False).print(renderable)
    return "\n".join(row.rstrip() for row in buffer.getvalue().splitlines())


def _drawn(plan: Plan, lines: Lines, width: int, *, content_width: int, earlier: Plan | None = None) -> str:
    groups = _alike(plan, lines)
    text = [f"layout {plan.number}: {_count(len(plan.slots), 'slot')}, {_count(len(plan.replicas), 'replica')}"]
    for line, layers in groups[:_MAX_PICTURES]:
        text += _picture(plan, line, layers, width, content_width, earlier, drawn_axis=groups[0][0].axis)
    if len(groups) > _MAX_PICTURES:
        text.append(f"and {len(groups) - _MAX_PICTURES} other ways of cutting layers, not drawn")
    if plan.redundancy != "none" and (alone := plan.unprotected(lines)):
        numel = axis_unit_numel(lines)
        total = sum(line.num_units * numel[axis] for axis, line in axis_lines(lines).items())
        part = sum((hi - lo) * numel[axis] for axis, lo, hi in alone) / total
        text.append(f"without a mirror: {part:.1%} of the parameters")
    return "\n".join(row[:width].rstrip() for row in text)


def _content_width(plan: Plan, lines: Lines, width: int) -> int:
    """Columns for the lists of experts: what the longest needs, but the drawing comes first."""
    longest = 0
    for line, _ in _alike(plan, lines)[:_MAX_PICTURES]:
        for intervals in plan.holders.by_slot(line.axis).values():
            longest = max(longest, len(experts_text(intervals, line.units_per_expert or 1)))
    return min(longest, width * 2 // 5)


def _alike(plan: Plan, lines: Lines) -> list[tuple[Line, list[int]]]:
    """(a line, the layers cut as it is) for each way in which expert lines are cut, by first layer."""
    groups: dict[object, tuple[Line, list[int]]] = {}
    for axis, line in axis_lines(lines).items():
        if line.kind is LineKind.EXPERTS:
            cut = tuple(sorted(plan.holders.by_slot(axis).items()))
            groups.setdefault((line.num_units, line.units_per_expert, cut), (line, []))[1].append(line.layer)
    return list(groups.values())


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """Where the columns of a picture lie on a line of `num_units`."""

    num_units: int
    num_experts: int
    num_columns: int
    columns_per_expert: int  # 0: a column stands for more than one expert
    separated: bool

    def row(self, intervals: Intervals) -> str:
        return self._spaced("".join(self._shade(column, intervals) for column in range(self.num_columns)))

    def header(self) -> str:
        """Expert numbers above their columns, as far as there is room."""
        end = self.num_columns + (self.num_experts - 1 if self.separated else 0)
        text = ""
        for expert in range(self.num_experts):
            if self.columns_per_expert:
                start = expert * (self.columns_per_expert + self.separated)
            else:
                start = expert * self.num_columns // self.num_experts
            # A number that would touch its neighbour or stick out is left away.
            if start + len(str(expert)) <= end and (not text or start > len(text)):
                text = text.ljust(start) + str(expert)
        return text

    def _spaced(self, columns: str) -> str:
        if not self.separated:
            return columns
        size = self.columns_per_expert
        return " ".join(columns[start : start + size] for start in range(0, len(columns), size))

    def _shade(self, column: int, intervals: Intervals) -> str:
        """How much of the column's stretch of the line the intervals cover."""
        # A column need not end at a whole unit: count in parts of a unit, num_columns to each.
        lo, hi = column * self.num_units, (column + 1) * self.num_units
        parts = self.num_columns
        held = sum(max(0, min(hi, stop * parts) - max(lo, start * parts)) for start, stop in intervals)
        if held == 0:
            return _SHADES[0]
        return _SHADES[4] if held == self.num_units else _SHADES[1 + held * 3 // self.num_units]


def _grid(line: Line, room: int) -> _Grid:
    """As many columns per expert as fit, set apart by blanks where that leaves at least two."""
    num_experts = line.num_units // (line.units_per_expert or 1)
    with_blanks, without = (room + 1) // num_experts - 1, room // num_experts
    per_expert = min(8, with_blanks if with_blanks >= 2 else without)
    return _Grid(
        num_units=line.num_units,
        num_experts=num_experts,
        num_columns=per_expert * num_experts if per_expert else max(1, room),
        columns_per_expert=per_expert,
        separated=with_blanks >= 2,
    )


def _picture(
    plan: Plan,
    line: Line,
    layers: Sequence[int],
    width: int,
    content_width: int,
    earlier: Plan | None,
    drawn_axis: str,
) -> list[str]:
    """The rows of one way of cutting; replicas that are cut as `drawn_axis` is are not drawn again."""
    replicas = _rows(plan, earlier)
    slots = [slot for _, members in replicas for slot in members]
    labels = {slot: f"  slot {slot:<{len(str(max(slots)))}} " for slot in slots}
    label_width = max(map(len, labels.values()), default=0)
    grid = _grid(line, max(1, width - label_width - content_width - 1))
    name = "layer" if len(layers) == 1 else "layers"
    text = [
        f"{name} {ranges(layers)}: {_count(grid.num_experts, 'expert')}",
        " " * label_width + grid.header(),
    ]
    for replica, members in replicas:
        share = sum(lane.num_sequences for lane in plan.lanes if lane.replica == replica)
        title = "replica gone" if replica is None else f"replica {replica}, {_count(share, 'sequence')} per step"
        as_above = line.axis != drawn_axis and all(
            plan.holders.intervals(line.axis, slot) == plan.holders.intervals(drawn_axis, slot) for slot in members
        )
        text.append(title + (": as above" if as_above else ""))
        if as_above:
            continue
        for slot in members:
            if slot not in plan.slots:
                text.append(f"{labels[slot]}gone")
                continue
            held = plan.holders.intervals(line.axis, slot)
            content = experts_text(held, line.units_per_expert or 1)
            if len(content) > content_width:
                content = content[: content_width - 1] + "…"
            text.append(f"{labels[slot]}{grid.row(held)} {content}")
    return text


def _rows(plan: Plan, earlier: Plan | None) -> list[tuple[int | None, list[int]]]:
    """(replica or None if it is gone, its slots and those it has lost), as the earlier plan orders them.

    Replicas are matched by their slots, which are permanent: one that disappears moves the others up.
    """
    rows: list[tuple[int | None, list[int]]] = []
    unmatched = dict(enumerate(plan.replicas))
    for former in earlier.replicas if earlier is not None else ():
        replica = next((index for index, slots in unmatched.items() if set(slots) & set(former)), None)
        members = unmatched.pop(replica) if replica is not None else ()
        rows.append((replica, sorted({*members, *(set(former) - set(plan.slots))})))
    return rows + [(replica, list(slots)) for replica, slots in unmatched.items()]


def experts_text(intervals: Intervals, units_per_expert: int) -> str:
    """Whole experts, then parts of experts: '0-1 6:1/3 7:1/4'; '-' for none."""
    parts: dict[int, int] = {}
    for lo, hi in intervals:
        for expert in range(lo // units_per_expert, -(-hi // units_per_expert)):
            start, stop = expert * units_per_expert, (expert + 1) * units_per_expert
            parts[expert] = parts.get(expert, 0) + min(hi, stop) - max(lo, start)
    full = [expert for expert, units in parts.items() if units == units_per_expert]
    slices = [
        f"{expert}:{Fraction(units, units_per_expert)}"
        for expert, units in sorted(parts.items())
        if units < units_per_expert
    ]
    return " ".join(([ranges(full)] if full else []) + slices) or "-"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
