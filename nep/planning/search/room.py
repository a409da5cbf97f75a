"""Room for a plan in the memory of its slots: what its step needs, and what to do where that is too much."""

from collections.abc import Mapping
from math import ceil

from nep.planning.cluster import Cluster
from nep.planning.cost.held import Floats
from nep.planning.cost.memory import Memory, expert_unit_bytes, expert_units_limit, step_memory
from nep.planning.holding.assembly import ExpertAxes
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.search.request import PlanRequest

Limits = Mapping[int, int]
"""slot -> units of experts, over all layers, that it has memory for."""


class DoesNotFit(ValueError):
    """A slot has too little memory.

    Attributes:
        short: which slot, and by how much: enough where several ways are listed.
        missing_bytes: so many bytes too little.
    """

    def __init__(self, message: str, short: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.short, self.missing_bytes = short, missing_bytes


class Room:
    """The memory of a cluster's slots for one request.

    Attributes:
        bytes: slot -> bytes that a plan may use of it; None if its memory is unknown.
    """

    def __init__(self, request: PlanRequest, cluster: Cluster, experts: ExpertAxes, loads: ExpertLoads) -> None:
        self._request, self._experts, self._loads = request, experts, loads
        self._sizes = {
            slot.index: slot.memory_bytes if slot.memory_bytes is not None else request.hardware.memory_bytes
            for slot in cluster.slots
        }
        share = request.limits.memory_share
        self.bytes = {slot: None if size is None else int(size * share) for slot, size in self._sizes.items()}

    def size(self, slot: int) -> int | None:
        """Bytes of all the memory of a slot; None if unknown."""
        return self._sizes[slot]

    def step(self, plan: Plan, shares: Floats | None = None) -> Memory:
        """What a step of the plan needs."""
        request = self._request
        return step_memory(plan, shape=request.shape, workload=request.workload, loads=self._loads, shares=shares)

    def is_enough(self, memory: Memory) -> bool:
        """Whether it has that."""
        return not memory.excess(self.bytes)

    def limits(self, plan: Plan, memory: Memory, before: Limits | None, attempt: int) -> Limits:
        """Room for experts on each slot, for another try after a plan that needed too much.

        Args:
            plan: the one that needed too much.
            memory: what it needed.
            before: limits that it kept to.
            attempt: how many tries there were before it.

        Raises:
            ValueError: if a slot has no room even without any experts.
        """
        unit_bytes = expert_unit_bytes(
            self._request.shape,
            self._request.workload,
            num_replicas=len(plan.replicas),
            mirrored=plan.redundancy == "device",
        )
        excess = memory.excess(self.bytes)
        limits: dict[int, int] = {}
        for slot in plan.slots:
            held = sum(plan.holders.num_units(axis, slot) for axis in self._experts.names)
            limit_bytes = self.bytes[slot]
            if limit_bytes is None:
                limits[slot] = self._experts.num_units
                continue
            limit = expert_units_limit(memory, slot, limit_bytes, held_units=held, unit_bytes=unit_bytes)
            if slot in excess:
                # What is not in proportion to the experts follows them too; so a little more each time.
                limit = min(limit, held - ceil(excess[slot] * (1 + attempt / 4) / unit_bytes))
                limit = min(limit, before[slot]) if before is not None else limit
            if limit < 0:
                raise self.too_small(plan, memory)
            limits[slot] = min(limit, self._experts.num_units)
        return limits

    def too_small(self, plan: Plan, memory: Memory, why: str = "") -> DoesNotFit:
        """What is missing, and what to do about it.

        Args:
            plan: the one that needs too much.
            memory: what it needs.
            why: what kept experts from going elsewhere.
        """
        excess = memory.excess(self.bytes)
        slot = max(excess, key=lambda slot: (excess[slot], -slot))
        kinds = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in memory.by_slot[slot].items() if size)
        replica, limit, needed = plan.replica_of(slot), self.bytes[slot] or 0, memory.total(slot)
        may_use = f"may use {limit} ({limit / 2**30:.2f} GiB)"
        return DoesNotFit(
            f"replicas[{replica}] of {len(plan.replicas[replica])} slots cannot hold {self._request.shape.name}: slot "
            f"{slot} needs {needed} bytes ({needed / 2**30:.2f} GiB: {kinds}) and {may_use}; add slots, use fewer "
            f"replicas, a smaller micro-batch or recomputation, or other redundancy{why}",
            f"slot {slot} needs {needed} bytes ({needed / 2**30:.2f} GiB) and {may_use}{why}",
            excess[slot],
        )
