"""Drafts of plans: one for each way to go on, with its memory, its seconds and what it takes to get there.

`nep.planning.search.make` chooses among them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nep.planning.cluster import Cluster
from nep.planning.copies.cuts import CopyCuts, quota_shares
from nep.planning.cost.hardware import scale_up_domains
from nep.planning.cost.memory import Memory
from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.cost.step_time import StepTime, placement_cost, replica_seconds, step_time
from nep.planning.holding.assembly import ExpertAxes, assemble, hold_experts
from nep.planning.holding.dealing import Integers, count_cut, deal_cut, redeal_cut
from nep.planning.holding.lanes import Cuts, batch_choices, form_lanes, hold_dense, make_lanes, share_by_pace
from nep.planning.holding.mirrors import place_mirrors
from nep.planning.holding.replica_cuts import CutsFromScratch, Prices, Slots, Way, adapt_cuts, held_by
from nep.planning.holding.survivors import go_on
from nep.planning.layout import Layout, count_units
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Lane, Plan
from nep.planning.search.changes import NO_CHANGE, Change, find_change
from nep.planning.search.request import PlanRequest
from nep.planning.search.room import Limits, Room
from nep.planning.shapes import parameter_lines

Replicas = tuple[tuple[int, ...], ...]

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
        change: the way to it from the plan in force.
        limited: whether memory had a say in where experts are.
        frugal: whether it is one for after a loss that moves what was lost and little more.
        allowed: whether it may be chosen; otherwise it is only shown for comparison.
    """

    name: str
    plan: Plan
    memory: Memory
    time: StepTime
    shares: NDArray[np.float64] | None
    change: Change
    limited: bool
    frugal: bool = False
    allowed: bool = True

    def seconds(self, steps: int) -> float:
        """To get there and take so many steps."""
        return self.change.seconds + steps * self.time.total


class NothingNew(Exception):
    """A draft would be like another one, which is named."""


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
        self.room = Room(request, self.cluster, experts, self.loads)
        self._costs: dict[tuple[int, int, bool], PlacementCost] = {}

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
        self,
        name: str,
        replicas: Replicas,
        *,
        width: int = 1,
        way: Way = "cut",
        current: Plan | None = None,
        unlike: Sequence[Draft] = (),
    ) -> Draft:
        """Experts placed anew; with a plan in force such that few units change slots.

        Args:
            name: of the draft.
            replicas: slots of each.
            width: most slots of a lane.
            way: how experts may be placed.
            current: the plan in force.
            unlike: drafts that it should differ from.

        Raises:
            ValueError: if it does not fit into memory.
            NothingNew: if it is like one of the others.
        """
        prices = self.prices(replicas, width)
        batch = self.request.workload.global_batch_size
        lanes = make_lanes(form_lanes(replicas, width, self.domains), self.speeds_ppm, batch)
        slots_of = [lane.slots for lane in lanes]
        dense = hold_dense(lanes, self.speeds_ppm, self.lines)
        holders = None if current is None else current.holders

        def build(limits: Limits | None) -> Plan:
            scratch = CutsFromScratch(prices, limits, way=way)
            cuts = hold_experts(self.experts, replicas, [scratch.deal(replica, holders) for replica in replicas])
            for other in unlike:
                if [lane.slots for lane in other.plan.lanes] == slots_of and _holds(other.plan, cuts):
                    raise NothingNew(other.name)
            return assemble(
                replicas=replicas,
                lanes=lanes,
                cuts=dense | cuts,
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
                cut=self.request.limits.fractions,
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
        copied, cut = self.forms(current)
        shares = self._quota_shares(current) if copied and not cut else None
        return self._fitted(name, lambda _: plan, current, lambda: shares)

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
            ValueError: if it does not fit into memory, or nothing moves.
        """
        request = self.request
        width = max(len(lane.slots) for lane in base.lanes)
        batch = request.workload.global_batch_size
        lanes = make_lanes(form_lanes(replicas, width, self.domains), self.speeds_ppm, batch)
        dense = hold_dense(lanes, self.speeds_ppm, self.lines)
        largest = max(len(replica) for replica in replicas)
        cuts = [base.holders.by_slot(axis) for axis in self.experts.names]

        def build(limits: Limits | None) -> Plan:
            dealt = adapt_cuts(
                base.holders,
                replicas,
                self.prices(replicas, width),
                unit_s=self._unit_s(largest),
                budget=budget,
                limits=limits,
            )
            if replicas == base.replicas and all(
                by_slot.get(slot, ()) is held
                for slots, layers in zip(replicas, dealt, strict=True)
                for by_slot, of_layer in zip(cuts, layers, strict=True)
                for slot, held in zip(slots, of_layer, strict=True)
            ):
                raise ValueError("no move pays for itself")
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

    def _quota_shares(self, plan: Plan) -> NDArray[np.float64]:
        """`_shares` of the copies of a plan."""
        experts = self.experts
        cuts = [
            count_cut(held_by(plan.holders, experts, slots), experts.num_experts, experts.units_per_expert)
            for slots in plan.replicas
        ]
        return self._shares(plan.replicas, cuts)

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

    def _fitted(
        self,
        name: str,
        build: Callable[[Limits | None], Plan],
        current: Plan | None,
        shares_of: Callable[[], NDArray[np.float64] | None] = lambda: None,
    ) -> Draft:
        """Builds a plan, and again with less room for experts where it needs too much memory."""
        limits: Limits | None = None
        plan = build(None)
        memory = self.room.step(plan, shares_of())
        for attempt in range(_MEMORY_ROUNDS):
            if self.room.is_enough(memory):
                break
            limits = self.room.limits(plan, memory, limits, attempt)
            try:
                another = build(limits)
            except ValueError as error:
                raise ValueError(f"{self.room.too_small(plan, memory)} ({error})") from error
            if another.holders == plan.holders:
                raise ValueError(self.room.too_small(plan, memory))
            plan = another
            memory = self.room.step(plan, shares_of())
        else:
            raise ValueError(self.room.too_small(plan, memory))
        return self._finish(name, plan, memory, current, shares_of(), limits is not None)

    def _finish(
        self,
        name: str,
        plan: Plan,
        memory: Memory,
        current: Plan | None,
        shares: NDArray[np.float64] | None,
        limited: bool,
    ) -> Draft:
        """A draft of a plan that fits: with its times and the way to it."""
        request, change = self.request, NO_CHANGE
        if current is not None:
            change = find_change(
                current,
                plan,
                cluster=self.cluster,
                lines=self.lines,
                workload=request.workload,
                hardware=request.hardware,
                memory_bytes=self.room.bytes,
                in_parts=request.limits.change_in_parts,
            )
        time, plan = self._time(plan, shares)
        if current is not None and plan.number == current.number:  # kept: a new one only if something is new
            plan = current if plan == current else replace(plan, number=current.number + 1)
        return Draft(name=name, plan=plan, memory=memory, time=time, shares=shares, change=change, limited=limited)

    def _time(self, plan: Plan, shares: NDArray[np.float64] | None) -> tuple[StepTime, Plan]:
        """The plan with the fastest way to share its batch; the plan itself if none is faster."""
        request = self.request

        def paced(lanes: tuple[Lane, ...]) -> tuple[tuple[float, ...], Plan]:
            other = plan if lanes == plan.lanes else replace(plan, lanes=lanes)
            seconds = replica_seconds(
                other,
                shape=request.shape,
                workload=request.workload,
                cluster=self.cluster,
                hardware=request.hardware,
                loads=self.loads,
                shares=shares,
            )
            return seconds, other

        best = min((paced(lanes) for lanes in batch_choices(plan.lanes, self.speeds_ppm)), key=_slowest)
        # Replicas that are cut differently keep another pace: share by what was predicted, as long as that helps.
        for _ in range(_PACE_ROUNDS if len(plan.replicas) > 1 else 0):
            lanes = share_by_pace(best[1].lanes, best[0])
            better = paced(lanes) if lanes != best[1].lanes else best
            if _slowest(better) >= _slowest(best):
                break
            best = better
        time = step_time(
            best[1],
            shape=request.shape,
            workload=request.workload,
            cluster=self.cluster,
            hardware=request.hardware,
            loads=self.loads,
            shares=shares,
        )
        return time, best[1]


def _holds(plan: Plan, cuts: Cuts) -> bool:
    """Whether slots hold just that of some axes."""
    held = {axis: {slot: units for slot, units in by_slot.items() if units} for axis, by_slot in cuts.items()}
    return all(plan.holders.by_slot(axis) == by_slot for axis, by_slot in held.items())


def _slowest(paced: tuple[tuple[float, ...], Plan]) -> float:
    return max(paced[0])
