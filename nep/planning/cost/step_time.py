"""Predicts the seconds of a training step from a plan, part by part.

A step is what the slots of a plan do between two votes: rounds of forward and backward, gradient sums to
owners, sums to mirrors, vote, optimizer, parameters back. Nothing is taken to overlap unless the workload says
so. Inside a replica the slots are in lock-step: every exchange of rows waits for the last of them, so a layer
costs its busiest slot and the step the sum over layers of that, not the busiest sum. Replicas meet at the
gradients.

What is left out is listed in ``docs/planner-cost-model.md``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nep.planning.cluster import Cluster
from nep.planning.cost.hardware import HardwareProfile, scale_up_domains
from nep.planning.cost.held import Floats, elements, expert_axes
from nep.planning.cost.kernels import Busy, Kernels
from nep.planning.cost.known_times import KnownTimes, lanes_by_replica
from nep.planning.cost.overlap import beside_transfers, bucket_seconds, exposed_return, exposed_sums
from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.cost.replica_time import ReplicaTime, replica_time, row_bytes
from nep.planning.cost.traffic import Traffic, grad_traffic, mirror_traffic, transfer_traffic
from nep.planning.cost.workload import Workload
from nep.planning.layout import Lines, axis_lines
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
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
    known: KnownTimes | None = None,
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
        known: what was computed before with the same model, workload, hardware and loads; more is added.

    Raises:
        ValueError: if plan, model, workload, loads or cluster do not fit each other.
    """
    lines = parameter_lines(shape)
    layers = expert_axes(lines)
    _check(plan, shape, workload, cluster, loads, len(layers))
    domains = scale_up_domains(cluster, hardware)
    popularity = (loads or ExpertLoads.uniform(len(layers), shape.num_experts)).normalised().mean
    replicas = _replica_times(
        plan, shape, workload, hardware, lines, domains, popularity, shares, known or KnownTimes()
    )
    slowest = max(range(len(replicas)), key=lambda index: (replicas[index].seconds, -index))
    parts = dict.fromkeys(PARTS, 0.0) | dict(replicas[slowest].parts)
    by_slot = {slot: dict.fromkeys(PARTS, 0.0) for slot in plan.slots}
    for replica in replicas:
        for slot, busy in replica.by_slot.items():
            by_slot[slot].update(busy)
    binding = {part: Binding(*bound) for part, bound in replicas[slowest].binding.items()}
    inside = _between_replicas(plan, shape, workload, hardware, lines, domains, parts, by_slot, binding)
    if workload.overlap:
        _overlap(parts, plan, workload, hardware, lines, domains, replicas, inside)
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
    known: KnownTimes | None = None,
) -> tuple[float, ...]:
    """Forward and backward of each replica: all of a step that depends on how the batch is shared.

    Args: as for `step_time`.
    """
    lines = parameter_lines(shape)
    num_layers = len(expert_axes(lines))
    domains = scale_up_domains(cluster, hardware)
    popularity = (loads or ExpertLoads.uniform(num_layers, shape.num_experts)).normalised().mean
    times = _replica_times(plan, shape, workload, hardware, lines, domains, popularity, shares, known or KnownTimes())
    return tuple(time.seconds for time in times)


def placement_cost(
    shape: ModelShape,
    workload: Workload,
    hardware: HardwareProfile,
    *,
    num_replicas: int = 1,
    lanes: int = 1,
    crosses_domains: bool = False,
    far_rows: float = 1.0,
) -> PlacementCost:
    """The prices of one MoE layer that placing experts depends on, of a replica with an equal share.

    Args:
        shape: the model.
        workload: the step.
        hardware: the accelerator.
        num_replicas: the global batch is shared over them.
        lanes: lanes of a replica; with the micro-batch they tell in how many rounds the batch runs.
        crosses_domains: rows go over the network, since the replica has slots in several scale-up domains.
        far_rows: part of a slot's rows that come from other domains, if it does.
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
    near, far = hardware.scale_up.seconds_per_byte, hardware.network.seconds_per_byte
    # The two links work side by side.
    byte_s = max(near * (1 - far_rows), far * far_rows) if crosses_domains else near
    row_s = slope - token_s + row_bytes(shape, workload) * byte_s
    return PlacementCost(
        token_s=token_s,
        row_s=row_s,
        piece_s=piece_s,
        units_per_expert=whole,
        tokens=pairs,
        far_sum_s=_far_sum_seconds(shape, workload, hardware),
    )


def _far_sum_seconds(shape: ModelShape, workload: Workload, hardware: HardwareProfile) -> float:
    """By how much longer an expert's gradients and parameters take between scale-up domains than inside one.

    Where they overlap with products, only the last bucket of as many as there are layers is not hidden.
    """
    numel = 3 * shape.ffn_hidden_size * shape.hidden_size
    num_bytes = numel * (workload.accumulation_bytes + workload.parameter_bytes)
    per_byte = hardware.network.seconds_per_byte - hardware.scale_up.seconds_per_byte
    return max(0.0, num_bytes * per_byte) / (shape.num_layers if workload.overlap else 1)


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
    known: KnownTimes,
) -> list[ReplicaTime]:
    """Time of each replica; replicas that are alike are computed once."""
    times: list[ReplicaTime] = []
    speed_of = dict(zip(plan.slots, plan.speeds_ppm, strict=True))
    position = {slot: place for place, slot in enumerate(plan.slots)} if shares is not None else {}
    for index, (slots, lanes) in enumerate(zip(plan.replicas, lanes_by_replica(plan), strict=True)):
        key = known.key(plan, index, lanes, speed_of, domains) if shares is None else None
        if key is not None and key in known.times:
            times.append(known.times[key].moved_to(slots))
            continue
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
            shares=None if shares is None else shares[:, :, [position[slot] for slot in slots]],
        )
        if key is not None:
            known.times[key] = time
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
) -> Traffic:
    """Adds the parts after the backward, in place; returns what collectives inside classes move."""

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
    return inside_classes


def _overlap(
    parts: dict[str, float],
    plan: Plan,
    workload: Workload,
    hardware: HardwareProfile,
    lines: Lines,
    domains: Mapping[int, int],
    replicas: Sequence[ReplicaTime],
    inside: Traffic,
) -> None:
    """Leaves of the parts between replicas what the last backward and the first forward do not hide, in place."""
    buckets = bucket_seconds(plan, lines, domains, hardware, workload, inside)
    times = [beside_transfers(replica, lanes, domains, workload) for replica, lanes in _with_lanes(plan, replicas)]
    of_slot = [times[plan.replica_of(slot)] for slot in plan.slots]
    num_layers = len(buckets) - 2
    backward = np.array([time.backward_s for time in of_slot])
    starts = np.array([time.seconds for time in of_slot]) - backward
    sums = parts["grad_sync"] + parts["mirror"]
    sticks_out = exposed_sums(buckets, backward / num_layers, starts) / sums if sums else 0.0
    parts["grad_sync"] *= sticks_out
    parts["mirror"] *= sticks_out
    slowest = max(times, key=lambda time: time.seconds)
    parts["parameter_return"] = exposed_return(buckets, slowest.forward_s / num_layers)


def _with_lanes(plan: Plan, replicas: Sequence[ReplicaTime]) -> list[tuple[ReplicaTime, list[int]]]:
    """Every replica's time and the sequences of its lanes."""
    sequences: list[list[int]] = [[] for _ in replicas]
    for lane in plan.lanes:
        sequences[lane.replica].append(lane.num_sequences)
    return list(zip(replicas, sequences, strict=True))


def _vote_seconds(plan: Plan, hardware: HardwareProfile, domains: Mapping[int, int]) -> float:
    """An all-gather of one record per slot, over the widest link in use."""
    others = len(plan.slots) - 1
    if not others:
        return 0.0
    apart = len({domains[slot] for slot in plan.slots}) > 1
    link = hardware.network if apart else hardware.scale_up
    hops = math.ceil(math.log2(others + 1))
    return hops * link.latency_s + others * VOTE_BYTES * link.seconds_per_byte
