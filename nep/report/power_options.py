"""The options of `nep power`, and what they ask: which boards, and for which job watts are planned."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nep.planning.cluster import Cluster
from nep.planning.plan import Plan
from nep.planning.power import PPM, PowerSlot, domain_budgets, needed_by_plan
from nep.planning.speed_curve import CURVES, SpeedCurve, curve_for_limits, curve_for_product
from nep.power.device import PowerRange
from nep.report.plan_options import Count, File, Flag, Number, SlotList
from nep.report.readers.cluster_file import read_cluster, slot_list
from nep.report.readers.curve_file import read_curve
from nep.report.readers.plan_file import read_plan
from nep.report.terminal import ranges


@dataclass(frozen=True, kw_only=True)
class PowerOptions:
    """Show this machine's boards and their power limits; plan watts for a damaged job; set them with --apply.

    Nothing is changed without --apply, and what was set is put back when the command ends.
    """

    simulate: Annotated[str | None, tyro.conf.arg(metavar="N|FILE", help_behavior_hint="")] = None
    """Simulated boards in place of NVML's: so many B200, or a file of boards."""
    boards: SlotList = ""
    """Only these boards, by nvidia-smi's numbers: 0,1 or 0-3."""
    first_slot: Count = 0
    """Slot of the first board: on the third node of eight, 16."""
    watch: Flag = False
    """Show the table again and again, with what happens to the boards in between."""
    interval_s: Annotated[float, tyro.conf.arg(metavar="X")] = 2.0
    """Seconds between two looks."""
    rounds: Number = None
    """With --watch: end after so many looks; by default with Ctrl-C."""
    plan: File = None
    """Plan watts for this plan (a file of nep plan --out)."""
    cluster: File = None
    """Nodes and speeds of the job's slots; by default all nodes have as many boards as this one. Without --plan, every
    node's healthy slots do the work of all."""
    failed: SlotList = ""
    """Slots that are broken, besides those that plan and cluster leave out: 3,17 or 0-3,9."""
    job: Annotated[str | None, tyro.conf.arg(metavar="FILE|HOST:PORT", help_behavior_hint="")] = None
    """Plan watts for a running job: slots that do not train now count as failed. The job.json in a run folder, or the
    address of the control store."""
    curve: Annotated[str | None, tyro.conf.arg(metavar="NAME|FILE", help_behavior_hint="")] = None
    """Speed-power curve: a name, or a file of measurements; by default by the board's product name."""
    budget_w: Number = None
    """Watts for the limits of a node's live boards together; by default what the limits of all its boards are now,
    without what dead ones may draw."""
    failed_draw_w: Count = 100
    """What a board that is out of use may still draw."""
    apply: Flag = False
    """Set the planned limits here, and hold them until Ctrl-C (or --hold-s); then they are put back."""
    hold_s: Annotated[float | None, tyro.conf.arg(metavar="X", help_behavior_hint="")] = None
    """With --apply: how long."""
    dry_run: Flag = False
    """Say what would be set, and set nothing, whatever else is said."""
    json: Flag = False
    """Print one object with all numbers as the last line (with --watch: one a look)."""

    def check(self) -> None:
        """Refuses options that do not go together.

        Raises:
            ValueError: with all of them.
        """
        errors = []
        if self.apply and not self.plans:
            errors.append("--apply needs --plan, --cluster, --job or --failed: something to plan limits for")
        if self.hold_s is not None and not self.apply:
            errors.append("--hold-s needs --apply")
        if self.rounds is not None and not self.watch:
            errors.append("--rounds needs --watch")
        if self.watch and self.apply:
            errors.append("--watch and --apply do not go together; watch in a second terminal")
        if not self.interval_s > 0 or (self.hold_s is not None and not self.hold_s >= 0):
            errors.append(f"interval-s ({self.interval_s}) must be above 0 and hold-s ({self.hold_s}) at least 0")
        if self.rounds is not None and self.rounds < 1:
            errors.append(f"rounds ({self.rounds}) must be at least 1")
        if self.first_slot < 0 or self.failed_draw_w < 0:
            errors.append(f"first-slot ({self.first_slot}) and failed-draw-w ({self.failed_draw_w}) must be at least 0")
        if errors:
            raise ValueError("; ".join(errors))

    @property
    def plans(self) -> bool:
        """Whether watts are to be planned."""
        return bool(self.plan or self.cluster or self.job or self.failed)


@dataclass(frozen=True, kw_only=True)
class Board:
    """What planning needs to know of a board.

    Attributes:
        product: its name.
        range_w: its limits.
        usable_w: what a plan may use of them, see `usable_range`.
    """

    product: str
    range_w: PowerRange
    usable_w: PowerRange


@dataclass(frozen=True, kw_only=True)
class WattsQuestion:
    """What is asked of `plan_watts`.

    Attributes:
        slots: live slots of the job.
        budgets_w: by node.
        notes: what was assumed.
    """

    slots: tuple[PowerSlot, ...]
    budgets_w: Mapping[int, int]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class JobSlots:
    """The slots of a running job.

    Attributes:
        num_slots: of the whole job.
        training: those that train now.
    """

    num_slots: int
    training: frozenset[int]


def watts_question(
    options: PowerOptions,
    here: Mapping[int, Board],
    unreadable: Collection[int] = (),
    job: JobSlots | None = None,
) -> WattsQuestion:
    """Reads the files and puts the question together.

    Args:
        options: the command's.
        here: slot -> board, of this machine. Boards of other nodes are taken to be like the first of them.
        unreadable: slots of this machine whose boards do not answer; they count as failed.
        job: the running job, if one is asked for.

    Raises:
        ValueError: with what is wrong, and what to do.
    """
    plan = read_plan(options.plan) if options.plan is not None else None
    notes: list[str] = []
    cluster = _cluster(options, plan, {*here, *unreadable}, job)
    if strangers := sorted({*here, *unreadable} - {slot.index for slot in cluster.slots}):
        raise ValueError(f"slots {strangers} of this machine are not of the cluster; say --first-slot or --boards")
    cluster = cluster.fail(unreadable)
    if unreadable:
        notes.append(f"slots {ranges(sorted(unreadable))} do not answer and count as failed")
    needed = _needed(plan, cluster)
    pattern = next(iter(here.values()))
    if len(here) + len(unreadable) < len(cluster.slots):
        notes.append(f"boards of other nodes are taken to be like {pattern.product}")
    boards = {slot.index: here.get(slot.index, pattern) for slot in cluster.slots}
    curves = {product: _curve(options, board) for product, board in {b.product: b for b in boards.values()}.items()}
    notes += [f"speed of {product} by {curve.source}" for product, curve in sorted(curves.items())]
    speeds = cluster.speeds_ppm if options.cluster is not None or plan is None else _plan_speeds(plan)
    nodes = {slot.index: slot.node for slot in cluster.slots}
    slots = [
        PowerSlot(
            slot=slot,
            domain=nodes[slot],
            curve=curves[boards[slot].product],
            default_w=boards[slot].usable_w.default_w,
            min_w=boards[slot].usable_w.min_w,
            max_w=boards[slot].usable_w.max_w,
            needed_ppm=need,
            speed_ppm=speeds[slot],
        )
        for slot, need in needed.items()
    ]
    return WattsQuestion(slots=tuple(slots), budgets_w=_budgets(options, boards, nodes, needed), notes=tuple(notes))


def _cluster(options: PowerOptions, plan: Plan | None, here: Collection[int], job: JobSlots | None) -> Cluster:
    if options.cluster is not None:
        cluster = read_cluster(options.cluster)
    else:
        named = [*here, *(plan.slots if plan is not None else ()), *slot_list(options.failed, "failed")]
        highest = max([*named, job.num_slots - 1 if job is not None else 0])
        size = len(here)
        cluster = Cluster.uniform(-(-(highest + 1) // size) * size, size)
    if job is not None:
        cluster = cluster.fail(slot.index for slot in cluster.slots if slot.index not in job.training)
    return cluster.fail(slot_list(options.failed, "failed"))


def _needed(plan: Plan | None, cluster: Cluster) -> dict[int, int]:
    """Slot -> speed, of slots that have something to do."""
    if plan is not None:
        if strangers := sorted(set(plan.slots) - {slot.index for slot in cluster.slots}):
            raise ValueError(f"slots {strangers} of the plan are not of the cluster; give the cluster of the plan")
        gone = set(plan.slots) - set(cluster.healthy)
        if gone:
            raise ValueError(
                f"slots {sorted(gone)} of the plan are failed; plan again without them (nep plan --failed)"
            )
        return needed_by_plan(plan, healthy_slots=len(cluster.slots))
    healthy = set(cluster.healthy)
    sizes: dict[int, list[int]] = {}
    for slot in cluster.slots:
        sizes.setdefault(slot.node, []).append(slot.index)
    needed = {}
    for slots in sizes.values():
        live = [slot for slot in slots if slot in healthy]
        needed |= {slot: -(-len(slots) * PPM // len(live)) for slot in live}
    if not needed:
        raise ValueError("no slot is healthy; there is no power to plan")
    return dict(sorted(needed.items()))


def _plan_speeds(plan: Plan) -> dict[int, int]:
    return dict(zip(plan.slots, plan.speeds_ppm, strict=True))


def _curve(options: PowerOptions, board: Board) -> SpeedCurve:
    limits = board.range_w
    name = options.curve if options.curve is not None else curve_for_product(board.product)
    if name is None:
        raise ValueError(
            f"there is no published curve for {board.product}; give --curve with a name ({', '.join(CURVES)}) or a file"
        )
    if name in CURVES:
        return curve_for_limits(name, default_w=limits.default_w, max_w=limits.max_w)
    return read_curve(Path(name))


def _budgets(
    options: PowerOptions, boards: Mapping[int, Board], nodes: Mapping[int, int], needed: Mapping[int, int]
) -> dict[int, int]:
    if options.budget_w is not None:
        return dict.fromkeys((nodes[slot] for slot in needed), options.budget_w)
    unused = dict.fromkeys((slot for slot in boards if slot not in needed), options.failed_draw_w)
    budgets = domain_budgets(
        {slot: board.usable_w.default_w for slot, board in boards.items()}, nodes, failed_draw_w=unused
    )
    return {domain: budget for domain, budget in budgets.items() if domain in {nodes[slot] for slot in needed}}
