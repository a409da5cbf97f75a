"""Predicts the seconds of a training step from a plan, part by part.

A step is what the slots of a plan do between two votes: rounds of forward and backward, gradient sums to
owners, sums to mirrors, vote, optimizer, parameters back. Nothing is taken to overlap unless the workload says
so. Inside a replica the slots are in lock-step: every exchange of rows waits for the last of them, so a layer
costs its busiest slot and the step the sum over layers of that, not the busiest sum. Replicas meet at the
gradients.

What is left out is listed in ``docs/planner-cost-model.md``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from nep.planning.cluster import Cluster
from nep.planning.cost.hardware import HardwareProfile, scale_up_domains
from nep.planning.cost.held import Floats, elements, expert_axes
from nep.planning.cost.kernels import Busy, Kernels
from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.cost.replica_time import ReplicaTime, replica_time, row_bytes
from nep.planning.cost.traffic import grad_traffic, mirror_traffic, transfer_traffic
from nep.planning.cost.workload import Workload
from nep.planning.layout import Lines, axis_lines
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Lane, Plan
from nep.planning.shapes import ModelShape, parameter_lines
from nep.planning.transfer import Transfer

__all__ = ["PARTS", "Binding", "StepTime", "placement_cost", "replica_seconds", "step_time", "transfer_seconds"]

# One record of a slot in the vote.
VOTE_BYTES = 128

PARTS = (
    "expert_gemm",
    "attention",
    "dense",
    "tensor_parallel",
    "dispatch",
    "grad_sync",
    "mirror",
    "optimizer",
    "parameter_return",
    "vote",
)
"""Parts of a step, in order: products of the experts; attention; router and head; collectives of a lane;
dispatch and combine; gradient sums to owners; to mirrors; updates; parameters back to holders; the vote."""


@dataclass(frozen=True)
class Binding:
    """What a part of a step waits for.

    Attributes:
        slot: the slot that takes longest.
        resource: what it spends the time on: ``flops``, ``memory``, ``launches``, a link and its direction, or
            ``latency``.
    """

    slot: int
    resource: str


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of one step.

    Attributes:
        parts: part -> seconds that the step takes for it, i.e. that its busiest slots take; all of `PARTS`.
        by_slot: slot -> part -> seconds that the slot itself is busy with it, hidden or not; the rest it waits.
        binding: part -> the slot and the resource that bind it; only parts that take time.
        replica: index of the slowest replica, whose forward and backward count.
        rounds: forward and backward passes of that replica.
        rows_per_token: rows that one token sends in one layer's dispatch on average, the token's own slot
            included, over all replicas.
        busiest_rows: rows that the busiest slot of a layer receives, over the mean of its replica's slots;
            mean over layers of the worst replica.
        replica_seconds: forward and backward of each replica.
    """

    parts: Mapping[str, float]
    by_slot: Mapping[int, Mapping[str, float]] = field(repr=False)
    binding: Mapping[str, Binding]
    replica: int
    rounds: int
    rows_per_token: float
    busiest_rows: float
    replica_seconds: tuple[float, ...] = ()

    def __getitem__(self, part: str) -> float:
        return self.parts[part]

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def binds(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda part: self.parts[part])


def step_time(
    plan: Plan,
    *,
    shape: ModelShape,
    workload: Workload,
    cluster: Cluster,
    hardware: HardwareProfile,
    loads: ExpertLoads | None = None,
    shares: Floats | None = None,
) -> StepTime:
    """Predicts one step.

    Args:
        plan: who does what.
        shape: the model.
        workload: the step; its global batch must be the plan's.
        cluster: where the plan's slots are. Speeds are the plan's.
        hardware: the accelerator.
        loads: of the MoE layers; None means equal loads.
        shares: [layers, experts, slots], share of an expert's tokens that goes to each of ``plan.slots``; in
            every replica the holders of a unit share it out. None: copies of a unit share evenly.

    Raises:
        ValueError: if plan, model, workload, loads or cluster do not fit each other.
    """
    lines = parameter_lines(shape)
    layers = expert_axes(lines)
    _check(plan, shape, workload, cluster, loads, len(layers))
    domains = scale_up_domains(cluster, hardware)
    popularity = (loads or ExpertLoads.uniform(len(layers), shape.num_experts)).normalised().mean
    replicas = _replica_times(plan, shape, workload, hardware, lines, domains, popularity, shares)
    slowest = max(range(len(replicas)), key=lambda index: (replicas[index].seconds, -index))
    parts = dict.fromkeys(PARTS, 0.0) | dict(replicas[slowest].parts)
    by_slot = {slot: dict.fromkeys(PARTS, 0.0) for slot in plan.slots}
    for replica in replicas:
        for slot, busy in replica.by_slot.items():
            by_slot[slot].update(busy)
    binding = {part: Binding(*bound) for part, bound in replicas[slowest].binding.items()}
    _between_replicas(plan, shape, workload, hardware, lines, domains, parts, by_slot, binding)
    if workload.overlap:
        _overlap(parts, workload, replicas[slowest].rounds, shape.num_layers)
    tokens = sum(replica.tokens for replica in replicas)
    rows = sum(replica.rows_per_token * replica.tokens for replica in replicas)
    return StepTime(
        parts=parts,
        by_slot=by_slot,
        binding={part: bound for part, bound in binding.items() if parts[part] > 0},
        replica=slowest,
        rounds=replicas[slowest].rounds,
        rows_per_token=rows / tokens if tokens else 0.0,
        busiest_rows=max(replica.busiest_rows for replica in replicas),
        replica_seconds=tuple(replica.seconds for replica in replicas),
    )


def replica_seconds(
    plan: Plan,
    *,
    shape: ModelShape,
    workload: Workload,
    cluster: Cluster,
    hardware: HardwareProfile,
    loads: ExpertLoads | None = None,
    shares: Floats | None = None,
) -> tuple[float, ...]:
    """Forward and backward of each replica: all of a step that depends on how the batch is shared.

    Args: as for `step_time`.
    """
    lines = parameter_lines(shape)
    num_layers = len(expert_axes(lines))
    domains = scale_up_domains(cluster, hardware)
    popularity = (loads or ExpertLoads.uniform(num_layers, shape.num_experts)).normalised().mean
    times = _replica_times(plan, shape, workload, hardware, lines, domains, popularity, shares)
    return tuple(time.seconds for time in times)


def placement_cost(
    shape: ModelShape,
    workload: Workload,
    hardware: HardwareProfile,
    *,
    num_replicas: int = 1,
    lanes: int = 1,
    crosses_domains: bool = False,
) -> PlacementCost:
    """The prices of one MoE layer that placing experts depends on, of a replica with an equal share.

    Args:
        shape: the model.
        workload: the step.
        hardware: the accelerator.
        num_replicas: the global batch is shared over them.
        lanes: lanes of a replica; with the micro-batch they tell in how many rounds the batch runs.
        crosses_domains: rows go over the network, since the replica has slots in several scale-up domains.
    """
    if num_replicas < 1 or lanes < 1:
        raise ValueError(f"num_replicas ({num_replicas}) and lanes ({lanes}) must be at least 1")
    sequences = workload.global_batch_size / num_replicas
    rounds = max(1, math.ceil(sequences / lanes / workload.micro_batch_size))
    pairs = sequences * workload.seq_len * shape.top_k
    kernels = Kernels(shape, workload, hardware)

    def seconds(rows: float, units: int) -> float:
        busy = kernels.experts(np.full((1, 1, 1), rows), np.full((1, 1, 1), float(units)))
        return float(busy.total[0, 0])

    whole = shape.units_per_expert
    rows = max(pairs / rounds / shape.num_experts, 1.0)
    once = seconds(rows, whole)
    # A token costs something for its row and something for the neurons: a slice pays the second in part.
    slope = (seconds(2 * rows, whole) - once) / rows
    smallest = (seconds(2 * rows, 1) - seconds(rows, 1)) / rows
    token_s = max(slope - smallest, 0.0) * whole / (whole - 1) if whole > 1 else slope
    piece_s = rounds * max(once - slope * rows, 0.0)
    link = hardware.network if crosses_domains else hardware.scale_up
    row_s = slope - token_s + row_bytes(shape, workload) * link.seconds_per_byte
    return PlacementCost(token_s=token_s, row_s=row_s, piece_s=piece_s, units_per_expert=whole, tokens=pairs)


def transfer_seconds(
    transfer: Transfer,
    *,
    lines: Lines,
    bytes_per_element: int,
    cluster: Cluster,
    hardware: HardwareProfile,
) -> float:
    """Seconds until the last slot has sent and got its pieces of a transfer; 0 if nothing travels."""
    traffic = transfer_traffic(transfer, lines, scale_up_domains(cluster, hardware))
    seconds = traffic.seconds(hardware, bytes_per_element)
    return float(seconds.max()) if seconds.size else 0.0


def _check(
    plan: Plan,
    shape: ModelShape,
    workload: Workload,
    cluster: Cluster,
    loads: ExpertLoads | None,
    num_layers: int,
) -> None:
    errors: list[str] = []
    if plan.global_batch_size != workload.global_batch_size:
        errors.append(
            f"global_batch_size ({workload.global_batch_size}) of the workload must be that of plan "
            f"{plan.number} ({plan.global_batch_size}); change one of them"
        )
    if workload.seq_len > shape.max_seq_len:
        errors.append(f"seq_len ({workload.seq_len}) exceeds max_seq_len ({shape.max_seq_len}) of {shape.name}")
    unknown = sorted(set(plan.slots) - {slot.index for slot in cluster.slots})
    if unknown:
        errors.append(f"slots {unknown} of plan {plan.number} are not of the cluster; add them to it")
    if loads is not None and loads.mean.shape != (num_layers, shape.num_experts):
        errors.append(
            f"loads of shape {loads.mean.shape} do not fit {shape.name}, which has {num_layers} MoE layers of "
            f"{shape.num_experts} experts; use loads of this model"
        )
    missing = [axis for axis in axis_lines(parameter_lines(shape)) if not plan.holders.by_slot(axis)]
    if missing:
        errors.append(f"nobody holds {missing[0]} of {shape.name}; the plan is of another model")
    if errors:
        raise ValueError("; ".join(errors))


def _replica_times(
    plan: Plan,
    shape: ModelShape,
    workload: Workload,
    hardware: HardwareProfile,
    lines: Lines,
    domains: Mapping[int, int],
    popularity: Floats,
    shares: Floats | None,
) -> list[ReplicaTime]:
    """Time of each replica; replicas that are alike are computed once."""
    known: dict[object, ReplicaTime] = {}
    times: list[ReplicaTime] = []
    speed_of = dict(zip(plan.slots, plan.speeds_ppm, strict=True))
    lanes_of: dict[int, list[Lane]] = {}
    for lane in plan.lanes:
        lanes_of.setdefault(lane.replica, []).append(lane)
    for index, slots in enumerate(plan.replicas):
        lanes = tuple(lanes_of.get(index, ()))
        places = {slot: place for place, slot in enumerate(slots)}
        first = min(domains[slot] for slot in slots)
        key = None
        if shares is None:
            key = (
                tuple((tuple(places[slot] for slot in lane.slots), lane.num_sequences) for lane in lanes),
                tuple(speed_of[slot] for slot in slots),
                tuple(domains[slot] - first for slot in slots),
                tuple(tuple(by.get(slot, ()) for slot in slots) for by in plan.holders.cuts.values()),
            )
        if key is not None and key in known:
            times.append(known[key].moved_to(slots))
            continue
        columns = None
        if shares is not None:
            position = {slot: place for place, slot in enumerate(plan.slots)}
            columns = shares[:, :, [position[slot] for slot in slots]]
        time = replica_time(
            plan.holders,
            slots,
            lanes,
            kernels=Kernels(shape, workload, hardware),
            workload=workload,
            hardware=hardware,
            lines=lines,
            domains=np.array([domains[slot] for slot in slots]),
            speeds=np.array([speed_of[slot] / 1e6 for slot in slots]),
            popularity=popularity,
            shares=columns,
        )
        if key is not None:
            known[key] = time
        times.append(time)
    return times


def _between_replicas(
    plan: Plan,
    shape: ModelShape,
    workload: Workload,
    hardware: HardwareProfile,
    lines: Lines,
    domains: Mapping[int, int],
    parts: dict[str, float],
    by_slot: Mapping[int, dict[str, float]],
    binding: dict[str, Binding],
) -> None:
    """Adds the parts after the backward, in place."""

    def add(part: str, seconds: Floats, resource: str) -> None:
        busiest = int(np.argmax(seconds))
        parts[part] += float(seconds[busiest])
        binding.setdefault(part, Binding(plan.slots[busiest], resource))
        for slot, value in zip(plan.slots, seconds.tolist(), strict=True):
            by_slot[slot][part] += value

    messages = shape.num_layers if workload.buckets else 1
    wide, narrow = workload.accumulation_bytes, workload.parameter_bytes
    inside_classes, straight = grad_traffic(plan, lines, domains, workload.grad_sync)
    # In flight together. A slot that is cut like no other sends straight to owners while the others are busy with
    # their collectives, so what counts is the slot whose links carry most, not the sum of two different busiest.
    to_owners = inside_classes + straight
    for part, traffic, size in (
        ("grad_sync", to_owners, wide),
        ("mirror", mirror_traffic(plan, lines, domains), wide),
        ("parameter_return", to_owners, narrow),
    ):
        seconds = traffic.seconds(hardware, size, messages)
        if seconds.max() > 0:
            add(part, seconds, traffic.limiting_link(hardware, int(np.argmax(seconds))))
    owned, mirrored = (elements(layout, plan.slots, lines) for layout in (plan.owners, plan.mirrors))
    speeds = np.array(plan.speeds_ppm) / 1e6
    update: Busy = Kernels(shape, workload, hardware).optimizer(owned, mirrored)
    add("optimizer", update.total / speeds, "memory")
    add("vote", np.full(len(plan.slots), _vote_seconds(plan, hardware, domains)), "latency")


def _overlap(parts: dict[str, float], workload: Workload, rounds: int, num_layers: int) -> None:
    """Leaves of the parts between replicas what the products beside them do not hide, in place.

    Only products hide anything: dispatch wants the links itself. Gradients are complete in the last round.
    """
    products = sum(parts[part] for part in ("expert_gemm", "attention", "dense")) / rounds
    backward = products * (3 / 4 if workload.recompute else 2 / 3)
    sums = parts["grad_sync"] + parts["mirror"]
    sticks_out = _exposed(sums, backward, num_layers) / sums if sums else 0.0
    parts["grad_sync"] *= sticks_out
    parts["mirror"] *= sticks_out
    parts["parameter_return"] = _exposed(parts["parameter_return"], products / 3, num_layers)


def _exposed(seconds: float, beside: float, buckets: int) -> float:
    """What sticks out of a pipeline of equal buckets: the last one, or all that the other work is too short for."""
    return max(seconds / buckets, seconds - beside + beside / buckets)


def _vote_seconds(plan: Plan, hardware: HardwareProfile, domains: Mapping[int, int]) -> float:
    """An all-gather of one record per slot, over the widest link in use."""
    others = len(plan.slots) - 1
    if not others:
        return 0.0
    apart = len({domains[slot] for slot in plan.slots}) > 1
    link = hardware.network if apart else hardware.scale_up
    hops = math.ceil(math.log2(others + 1))
    return hops * link.latency_s + others * VOTE_BYTES * link.seconds_per_byte
