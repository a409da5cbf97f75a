"""The options of `nep plan`, and the request that they amount to."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import tyro

from nep.planning.cluster import Cluster
from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.workload import Workload
from nep.planning.degrees import Degrees
from nep.planning.plan import Redundancy
from nep.planning.search.request import Limits, PlanRequest
from nep.report.plan_export import Format
from nep.report.readers.cluster_file import ClusterFlags, cluster_from_flags, read_cluster
from nep.report.readers.hardware_file import read_hardware
from nep.report.readers.loads_file import loads_of, read_counts
from nep.report.readers.model_file import read_model
from nep.report.readers.plan_file import read_plan

Dtype = Literal["bfloat16", "float32", "float64"]
_BYTES: Mapping[Dtype, int] = MappingProxyType({"bfloat16": 2, "float32": 4, "float64": 8})
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
Number = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")]
Flag = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
Count = Annotated[int, tyro.conf.arg(metavar="N")]
SlotList = Annotated[str, tyro.conf.arg(metavar="SLOTS", help_behavior_hint="")]
# Where no batch is given: so many sequences for every slot, failed ones included, so that plans stay comparable.
_SEQUENCES_PER_SLOT = 4
_DEFAULT_SEQ_LEN = 4096


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Plan where experts go, and say what a step will take: before a job, when slots fail, when loads drift.

    Nothing is started and no GPU is needed.
    """

    model: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")]
    """Preset (debug, mixtral-8x7b, ...) or a Hugging Face config.json (Mixtral, Qwen-MoE, OLMoE, DeepSeek)."""
    neuron_block: Number = None
    """Neurons of one unit of an expert; by default 128 or the largest power of two below that fits."""
    cluster: File = None
    """The cluster as JSON, in place of the flags below."""
    nodes: Count = 1
    """Nodes of the cluster."""
    gpus_per_node: Annotated[str, tyro.conf.arg(metavar="N")] = "8"
    """Slots of each node: 8, or for nodes that differ 8,8,4."""
    failed: SlotList = ""
    """Slots that are broken: 3,17 or 0-3,9."""
    draining: SlotList = ""
    """Slots that still give what they have but are about to leave."""
    idle: SlotList = ""
    """Healthy slots that the plan may not use."""
    spare: SlotList = ""
    """Slots on standby."""
    slow: Annotated[str, tyro.conf.arg(metavar="SLOTS=SPEED", help_behavior_hint="")] = ""
    """Relative speed of slots, 1 is full: 5=0.7,8-15=0.9."""
    memory_gib: Annotated[str, tyro.conf.arg(metavar="GIB", help_behavior_hint="")] = ""
    """Memory of the slots, by default the hardware's: 80, or with exceptions 80,5=40."""
    hardware: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")] = "H100"
    """Published profile (A100, H100, H200, B200, GB200), or a file that nep calibrate wrote."""
    loads: File = None
    """What the router did: NPZ of --loads-out, JSON, JSON lines, or SGLang's logical_count. By default equal."""
    last_steps: Number = None
    """Of the loads, use the last so many steps."""
    replicas: Annotated[str, tyro.conf.arg(metavar="N|auto")] = "1"
    """Data-parallel copies of the model, or auto: as many as fit."""
    global_batch_size: Number = None
    """Sequences of a step; by default those of --current, or 4 for every slot."""
    micro_batch_size: Count = 1
    """Sequences that a lane runs at a time."""
    seq_len: Number = None
    """Tokens of a sequence; by default 4096 or what the model allows."""
    dtype: Dtype = "bfloat16"
    """Of parameters and activations."""
    recompute: Flag = False
    """Layers keep their inputs only and run forward again in the backward."""
    redundancy: Redundancy = "device"
    """Where optimizer state is mirrored."""
    whole_experts: Flag = False
    """Place experts whole only, for frameworks that cannot cut them."""
    physical_experts: Number = None
    """Copies of experts per layer and replica, all together; a slot holds a copy whole."""
    max_tp: Count = 1
    """Most slots of a lane (tensor parallelism)."""
    degrees: Annotated[str | None, tyro.conf.arg(metavar="DEGREES", help_behavior_hint="")] = None
    """Cut replicas just so: EP8, EP4xETP2, TP2xEP4, TP8 and the like; the number of replicas follows."""
    memory_share: Annotated[float, tyro.conf.arg(metavar="X")] = 0.9
    """Part of a slot's memory that the plan may use."""
    current: File = None
    """The plan in force (a file of --out): go on from there and move only what pays."""
    horizon_steps: Count = 1000
    """Steps within which moving must pay."""
    out: File = None
    """Write the plan (canonical JSON, what training reads)."""
    html: File = None
    """Write a page with a map of slots and experts, before and after."""
    export: Annotated[Format | None, tyro.conf.arg(metavar="{sglang,vllm,megatron-nep}", help_behavior_hint="")] = None
    """Write the placement for another framework, too; for plans of whole experts."""
    export_file: File = None
    """Where; by default sglang-placement.json and so on."""
    json: Flag = False
    """Print one object with all numbers as the last line."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the options ask.

    Attributes:
        request: for the planner.
        notes: what readers said about the files.
    """

    request: PlanRequest
    notes: tuple[str, ...]


def question_of(options: PlanOptions) -> Question:
    """Reads the files and puts the request together.

    Raises:
        ValueError: with what is wrong, and what to do.
    """
    model = read_model(options.model, neuron_block=options.neuron_block)
    shape, notes = model.shape, list(model.notes)
    hardware = read_hardware(options.hardware)
    cluster = _with_memory(_cluster(options), hardware)
    loads = None
    if options.loads is not None:
        read = read_counts(options.loads)
        loads = loads_of(read, shape, last_steps=options.last_steps)
        if read.model is not None and read.model != shape.name:
            notes.append(f"{options.loads} is of {read.model}, not of {shape.name}")
    elif options.last_steps is not None:
        raise ValueError("--last-steps needs --loads")
    current = read_plan(options.current) if options.current is not None else None
    if options.global_batch_size is not None:
        batch = options.global_batch_size
    else:
        batch = current.global_batch_size if current is not None else _SEQUENCES_PER_SLOT * len(cluster.slots)
    workload = Workload(
        global_batch_size=batch,
        micro_batch_size=options.micro_batch_size,
        seq_len=options.seq_len if options.seq_len is not None else min(_DEFAULT_SEQ_LEN, shape.max_seq_len),
        parameter_bytes=_BYTES[options.dtype],
        recompute=options.recompute,
        overlap=True,  # as training does
    )
    request = PlanRequest(
        cluster=cluster,
        shape=shape,
        workload=workload,
        hardware=hardware,
        loads=loads,
        num_replicas=_replicas(options.replicas),
        redundancy=options.redundancy,
        limits=_limits(options, shape.num_experts),
        current=current,
        horizon_steps=options.horizon_steps,
    )
    return Question(request=request, notes=tuple(notes))


def _cluster(options: PlanOptions) -> Cluster:
    flags = {field.name: getattr(options, field.name) for field in fields(ClusterFlags)}
    if options.cluster is None:
        return cluster_from_flags(ClusterFlags(**flags))
    given = [
        f"--{field.name.replace('_', '-')}" for field in fields(ClusterFlags) if flags[field.name] != field.default
    ]
    if given:
        raise ValueError(f"{', '.join(given)} cannot go with --cluster; write it into {options.cluster}")
    return read_cluster(options.cluster)


def _with_memory(cluster: Cluster, hardware: HardwareProfile) -> Cluster:
    """Slots of which nothing else is said have the memory of the hardware."""
    return Cluster(
        tuple(
            slot if slot.memory_bytes is not None else replace(slot, memory_bytes=hardware.memory_bytes)
            for slot in cluster.slots
        )
    )


def _replicas(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"replicas ({text}) must be a positive number, or auto for as many as fit")
    return int(text)


def _limits(options: PlanOptions, num_experts: int) -> Limits:
    errors = []
    copies = options.physical_experts
    if copies is not None and copies < num_experts:
        errors.append(f"physical experts ({copies}) must be at least {num_experts}, one of each expert")
    if options.max_tp < 1:
        errors.append(f"max tp ({options.max_tp}) must be at least 1; 1 means no tensor parallelism")
    if not 0 < options.memory_share <= 1:
        errors.append(f"memory share ({options.memory_share}) must be above 0 and at most 1")
    if options.horizon_steps < 1:
        errors.append(f"horizon steps ({options.horizon_steps}) must be at least 1")
    if errors:
        raise ValueError("; ".join(errors))
    return Limits(
        fractions=not options.whole_experts and copies is None,
        physical_experts=copies,
        max_tp=options.max_tp,
        degrees=None if options.degrees is None else Degrees.parse(options.degrees),
        memory_share=options.memory_share,
    )
