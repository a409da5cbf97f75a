"""A plan as text: what is planned for, what comes out, what binds, what travels, and what lost."""

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from nep.planning.cluster import Cluster
from nep.planning.cost.step_time import PARTS, StepTime
from nep.planning.loads import ExpertLoads
from nep.planning.search.request import Alternative, Planned, PlanReport, PlanRequest, SlotFigures
from nep.planning.shapes import parameter_lines
from nep.report.layouts import experts_text, rendered
from nep.report.plan_figures import (
    HeldExperts,
    bytes_text,
    count_text,
    gib_text,
    held_experts,
    lost_share,
    samples_per_s,
    time_text,
    time_unit,
    transfer_figures,
)
from nep.report.terminal import ranges

PART_NAMES = {
    "expert_gemm": "experts",
    "attention": "attention",
    "dense": "router, dense layers, head",
    "tensor_parallel": "tensor parallel",
    "dispatch": "dispatch and combine",
    "grad_sync": "gradient sums",
    "mirror": "sums to mirrors",
    "optimizer": "optimizer",
    "parameter_return": "parameters back",
    "vote": "vote",
}
# More kinds of slots than this are summed up in a last line.
_MAX_ROWS = 48


def plan_text(request: PlanRequest, planned: Planned, *, notes: Sequence[str] = (), width: int = 100) -> str:
    """Everything that `nep plan` prints.

    Args:
        request: what was asked.
        planned: what came out.
        notes: sentences about the input, for instance what the model's description leaves out.
        width: columns to use.

    Returns:
        Text without a newline at the end.
    """
    parts = [
        _facts(question_rows(request, notes)),
        _facts(result_rows(request, planned)),
        _slots(request, planned, width),
        _steps(planned.report, width),
        _transfers(request, planned, width),
        _alternatives(planned.report.alternatives, width),
    ]
    return "\n\n".join(part for part in parts if part)


def question_rows(request: PlanRequest, notes: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(name, text) of what is planned for: model, cluster, hardware, step, loads."""
    shape, workload = request.shape, request.workload
    model = (
        f"{shape.name}: {count_text(shape.num_parameters)} parameters, {count_text(shape.num_active_parameters)} "
        f"active; {shape.num_moe_layers} layers of {shape.num_experts} experts, top {shape.top_k}, units of "
        f"{shape.neuron_block} neurons"
    )
    replicas = "as many replicas as fit" if request.num_replicas is None else _count(request.num_replicas, "replica")
    step = (
        f"{_count(workload.global_batch_size, 'sequence')} of {workload.seq_len} tokens, {workload.micro_batch_size} "
        f"at a time, {8 * workload.parameter_bytes} bits{', recomputed' if workload.recompute else ''}; {replicas}, "
        f"redundancy {request.redundancy}"
    )
    rows = [
        ("model", model),
        ("cluster", cluster_text(request.cluster)),
        ("hardware", request.hardware.name),
        ("step", step),
        ("loads", loads_text(request.loads)),
        *(("note", note) for note in notes),
    ]
    if request.current is not None:
        rows.append(("current", f"plan {request.current.number}, {request.current.digest[:12]}"))
    return rows


def cluster_text(cluster: Cluster) -> str:
    """`32 slots on 4 nodes; failed 3,17; at 0.70: 5`."""
    nodes = len({slot.node for slot in cluster.slots})
    parts = [f"{_count(len(cluster.slots), 'slot')} on {_count(nodes, 'node')}"]
    for health in ("failed", "draining", "idle", "spare"):
        if slots := [slot.index for slot in cluster.slots if slot.health == health]:
            parts.append(f"{health} {ranges(slots)}")
    by_speed: dict[int, list[int]] = {}
    for slot in cluster.slots:
        if slot.speed_ppm != 1_000_000:
            by_speed.setdefault(slot.speed_ppm, []).append(slot.index)
    parts += [f"at {ppm / 1e6:.2f} of the speed: {ranges(slots)}" for ppm, slots in sorted(by_speed.items())]
    amounts = sorted({slot.memory_bytes for slot in cluster.slots if slot.memory_bytes is not None})
    if amounts:
        parts.append(f"{' or '.join(gib_text(amount) for amount in amounts)} GiB each")
    return "; ".join(parts)


def loads_text(loads: ExpertLoads | None) -> str:
    """How uneven they are."""
    if loads is None:
        return "equal (none given)"
    shares = loads.normalised().mean
    hottest = shares.max(axis=1) * loads.num_experts
    steps = f"{_count(loads.num_steps, 'step')}, " if loads.num_steps else ""
    return f"{steps}the hottest expert of a layer has {hottest.min():.2f} to {hottest.max():.2f} times an even share"


def result_rows(request: PlanRequest, planned: Planned) -> list[tuple[str, str]]:
    """(name, text) of what comes out, in one line each."""
    plan, report = planned.plan, planned.report
    sizes = ", ".join(str(len(slots)) for slots in plan.replicas[:16]) + (", ..." if len(plan.replicas) > 16 else "")
    rate, healthy = samples_per_s(report.predicted, request), samples_per_s(report.healthy, request)
    share = f", {rate / healthy:.1%} of {healthy:.2f} with every slot healthy" if healthy else ""
    step = report.predicted
    rows = [
        (
            f"plan {plan.number}",
            f"{_count(len(plan.slots), 'slot')} in {_count(len(plan.replicas), 'replica')} ({sizes}); "
            f"digest {plan.digest[:12]}",
        ),
        ("step", f"{time_text(step.total)}, {rate:.2f} sequences/s{share}"),
        ("balance", f"{report.balance:.4f} (mean over max of load per speed)"),
        ("rows", f"{step.rows_per_token:.2f} sent per token and layer, {step.busiest_rows:.2f} times the mean busiest"),
        ("bound", _bound_text(report)),
        ("binds", report.binds),
        ("to get there", f"{bytes_text(report.moved_bytes)} in {time_text(report.move_s)}"),
    ]
    if report.survival:
        text = ", ".join(f"{_count(deaths, 'death')} {chance:.1%}" for deaths, chance in report.survival.items())
        rows.append(("survives", f"{text} (without a checkpoint)"))
    if report.skipped is not None:
        rows.append(("kept", report.skipped))
    if report.lost:
        lost = f"state of {lost_share(request, report):.2%} of the parameters"
        rows.append(("lost", f"{lost}: no owner and no mirror lives, use a checkpoint"))
    return rows


def _bound_text(report: PlanReport) -> str:
    """How near the expert layers are to what could be, in the prices that placement goes by."""
    share = f"{report.bound_s / report.placement_s:.1%}" if report.placement_s > 0 else "all"
    return (
        f"{share} of what is possible in the expert layers: {time_text(report.placement_s)}, at best "
        f"{time_text(report.bound_s)}, counting a row for every expert of a token"
    )


def _slots(request: PlanRequest, planned: Planned, width: int) -> str:
    """One row for each kind of slot: those with equal entries share it."""
    plan, all_figures = planned.plan, planned.report.slots
    held = held_experts(plan, parameter_lines(request.shape))
    unit, write = time_unit(*(figures.step_s for figures in all_figures))
    sequences = {slot: lane.num_sequences for lane in plan.lanes for slot in lane.slots}
    cells_of = {
        figures.slot: (
            f"{figures.speed:.2f}",
            str(sequences[figures.slot]),
            f"{figures.load:.3f}",
            f"{figures.rows:.2f}",
            _memory(figures),
            write(figures.step_s),
            f"{held.whole[place]:.1f}",
            f"{held.slices[place]:.1f}",
            _experts(held, place),
        )
        for place, figures in enumerate(all_figures)
    }
    groups = _alike(cells_of)
    if len(groups) > _MAX_ROWS:  # then slots that differ in the numbers of their experts only are alike too
        groups = _alike({slot: (*cells[:-1], "") for slot, cells in cells_of.items()})
    shown = list(groups.items())[:_MAX_ROWS]
    where = "experts" if held.layers_are_alike else f"experts of layer {held.layers[0]}"
    titles = ("speed", "seqs", "load", "rows", "GiB", f"busy, {unit}", "whole", "slices", where)
    columns = {"slots": [_shortened(ranges(slots), 16) for _, slots in shown]}
    if len(plan.replicas) > 1:
        columns["replica"] = [_shortened(ranges([plan.replica_of(slot) for slot in slots]), 8) for _, slots in shown]
    columns |= {title: [cells[index] for cells, _ in shown] for index, title in enumerate(titles)}
    text = rendered(_fitting(columns, where, width), width)
    if len(groups) > _MAX_ROWS:
        rest = sum(len(slots) for _, slots in list(groups.items())[_MAX_ROWS:])
        text += f"\nand {rest} other slots; --json has all of them"
    return text


def _fitting(columns: dict[str, list[str]], where: str, width: int) -> Table:
    """A table of the columns that say something and fit; the list of experts gets what room is left."""
    columns = {
        title: cells
        for title, cells in columns.items()
        if not (title == "speed" and set(cells) <= {"1.00"}) and not (title == "slices" and set(cells) <= {"0.0"})
    }
    experts = columns.pop(where)
    for spare in ("rows", "whole", "slices", "seqs", "replica"):
        if _width(columns) <= width:
            break
        columns.pop(spare, None)
    if any(experts) and _width(columns) + max(len(where), 12) <= width:
        columns[where] = experts
    table = _table(*columns)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    return sum(2 + max(len(title), *map(len, cells)) for title, cells in columns.items())


def _alike(rows: Mapping[int, tuple[str, ...]]) -> dict[tuple[str, ...], list[int]]:
    """Entries -> the slots that have them."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for slot, cells in rows.items():
        groups.setdefault(cells, []).append(slot)
    return groups


def _experts(held: HeldExperts, place: int) -> str:
    size = held.units_per_expert
    cuts = tuple(
        (expert * size, expert * size + int(units)) for expert, units in enumerate(held.units(0, place)) if units
    )
    return experts_text(cuts, size)


def _memory(figures: SlotFigures) -> str:
    limit = "" if figures.memory_limit_bytes is None else f"/{gib_text(figures.memory_limit_bytes)}"
    return gib_text(figures.memory_bytes) + limit


def _steps(report: PlanReport, width: int) -> str:
    """Parts of the step, side by side for the healthy job, the plan in force and the new one."""
    columns: list[tuple[str, StepTime]] = [("healthy", report.healthy)]
    if report.current is not None:
        columns.append(("current", report.current))
    columns.append(("planned", report.predicted))
    unit, write = time_unit(*(step.total for _, step in columns))
    table = _table(f"step, {unit}", *(name for name, _ in columns), "the planned one waits for")
    for part in PARTS:
        if any(step.parts.get(part, 0.0) > 0 for _, step in columns):
            bound = report.predicted.binding.get(part)
            waits = f"slot {bound.slot}, {bound.resource}" if bound is not None else ""
            table.add_row(PART_NAMES.get(part, part), *(write(step.parts.get(part, 0.0)) for _, step in columns), waits)
    table.add_row("total", *(write(step.total) for _, step in columns), "")
    return rendered(table, width)


def _transfers(request: PlanRequest, planned: Planned, width: int) -> str:
    figures = transfer_figures(request, planned)
    if not figures:
        return ""
    table = _table("transfers", "pieces", "bytes", "busiest slot", "alone", "from", "to")
    for one in figures:
        table.add_row(
            one.kind,
            str(one.pieces),
            bytes_text(one.num_bytes),
            bytes_text(one.busiest_bytes),
            time_text(one.seconds),
            _shortened(ranges(one.sources), width // 6),
            _shortened(ranges(one.destinations), width // 6),
        )
    return rendered(table, width)


def _alternatives(alternatives: Sequence[Alternative], width: int) -> str:
    if not alternatives:
        return ""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("considered", "step", "move", "sequences/s"):
        table.add_column(title, no_wrap=True, header_style="")
    table.add_column("why", header_style="", overflow="fold")
    for one in alternatives:
        table.add_row(
            f"{'*' if one.chosen else ' '} {one.name}",
            "-" if one.step_s is None else time_text(one.step_s),
            "-" if one.move_s is None else time_text(one.move_s),
            "-" if one.samples_per_s is None else f"{one.samples_per_s:.2f}",
            one.why,
        )
    return rendered(table, width)


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in titles:
        table.add_column(title, no_wrap=True, header_style="", overflow="ellipsis")
    return table


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    name_width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{name_width}}  {value}" for name, value in rows)


def _shortened(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(1, room - 1)] + "…"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
