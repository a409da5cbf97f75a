"""Drafts of plans: one for each way to go on, with its memory, its seconds and what it takes to get there.

`nep.planning.search.ways` makes them and `nep.planning.search.make` chooses among them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nep.planning.cost.hardware import scale_up_domains
from nep.planning.cost.known_times import KnownTimes
from nep.planning.cost.memory import Memory
from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.cost.step_time import StepTime, placement_cost
from nep.planning.holding.assembly import ExpertAxes
from nep.planning.holding.replica_cuts import Prices, Slots
from nep.planning.layout import axes, count_units
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.search.changes import NO_CHANGE, Change, find_change
from nep.planning.search.pace import at_best_pace
from nep.planning.search.request import PlanRequest
from nep.planning.search.room import Limits, Room
from nep.planning.shapes import parameter_lines

EVERY_WAY = 50_000
"""Pairs of slot and axis up to which every way is worked out, to be compared in the report, piece by piece."""

Replicas = tuple[tuple[int, ...], ...]

_MEMORY_ROUNDS = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class Draft:
    """A plan that could be.

    Attributes:
        name: of the way it was made.
        plan: the plan.
        memory: what its step needs.
        time: of its step.
        shares: see `step_time`; None without expert copies.
        find_change: finds the way to it from the plan in force; a ValueError says that memory has no room for it.
        limited: whether memory had a say in where experts are.
        frugal: whether it is one for after a loss that moves what was lost and little more.
        allowed: whether it may be chosen; otherwise it is only shown for comparison.
    """

    name: str
    plan: Plan
    memory: Memory
    time: StepTime
    shares: NDArray[np.float64] | None
    find_change: Callable[[], Change]
    limited: bool
    frugal: bool = False
    allowed: bool = True

    @cached_property
    def change(self) -> Change:
        """The way to it. In a large job that is most of the work, so it is looked for where it can matter.

        Raises:
            ValueError: if old and new layout do not fit into memory together.
        """
        return self.find_change()

    @property
    def has_change(self) -> bool:
        """Whether the way to it has been looked for."""
        return "change" in self.__dict__

    def least_seconds(self, steps: int) -> float:
        """To take so many steps, if getting there were free."""
        return steps * self.time.total

    def seconds(self, steps: int) -> float:
        """To get there and take so many steps."""
        return self.change.seconds + self.least_seconds(steps)


class NothingNew(Exception):
    """A draft would be like another one, which is named."""


class Drafter:
    """Makes drafts for one request.

    Args:
        request: what is asked.
        tell: is told what is being worked on.
    """

    def __init__(self, request: PlanRequest, tell: Callable[[str], None] = lambda _: None) -> None:
        self.request, self.tell = request, tell
        self.cluster = request.cluster
        self.lines = parameter_lines(request.shape)
        experts = ExpertAxes.of(self.lines)
        assert experts is not None  # a model shape has experts
        self.experts = experts
        self.loads = request.loads or ExpertLoads.uniform(len(experts.names), experts.num_experts)
        self.domains = scale_up_domains(self.cluster, request.hardware)
        self.speeds_ppm = self.cluster.speeds_ppm
        self.room = Room(request, self.cluster, experts, self.loads)
        self.known_times = KnownTimes()
        self._costs: dict[tuple[int, int, float], PlacementCost] = {}

    @property
    def is_large(self) -> bool:
        """Whether only ways are worked out that may win, and only sums of what travels."""
        return len(self.cluster.healthy) * len(axes(self.lines)) > EVERY_WAY

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
            far = far_rows([self.domains[slot] for slot in slots])
            key = (len(replicas), lanes, far)
            if key not in self._costs:
                self._costs[key] = placement_cost(
                    self.request.shape,
                    self.request.workload,
                    self.request.hardware,
                    num_replicas=len(replicas),
                    lanes=lanes,
                    crosses_domains=far > 0,
                    far_rows=far,
                )
            cost = self._costs[key]
            return replace(cost, tokens=cost.tokens * len(replicas) * speed / total)

        return Prices(experts=self.experts, loads=self.loads, speeds_ppm=self.speeds_ppm, cost_of=cost_of)

    # Drafts.

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

    def unit_s(self, num_slots: int) -> float:
        """Seconds per step that moving a unit must gain to pay within the horizon.

        Its parameters and, one after the other, its state and mirror travel; slots send at the same time.
        """
        request = self.request
        numel = 3 * request.shape.neuron_block * request.shape.hidden_size
        mirrors = 1 + (request.redundancy == "device")
        num_bytes = numel * (request.workload.parameter_bytes + mirrors * request.workload.state_bytes)
        price = max(request.hardware.scale_up.seconds_per_byte, request.hardware.network.seconds_per_byte)
        return num_bytes * price / num_slots / max(request.horizon_steps, 1)

    def fitted(
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
                raise self.room.too_small(plan, memory, f" ({str(error).split(';')[0]})") from error
            if another.holders == plan.holders:
                raise self.room.too_small(plan, memory)
            plan = another
            memory = self.room.step(plan, shares_of())
        else:
            raise self.room.too_small(plan, memory)
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
        request, cluster = self.request, self.cluster

        def find() -> Change:
            if current is None:
                return NO_CHANGE
            return find_change(
                current,
                plan,
                cluster=cluster,
                lines=self.lines,
                workload=request.workload,
                hardware=request.hardware,
                memory_bytes=self.room.bytes,
                in_parts=request.limits.change_in_parts,
                pieces=not self.is_large,
            )

        time, paced = at_best_pace(plan, request, cluster, self.loads, shares, self.known_times)
        if current is not None and paced.number == current.number:  # kept: a new one only if something is new
            paced = current if paced == current else replace(paced, number=current.number + 1)
        return Draft(name=name, plan=paced, memory=memory, time=time, shares=shares, find_change=find, limited=limited)


def far_rows(domains: Sequence[int]) -> float:
    """Part of the rows of a replica's slots that come from other domains; tokens are everywhere, so are their rows."""
    sizes = Counter(domains)
    return 1 - sum(size * size for size in sizes.values()) / len(domains) ** 2
