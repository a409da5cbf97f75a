"""Jobs whose memory is compared: healthy ones, and the same after a slot was killed."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from math import prod

from nep.fault_tolerance.injection import Failure
from nep.planning.cluster import Cluster
from nep.planning.cost.workload import Workload
from nep.planning.layout import LineKind, Lines, axis_lines, axis_unit_numel
from nep.planning.plan import Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch
from nep.planning.shapes import ModelShape, parameter_lines
from nep.train.config import TrainConfig

# 31 million parameters, most of them in experts: from 200 MB a slot on, and a step takes seconds on two cores.
SHAPE = ModelShape(
    name="memory-bench",
    num_layers=4,
    hidden_size=512,
    ffn_hidden_size=512,
    num_experts=8,
    top_k=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=2048,
    rope_theta=1e6,
    norm_eps=1e-5,
    sliding_window=None,
    tied_embeddings=False,
    neuron_block=16,
    max_seq_len=512,
)

HEALTHY_STEP = 3
"""Measured before the failure."""
FAILED_STEP = 4
"""In which the slot is killed; recovery and new mirrors follow."""
STEPS = 6
"""The last one is measured."""

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job.

    Attributes:
        name: what is special.
        num_slots, replicas, tp: of the healthy job; the last slot fails.
        redundancy: of optimizer state. With `none` nothing survives a kill, so that the damaged job is one of its
            own that begins with the plan which such a failure leads to.
        dtype: of parameters.
        num_layers: of the model.
        global_batch_size, micro_batch_size, seq_len: of a step.
        damaged: whether this is the damaged job of redundancy `none`.
    """

    name: str
    num_slots: int
    replicas: int
    tp: int = 1
    redundancy: str = "device"
    dtype: str = "float32"
    num_layers: int = SHAPE.num_layers
    global_batch_size: int = 8
    micro_batch_size: int = 1
    seq_len: int = 128
    damaged: bool = False

    @property
    def shape(self) -> ModelShape:
        return replace(SHAPE, num_layers=self.num_layers)

    @property
    def lines(self) -> Lines:
        return parameter_lines(self.shape)

    @property
    def failed(self) -> int:
        """The slot that is killed."""
        return self.num_slots - 1

    @property
    def num_processes(self) -> int:
        return self.num_slots - self.damaged

    @property
    def workload(self) -> Workload:
        """The step as the planner sees it, carried out as `nep.parallel` does."""
        return Workload(
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            seq_len=self.seq_len,
            parameter_bytes=_BYTES[self.dtype],
            grad_sync="point_to_point",
            overlap=True,
        )

    def config(self) -> TrainConfig:
        """What the trainers are asked to do."""
        failures = () if self.redundancy == "none" else (Failure(slot=self.failed, step=FAILED_STEP, phase="backward"),)
        return TrainConfig(
            steps=STEPS,
            replicas=self.replicas,
            tp=self.tp,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            seq_len=self.seq_len,
            dtype=self.dtype,  # type: ignore[arg-type]
            redundancy=self.redundancy,  # type: ignore[arg-type]
            validation_sequences=0,
            timeout_base_s=60.0,
            failures=failures,
            plan=self.damaged_plan() if self.damaged else None,
        )

    def damaged_plan(self) -> Plan:
        """What a failure of the last slot leads to."""
        cluster = Cluster.uniform(self.num_slots, self.num_slots)
        before = plan_from_scratch(
            cluster,
            self.lines,
            num_replicas=self.replicas,
            global_batch_size=self.global_batch_size,
            redundancy=self.redundancy,  # type: ignore[arg-type]
            lane_slots=self.tp,
        )
        return plan_after_failure(before, cluster.fail([self.failed]), self.lines)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        return cls(**json.loads(text))


def more_to_hold(case: Case, plan: Plan, live: Collection[int]) -> dict[int, int]:
    """Bytes that every survivor needs more than before, because fewer slots hold the same model.

    What the failed slots of a lane or replica held is shared out evenly over those of the same lane or replica that
    are left: parameters and gradients. What they owned is shared out over all survivors: master weights, moments and
    finished sums, and where state is mirrored the same once more. Nothing is counted for units that cannot be cut
    evenly, for staging or for activations.

    Args:
        case: sizes.
        plan: of the healthy job.
        live: slots that are left.
    """
    workload, lines = case.workload, case.lines
    numel = axis_unit_numel(lines)
    total = sum(line.num_units * numel[axis] for axis, line in axis_lines(lines).items())
    kept = 1 if plan.redundancy == "none" else 2
    state = kept * total * (workload.state_bytes + workload.accumulation_bytes)
    more: dict[int, int] = {}
    for slot in live:
        held = 0.0
        for axis, line in axis_lines(lines).items():
            if line.kind is LineKind.WHOLE:
                continue
            together = (
                plan.replicas[plan.replica_of(slot)]
                if line.kind is LineKind.EXPERTS
                else plan.lanes[plan.lane_of(slot)].slots
            )
            left = sum(member in live for member in together)
            held += line.num_units * numel[axis] * (1 / left - 1 / len(together))
        owned = state * (1 / len(live) - 1 / len(plan.slots))
        more[slot] = round(held * (workload.parameter_bytes + workload.accumulation_bytes) + owned)
    return more


def num_parameters(lines: Lines) -> int:
    """Elements of a model."""
    return sum(line.num_units * prod(line.unit_shape) for line in lines.values())


CASES: tuple[Case, ...] = (
    Case(name="2 replicas of 2 slots", num_slots=4, replicas=2),
    Case(name="2 replicas of 2 slots, mirrors on the host", num_slots=4, replicas=2, redundancy="host"),
    Case(name="2 replicas of 2 slots, no mirrors", num_slots=4, replicas=2, redundancy="none"),
    Case(name="2 replicas of 2 slots, bfloat16", num_slots=4, replicas=2, dtype="bfloat16"),
    Case(name="a lane of 4 slots", num_slots=4, replicas=1, tp=4),
    Case(name="2 replicas, each a lane of 4 slots", num_slots=8, replicas=2, tp=4),
    Case(name="8 experts on 8 slots", num_slots=8, replicas=1),
    Case(name="2 replicas of 4 slots", num_slots=8, replicas=2),
)
