"""What it takes to get from the plan in force to another one: transfers, and memory meanwhile."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nep.planning.cluster import Cluster
from nep.planning.cost.hardware import HardwareProfile, scale_up_domains
from nep.planning.cost.workload import Workload
from nep.planning.intervals import Interval, Intervals, subtract, union
from nep.planning.layout import Layout, Lines, axis_unit_numel, count_units
from nep.planning.plan import Plan
from nep.planning.planner import lost_intervals
from nep.planning.search.flows import Flow, fetch_flow
from nep.planning.transfer import Transfer, fetch

Lost = tuple[tuple[str, int, int], ...]
"""``(axis, lo, hi)``, in canonical order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """The way to a plan.

    Attributes:
        transfers: what travels, by kind: ``parameters``, ``state``, ``mirrors``; empty if pieces were not asked for.
        flows: sums of the same.
        moved_bytes: bytes of all of it.
        seconds: what the transfers take, one kind after the other.
        lost: units whose state nobody has any more.
        parts: into how many changes of layout, a few axes each, it has to be cut to fit into memory.
    """

    transfers: Mapping[str, Transfer]
    flows: Mapping[str, Flow]
    moved_bytes: int
    seconds: float
    lost: Lost
    parts: int


NO_CHANGE = Change(transfers={}, flows={}, moved_bytes=0, seconds=0.0, lost=(), parts=0)
"""From nothing to a first plan: its state is made in place."""


def find_change(
    before: Plan,
    after: Plan,
    *,
    cluster: Cluster,
    lines: Lines,
    workload: Workload,
    hardware: HardwareProfile,
    memory_bytes: Mapping[int, int | None],
    in_parts: bool = True,
    pieces: bool = True,
) -> Change:
    """The way from one plan to the next.

    Failed slots give nothing. As in training, parameters that a slot does not hold come from the master weights
    of their owner, else of the mirror; here, at last from another holder, should both be lost.

    Args:
        before: the plan in force.
        after: the next one.
        cluster: every slot of both, with its health.
        lines: the model's.
        workload: for the sizes of parameters and state.
        hardware: for the links.
        memory_bytes: slot -> bytes that it may use; None: unknown.
        in_parts: whether whoever carries it out can change a few axes at a time, and free memory in between.
        pieces: whether pieces are listed one by one; large jobs have millions.

    Raises:
        ValueError: if old and new layout do not fit into memory together.
    """
    parts = count_parts(before, after, lines=lines, workload=workload, memory_bytes=memory_bytes, in_parts=in_parts)
    fetches, lost = _fetches(before, after, cluster, lines)
    numel = axis_unit_numel(lines)
    order = tuple(numel)
    transfers: dict[str, Transfer] = {}
    flows: dict[str, Flow] = {}
    for kind, (sources, wanted, have) in fetches.items():
        if pieces:
            transfers[kind] = fetch(sources, wanted, order, have=have, unit_numel=numel).remote()
            flows[kind] = Flow.of(transfers[kind], numel)
        else:
            flows[kind] = fetch_flow(sources, wanted, order, have, numel)
    moved, seconds = 0, 0.0
    domains = scale_up_domains(cluster, hardware)
    for kind, flow in flows.items():
        width = workload.parameter_bytes if kind == "parameters" else workload.state_bytes
        moved += flow.total_numel * width
        seconds += flow.seconds(hardware, width, domains)
    return Change(transfers=transfers, flows=flows, moved_bytes=moved, seconds=seconds, lost=lost, parts=parts)


def count_parts(
    before: Plan,
    after: Plan,
    *,
    lines: Lines,
    workload: Workload,
    memory_bytes: Mapping[int, int | None],
    in_parts: bool = True,
) -> int:
    """Into how many changes of layout one has to be cut to fit into memory; 0 if nothing changes.

    A new layout is received before the old one is freed. Changing all axes at once may need twice the memory,
    so as many as fit are changed at a time. What is counted is what `change_memory` counts.

    Raises:
        ValueError: if it does not fit; the sentence names the slot and the bytes.
    """
    sizes = _Sizes(before, after, workload)
    used = dict.fromkeys(after.slots, 0)
    numel = axis_unit_numel(lines)
    for axis, size in numel.items():
        sizes.add_old(axis, size, used)
    parts = 0
    extra: dict[int, int] = {}
    freed: dict[int, int] = {}
    for axis, size in numel.items():
        more, less = sizes.change(axis, size)
        if not more and not less:
            continue
        fits = all(_fits(used[slot] + extra.get(slot, 0) + num, memory_bytes[slot]) for slot, num in more.items())
        if parts == 0 or not fits:
            if parts and not in_parts:
                raise ValueError(_too_much(used, extra, more, memory_bytes))
            # A new part: what the one before has replaced is free now.
            for slot, num in freed.items():
                used[slot] += num
            extra, freed = {}, {}
            parts += 1
            if not all(_fits(used[slot] + num, memory_bytes[slot]) for slot, num in more.items()):
                raise ValueError(_too_much(used, extra, more, memory_bytes))
        for slot, num in more.items():
            extra[slot] = extra.get(slot, 0) + num
        for slot, num in less.items():
            freed[slot] = freed.get(slot, 0) + num
    return parts


class _Sizes:
    """Bytes of the layouts of two plans.

    Plans for thousands of slots share mappings between axes and intervals between slots, so what has been counted
    is remembered by identity; both plans keep these objects alive.
    """

    def __init__(self, before: Plan, after: Plan, workload: Workload) -> None:
        self._wire = (workload.parameter_bytes, workload.state_bytes, workload.state_bytes)
        state = workload.state_bytes + workload.accumulation_bytes
        self._pairs = (
            (before.holders, after.holders, workload.parameter_bytes),
            (before.owners, after.owners, state),
            (before.mirrors, after.mirrors, state),
        )
        self._before = before
        self._slots = frozenset(after.slots)
        self._counts: dict[int, dict[int, int]] = {}
        self._changed: dict[tuple[int, int], list[int]] = {}

    def add_old(self, axis: str, unit_numel: int, used: dict[int, int]) -> None:
        """Adds what slots keep of an axis in the plan before, for those that are in ``used``."""
        for old, _, width in self._pairs:
            by_slot = old.by_slot(axis)
            if id(by_slot) not in self._counts:
                self._counts[id(by_slot)] = {slot: count_units(held) for slot, held in by_slot.items() if slot in used}
            size = unit_numel * width
            for slot, units in self._counts[id(by_slot)].items():
                used[slot] += units * size

    def change(self, axis: str, unit_numel: int) -> tuple[dict[int, int], dict[int, int]]:
        """Slot -> bytes that changing the axis takes beside the old; and by how much it then needs more or less."""
        more: dict[int, int] = {}
        after: dict[int, int] = {}
        for (old, new, width), wire in zip(self._pairs, self._wire, strict=True):
            had, have = old.by_slot(axis), new.by_slot(axis)
            for slot in self._differing(had, have):
                was, becomes = had.get(slot, ()), have.get(slot, ())
                # Parameters of what a slot owns or mirrors can be copied from its own master weights.
                here = was if old is self._before.holders else self._state(axis, slot)
                arriving = count_units(subtract(becomes, here)) * wire
                new_bytes = count_units(becomes) * width
                more[slot] = more.get(slot, 0) + (new_bytes + arriving) * unit_numel
                after[slot] = after.get(slot, 0) + (new_bytes - count_units(was) * width) * unit_numel
        return more, after

    def _differing(self, had: Mapping[int, Intervals], have: Mapping[int, Intervals]) -> list[int]:
        """Slots that go on and have something else afterwards."""
        key = (id(had), id(have))
        if key not in self._changed:
            self._changed[key] = [
                slot
                for slot in had.keys() | have.keys()
                if slot in self._slots and differ(had.get(slot, ()), have.get(slot, ()))
            ]
        return self._changed[key]

    def _state(self, axis: str, slot: int) -> Intervals:
        return (*self._before.owners.intervals(axis, slot), *self._before.mirrors.intervals(axis, slot))


def differ(was: Intervals, becomes: Intervals) -> bool:
    """Whether a slot has something else than before, or in another order."""
    return was is not becomes and was != becomes


def _fits(num_bytes: int, limit: int | None) -> bool:
    return limit is None or num_bytes <= limit


def _too_much(
    used: Mapping[int, int], extra: Mapping[int, int], more: Mapping[int, int], memory_bytes: Mapping[int, int | None]
) -> str:
    needed = {slot: used[slot] + extra.get(slot, 0) + num for slot, num in more.items()}
    over = {slot: num - limit for slot, num in needed.items() if (limit := memory_bytes[slot]) is not None}
    slot = max(over, key=lambda slot: (over[slot], -slot))
    limit = memory_bytes[slot] or 0
    return (
        f"slot {slot} needs {needed[slot]} bytes ({needed[slot] / 2**30:.2f} GiB) while old and new layout are both "
        f"there, and may use {limit} ({limit / 2**30:.2f} GiB); change less at a time, or restart from a checkpoint "
        "with a plan from scratch"
    )


def _fetches(
    before: Plan, after: Plan, cluster: Cluster, lines: Lines
) -> tuple[dict[str, tuple[list[Layout], Layout, Layout]], Lost]:
    """Kind -> what `fetch` needs to know: sources, what is wanted, what is in place; and what is lost."""
    live = frozenset(cluster.live)
    owners, mirrors, holders = (
        layout if live.issuperset(before.slots) else layout.restrict(live)
        for layout in (before.owners, before.mirrors, before.holders)
    )
    lost = tuple(lost_intervals(before, live, lines))
    gone = tuple(
        (axis, lo, hi) for axis, first, last in lost for lo, hi in subtract([(first, last)], holders.covered(axis))
    )
    # Most slots keep what they have; those that do are not looked at one by one.
    params = _without(_news(before.holders, after.holders), gone)
    owned = _without(_news(before.owners, after.owners), lost)
    mirrored = _without(_news(before.mirrors, after.mirrors), lost)
    fetches = {
        "parameters": ([owners, mirrors, holders], params, holders),
        "state": ([owners, mirrors], owned, _both(owners, mirrors, owned)),
        "mirrors": ([owners, mirrors], mirrored, _both(owners, mirrors, mirrored)),
    }
    return fetches, lost


def _news(before: Layout, after: Layout) -> Layout:
    """What slots have in the second layout if it is not just what they have in the first."""
    known: dict[tuple[int, int], dict[int, Intervals]] = {}
    cuts: dict[str, Mapping[int, Intervals]] = {}
    for axis, have in after.cuts.items():
        had = before.by_slot(axis)
        key = (id(had), id(have))
        if key not in known:
            known[key] = {slot: held for slot, held in have.items() if differ(had.get(slot, ()), held)}
        cuts[axis] = known[key]
    return Layout(cuts)


def _both(first: Layout, second: Layout, wanted: Layout) -> Layout:
    """What slots have in one of two layouts or in both, as far as they want something of the axis."""
    return Layout(
        {
            axis: {slot: union(first.intervals(axis, slot), second.intervals(axis, slot)) for slot in by_slot}
            for axis, by_slot in wanted.cuts.items()
        }
    )


def _without(layout: Layout, lost: Sequence[tuple[str, int, int]]) -> Layout:
    """A layout less some units, as far as they can be asked for."""
    if not lost:
        return layout
    by_axis: dict[str, list[Interval]] = {}
    for axis, lo, hi in lost:
        by_axis.setdefault(axis, []).append((lo, hi))
    return Layout(
        {axis: _less(by_slot, by_axis[axis]) if axis in by_axis else by_slot for axis, by_slot in layout.cuts.items()}
    )


def _less(by_slot: Mapping[int, Intervals], lost: Iterable[Interval]) -> dict[int, Intervals]:
    gone = tuple(lost)
    return {slot: subtract(intervals, gone) for slot, intervals in by_slot.items()}
