"""Drafts of plans: one for each way to go on, with its memory, its seconds and what it takes to get there.

`nep.planning.search` chooses among them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from nep.planning.assembly import ExpertAxes, assemble, hold_experts
from nep.planning.cluster import Cluster
from nep.planning.copy_cuts import CopyCuts, quota_shares
from nep.planning.cost_model import StepTime, placement_cost, step_time, transfer_seconds
from nep.planning.costs import PlacementCost
from nep.planning.dealing import Integers, deal_cut, redeal_cut
from nep.planning.hardware import scale_up_domains
from nep.planning.intervals import Interval, Intervals, subtract, union
from nep.planning.lanes import batch_choices, form_lanes, hold_dense, make_lanes, share_by_pace
from nep.planning.layout import Layout, axis_unit_numel, count_units
from nep.planning.loads import ExpertLoads
from nep.planning.memory_model import (
    Memory,
    change_memory,
    expert_unit_bytes,
    expert_units_limit,
    step_memory,
)
from nep.planning.mirrors import place_mirrors
from nep.planning.plan import Lane, Plan
from nep.planning.planner import lost_intervals
from nep.planning.replica_cuts import CutsFromScratch, Prices, Slots, adapt_cuts, held_by
from nep.planning.request import PlanRequest
from nep.planning.shapes import parameter_lines
from nep.planning.survivors import go_on
from nep.planning.transfer import Transfer, fetch

Replicas = tuple[tuple[int, ...], ...]
Limits = Mapping[int, int]
"""slot -> units of experts, over all layers, that it has memory for."""

_MEMORY_ROUNDS = 8
_PACE_ROUNDS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Draft:
    """A plan that could be.

    Attributes:
        name: of the way it was made.
        plan: the plan.
        memory: what its step needs.
        time: of its step.
        shares: see `step_time`; None without expert copies.
        transfers: from the plan in force to it, by kind.
        moved_bytes: their bytes.
        move_s: their seconds.
        lost: ``(axis, lo, hi)`` whose state nobody has any more.
        limited: whether memory had a say in where experts are.
    """

    name: str
    plan: Plan
    memory: Memory
    time: StepTime
    shares: NDArray[np.float64] | None
    transfers: Mapping[str, Transfer]
    moved_bytes: int
    move_s: float
    lost: tuple[tuple[str, int, int], ...]
    limited: bool


class Drafter:
    """Makes drafts for one request.

    Args:
        request: what is asked.
        cluster: the slots to plan for; by default those of the request.
    """

    def __init__(self, request: PlanRequest, cluster: Cluster | None = None) -> None:
        self.request = request
        self.cluster = cluster or request.cluster
        self.lines = parameter_lines(request.shape)
        experts = ExpertAxes.of(self.lines)
        assert experts is not None  # a model shape has experts
        self.experts = experts
        self.loads = request.loads or ExpertLoads.uniform(len(experts.names), experts.num_experts)
        self.domains = scale_up_domains(self.cluster, request.hardware)
        self.speeds_ppm = self.cluster.speeds_ppm
        self._slot_memory = {slot.index: slot.memory_bytes for slot in self.cluster.slots}
        self.memory_bytes = {
            slot.index: None
            if (size := self.memory_size(slot.index)) is None
            else int(size * request.limits.memory_share)
            for slot in self.cluster.slots
        }
        self._costs: dict[tuple[int, int, bool], PlacementCost] = {}

    def memory_size(self, slot: int) -> int | None:
        """Bytes of a slot's memory, or None if unknown."""
        known = self._slot_memory[slot]
        return known if known is not None else self.request.hardware.memory_bytes

    # What placement goes by.

    def prices(self, replicas: Replicas, width: int = 1) -> Prices:
        """Prices in each of these replicas, which share the batch by speed.

        Args:
            replicas: of the plan.
            width: slots of a lane.
        """
        total = sum(self.speeds_ppm[slot] for replica in replicas for slot in replica)

        def cost_of(slots: Slots) -> PlacementCost:
            speed = sum(self.speeds_ppm[slot] for slot in slots)
            lanes = max(1, len(slots) // width)
            crosses = len({self.domains[slot] for slot in slots}) > 1
            key = (len(replicas), lanes, crosses)
            if key not in self._costs:
                self._costs[key] = placement_cost(
                    self.request.shape,
                    self.request.workload,
                    self.request.hardware,
                    num_replicas=len(replicas),
                    lanes=lanes,
                    crosses_domains=crosses,
                )
            cost = self._costs[key]
            return replace(cost, tokens=cost.tokens * len(replicas) * speed / total)

        return Prices(experts=self.experts, loads=self.loads, speeds_ppm=self.speeds_ppm, cost_of=cost_of)

    # Drafts.

    def from_scratch(
        self, name: str, replicas: Replicas, *, width: int = 1, cut: bool = True, current: Plan | None = None
    ) -> Draft:
        """Experts placed anew; with a plan in force such that few units change slots.

        Args:
            name: of the draft.
            replicas: slots of each.
            width: most slots of a lane.
            cut: whether experts may be cut.
            current: the plan in force.

        Raises:
            ValueError: if it does not fit into memory.
        """
        prices = self.prices(replicas, width)
        batch = self.request.workload.global_batch_size
        lanes = make_lanes(form_lanes(replicas, width, self.domains), self.speeds_ppm, batch)
        dense = hold_dense(lanes, self.speeds_ppm, self.lines)
        holders = None if current is None else current.holders

        def build(limits: Limits | None) -> Plan:
            scratch = CutsFromScratch(prices, limits, cut=cut)
            dealt = [scratch.deal(replica, holders) for replica in replicas]
            return assemble(
                replicas=replicas,
                lanes=lanes,
                cuts=dense | hold_experts(self.experts, replicas, dealt),
                cluster=self.cluster,
                lines=self.lines,
                redundancy=self.request.redundancy,
                current=current,
            )

        return self._fitted(name, build, current)

    def survivors(self, name: str, replicas: Replicas, current: Plan) -> Draft:
        """What is left of replicas keeps what it has and takes over what was lost.

        Raises:
            ValueError: if it does not fit into memory.
        """

        def build(limits: Limits | None) -> Plan:
            return go_on(
                current,
                replicas,
                cluster=self.cluster,
                lines=self.lines,
                prices=self.prices(replicas),
                global_batch_size=self.request.workload.global_batch_size,
                redundancy=self.request.redundancy,
                limits=limits,
            )

        return self._fitted(name, build, current)

    def kept(self, name: str, current: Plan) -> Draft:
        """The plan in force, with its batch shared out by the speeds of now. It is the very plan if nothing changes.

        Raises:
            ValueError: if it does not fit into memory.
        """
        request = self.request
        lanes = current.lanes
        if current.global_batch_size != request.workload.global_batch_size:
            places = [(lane.replica, lane.slots) for lane in lanes]
            lanes = make_lanes(places, self.speeds_ppm, request.workload.global_batch_size)
        plan = replace(
            current,
            lanes=lanes,
            redundancy=request.redundancy,
            mirrors=current.mirrors if request.redundancy != "none" else Layout({}),
            speeds_ppm=tuple(self.speeds_ppm[slot] for slot in current.slots),
        )
        plan = replace(plan, mirrors=place_mirrors(plan, self.cluster, self.lines))
        return self._fitted(name, lambda _: plan, current)

    def forms(self, plan: Plan) -> tuple[bool, bool]:
        """Whether a plan has expert copies, and whether it has slices of experts."""
        size = self.experts.units_per_expert
        copied = cut = False
        for axis in self.experts.names:
            by_slot = plan.holders.by_slot(axis)
            cut = cut or any(lo % size or hi % size for held in set(by_slot.values()) for lo, hi in held)
            units = sum(count_units(held) for held in by_slot.values())
            copied = copied or units > len(plan.replicas) * size * self.experts.num_experts
        return copied, cut

    def adapted(self, name: str, replicas: Replicas, base: Plan, current: Plan, *, budget: float = 1.0) -> Draft:
        """A plan that grew out of another one by the moves that pay.

        Args:
            name: of the draft.
            replicas: those of the base, with slots that have come, which hold nothing yet.
            base: the plan in force, or what its survivors make of it.
            current: the plan in force.
            budget: part of a replica's units that may move.

        Raises:
            ValueError: if it does not fit into memory.
        """
        request = self.request
        width = max(len(lane.slots) for lane in base.lanes)
        batch = request.workload.global_batch_size
        lanes = make_lanes(form_lanes(replicas, width, self.domains), self.speeds_ppm, batch)
        dense = hold_dense(lanes, self.speeds_ppm, self.lines)
        largest = max(len(replica) for replica in replicas)

        def build(limits: Limits | None) -> Plan:
            dealt = adapt_cuts(
                base.holders,
                replicas,
                self.prices(replicas, width),
                unit_s=self._unit_s(largest),
                budget=budget,
                limits=limits,
            )
            return assemble(
                replicas=replicas,
                lanes=lanes,
                cuts=dense | hold_experts(self.experts, replicas, dealt),
                cluster=self.cluster,
                lines=self.lines,
                redundancy=request.redundancy,
                current=current,
            )

        return self._fitted(name, build, current)

    def copied(self, name: str, replicas: Replicas, current: Plan | None = None, *, adapt: bool = False) -> Draft:
        """Whole experts, some of them on several slots.

        Args:
            name: of the draft.
            replicas: slots of each.
            current: the plan in force.
            adapt: whether copies grow out of those of the plan in force, whose replicas these are a part of.

        Raises:
            ValueError: if it does not fit into memory, or has nothing to grow out of.
        """
        number = self.request.limits.physical_experts
        assert number is not None
        batch, size = self.request.workload.global_batch_size, self.experts.units_per_expert
        lanes = make_lanes(form_lanes(replicas, 1, self.domains), self.speeds_ppm, batch)
        dense = hold_dense(lanes, self.speeds_ppm, self.lines)
        prices = self.prices(replicas)
        cuts: list[Integers] = []

        def build(limits: Limits | None) -> Plan:
            copies = CopyCuts(prices, number, self.cluster.domains, limits)
            cuts.clear()
            dealt = []
            for replica in replicas:
                held = None if current is None else held_by(current.holders, self.experts, replica)
                cut = self._adapted_copies(copies, replica, current) if adapt else copies.scratch(replica)
                cuts.append(cut)
                dealt.append(deal_cut(cut, size) if held is None else redeal_cut(cut, held, size))
            return assemble(
                replicas=replicas,
                lanes=lanes,
                cuts=dense | hold_experts(self.experts, replicas, dealt),
                cluster=self.cluster,
                lines=self.lines,
                redundancy=self.request.redundancy,
                current=current,
            )

        return self._fitted(name, build, current, lambda: self._shares(replicas, cuts))

    def _adapted_copies(self, copies: CopyCuts, replica: Slots, current: Plan | None) -> Integers:
        assert current is not None
        before = current.replicas[current.replica_of(replica[0])]
        lost = [slot for slot in before if slot not in replica]
        held = held_by(current.holders, self.experts, before)
        # A layer's experts at perfect balance take about as long as their tokens do, shared out over the slots.
        cost = self.prices((tuple(replica),)).cost_of(replica)
        layer_s = cost.token_s * cost.tokens / len(replica)
        copy_s = self._unit_s(len(replica)) * self.experts.units_per_expert
        cut = copies.adapt(before, lost, held, min(1.0, copy_s / layer_s) if layer_s > 0 else 0.0)
        if cut is None:
            raise ValueError("experts are cut in the plan in force, or slots have more copies than they may")
        return cut

    def _shares(self, replicas: Replicas, cuts: Sequence[Integers]) -> NDArray[np.float64]:
        """Parts of each expert's tokens that go to each slot, ``[layers, experts, slots of the plan]``."""
        slots = sorted(slot for replica in replicas for slot in replica)
        place = {slot: index for index, slot in enumerate(slots)}
        shares = np.zeros((*self.loads.mean.shape, len(slots)))
        for replica, cut in zip(replicas, cuts, strict=True):
            speeds = [self.speeds_ppm[slot] for slot in replica]
            shares[:, :, [place[slot] for slot in replica]] = quota_shares(cut, self.loads, speeds)
        return shares

    def _unit_s(self, num_slots: int) -> float:
        """Seconds per step that moving a unit must gain to pay within the horizon.

        Its parameters and, one after the other, its state and mirror travel; slots send at the same time.
        """
        request = self.request
        numel = 3 * request.shape.neuron_block * request.shape.hidden_size
        mirrors = 1 + (request.redundancy == "device")
        num_bytes = numel * (request.workload.parameter_bytes + mirrors * request.workload.state_bytes)
        price = max(request.hardware.scale_up.seconds_per_byte, request.hardware.network.seconds_per_byte)
        return num_bytes * price / num_slots / max(request.horizon_steps, 1)

    def _finish(
        self,
        name: str,
        plan: Plan,
        memory: Memory,
        current: Plan | None,
        shares: NDArray[np.float64] | None,
        limited: bool,
    ) -> Draft:
        """A draft of a plan that fits: with its times and transfers."""
        request = self.request
        transfers, lost = ({}, ()) if current is None else self.transfers(current, plan)
        moved, seconds = 0, 0.0
        for kind, transfer in transfers.items():
            width = request.workload.parameter_bytes if kind == "parameters" else request.workload.state_bytes
            moved += transfer.num_bytes(self.lines, width)
            seconds += transfer_seconds(
                transfer, lines=self.lines, bytes_per_element=width, cluster=self.cluster, hardware=request.hardware
            )
        time, plan = self._time(plan, shares)
        if current is not None and plan.number == current.number:  # kept: a new one only if something is new
            plan = current if plan == current else replace(plan, number=current.number + 1)
        return Draft(
            name=name,
            plan=plan,
            memory=memory,
            time=time,
            shares=shares,
            transfers=transfers,
            moved_bytes=moved,
            move_s=seconds,
            lost=lost,
            limited=limited,
        )

    # Memory.

    def _fitted(
        self,
        name: str,
        build: Callable[[Limits | None], Plan],
        current: Plan | None,
        shares_of: Callable[[], NDArray[np.float64] | None] = lambda: None,
    ) -> Draft:
        """Builds a plan, and again with less room for experts where it needs too much memory."""
        limits: dict[int, int] | None = None
        plan = build(limits)
        memory = self._step_memory(plan, shares_of())
        for attempt in range(_MEMORY_ROUNDS):
            excess = memory.excess(self.memory_bytes)
            if not excess:
                break
            limits = self._tightened(plan, memory, excess, limits, attempt)
            if limits is None:
                raise ValueError(self.too_large(plan, memory))
            before = plan.holders
            try:
                plan = build(limits)
            except ValueError as error:
                raise ValueError(f"{self.too_large(plan, memory)} ({error})") from error
            if plan.holders == before:
                raise ValueError(self.too_large(plan, memory))
            memory = self._step_memory(plan, shares_of())
        else:
            raise ValueError(self.too_large(plan, memory))
        if current is not None:
            self._require_room_to_change(current, plan)
        return self._finish(name, plan, memory, current, shares_of(), limits is not None)

    def _require_room_to_change(self, current: Plan, plan: Plan) -> None:
        """A change of layout needs room for the old and the new one."""
        memory = change_memory(current, plan, shape=self.request.shape, workload=self.request.workload)
        excess = {slot: size for slot, size in memory.excess(self.memory_bytes).items() if slot in plan.slots}
        if excess:
            slot = max(excess, key=lambda slot: (excess[slot], -slot))
            limit = self.memory_bytes[slot] or 0
            raise ValueError(
                f"slot {slot} needs {memory.total(slot)} bytes ({memory.total(slot) / 2**30:.2f} GiB) while old and "
                f"new layout are both there, and may use {limit} ({limit / 2**30:.2f} GiB); change less at a time, "
                "or restart from a checkpoint with a plan from scratch"
            )

    def _step_memory(self, plan: Plan, shares: NDArray[np.float64] | None = None) -> Memory:
        request = self.request
        return step_memory(plan, shape=request.shape, workload=request.workload, loads=self.loads, shares=shares)

    def _tightened(
        self,
        plan: Plan,
        memory: Memory,
        excess: Mapping[int, int],
        before: Limits | None,
        attempt: int,
    ) -> dict[int, int] | None:
        """Room for experts on each slot; None if a slot has no room even without any."""
        unit_bytes = expert_unit_bytes(
            self.request.shape,
            self.request.workload,
            num_replicas=len(plan.replicas),
            mirrored=plan.redundancy == "device",
        )
        limits: dict[int, int] = {}
        for slot in plan.slots:
            held = sum(plan.holders.num_units(axis, slot) for axis in self.experts.names)
            limit_bytes = self.memory_bytes[slot]
            if limit_bytes is None:
                limits[slot] = self.experts.num_units
                continue
            limit = expert_units_limit(memory, slot, limit_bytes, held_units=held, unit_bytes=unit_bytes)
            if slot in excess:
                # What is not in proportion to the experts follows them too; so a little more each time.
                limit = min(limit, held - ceil(excess[slot] * (1 + attempt / 4) / unit_bytes))
                if limit < 0:
                    return None
            limits[slot] = min(limit, self.experts.num_units)
            if before is not None:
                limits[slot] = min(limits[slot], before[slot]) if slot in excess else limits[slot]
        return limits

    def too_large(self, plan: Plan, memory: Memory) -> str:
        """What to do about a plan that needs more memory than there is."""
        excess = memory.excess(self.memory_bytes)
        slot = max(excess, key=lambda slot: (excess[slot], -slot))
        kinds = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in memory.by_slot[slot].items() if size)
        replica = plan.replica_of(slot)
        limit = self.memory_bytes[slot] or 0
        return (
            f"replicas[{replica}] of {len(plan.replicas[replica])} slots cannot hold {self.request.shape.name}: slot "
            f"{slot} needs {memory.total(slot)} bytes ({memory.total(slot) / 2**30:.2f} GiB: {kinds}) and may use "
            f"{limit} ({limit / 2**30:.2f} GiB); add slots, use fewer replicas, a smaller micro-batch or "
            "recomputation, or other redundancy"
        )

    def _time(self, plan: Plan, shares: NDArray[np.float64] | None) -> tuple[StepTime, Plan]:
        """The plan with the fastest way to share its batch; the plan itself if none is faster."""

        def timed(lanes: tuple[Lane, ...]) -> tuple[StepTime, Plan]:
            other = plan if lanes == plan.lanes else replace(plan, lanes=lanes)
            time = step_time(
                other,
                shape=self.request.shape,
                workload=self.request.workload,
                cluster=self.cluster,
                hardware=self.request.hardware,
                loads=self.loads,
                shares=shares,
            )
            return time, other

        best = min((timed(lanes) for lanes in batch_choices(plan.lanes, self.speeds_ppm)), key=_total)
        # Replicas that are cut differently keep another pace: share by what was predicted, as long as that helps.
        for _ in range(_PACE_ROUNDS if len(plan.replicas) > 1 else 0):
            better = timed(share_by_pace(best[1].lanes, best[0].replica_seconds))
            if better[0].total >= best[0].total:
                break
            best = better
        return best

    def transfers(self, current: Plan, plan: Plan) -> tuple[dict[str, Transfer], tuple[tuple[str, int, int], ...]]:
        """What has to travel from one plan to the next, and the state that nobody has any more.

        Failed slots give nothing. As in training, parameters that a slot does not hold come from the master
        weights of their owner, else of the mirror; here, at last from another holder, should both be lost.
        """
        live = frozenset(self.cluster.live)
        owners, mirrors = current.owners.restrict(live), current.mirrors.restrict(live)
        holders = current.holders.restrict(live)
        numel = axis_unit_numel(self.lines)
        order = tuple(numel)
        lost = tuple(lost_intervals(current, live, self.lines))
        gone = tuple(
            (axis, lo, hi) for axis, first, last in lost for lo, hi in subtract([(first, last)], holders.covered(axis))
        )
        state = _both(owners, mirrors)
        moves = (
            ("parameters", [owners, mirrors, holders], _without(plan.holders, gone), holders),
            ("state", [owners, mirrors], _without(plan.owners, lost), state),
            ("mirrors", [owners, mirrors], _without(plan.mirrors, lost), state),
        )
        found = {
            kind: fetch(sources, wanted, order, have=have, unit_numel=numel).remote()
            for kind, sources, wanted, have in moves
        }
        return found, lost


def _total(timed: tuple[StepTime, Plan]) -> float:
    return timed[0].total


def _both(first: Layout, second: Layout) -> Layout:
    """What slots have in one of two layouts or in both."""
    cuts: dict[str, dict[int, Intervals]] = {axis: dict(by_slot) for axis, by_slot in first.cuts.items()}
    for axis, by_slot in second.cuts.items():
        cut = cuts.setdefault(axis, {})
        for slot, intervals in by_slot.items():
            cut[slot] = union(cut[slot], intervals) if slot in cut else intervals
    return Layout(cuts)


def _without(layout: Layout, lost: Sequence[tuple[str, int, int]]) -> Layout:
    """A layout less some units, as far as they can be asked for."""
    if not lost:
        return layout
    by_axis: dict[str, list[Interval]] = {}
    for axis, lo, hi in lost:
        by_axis.setdefault(axis, []).append((lo, hi))
    return Layout(
        {
            axis: {slot: subtract(intervals, by_axis[axis]) for slot, intervals in by_slot.items()}
            if axis in by_axis
            else by_slot
            for axis, by_slot in layout.cuts.items()
        }
    )
