"""What is emulated, and how fast."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from nep.planning.cluster import Cluster
from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.step_time import StepTime, step_time
from nep.planning.cost.workload import Workload
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.shapes import ModelShape
from nep.testing.emulation.accelerator import Speed
from nep.testing.emulation.links import Role

LABEL = "emulated"
"""Stands beside every number that comes from here."""

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class SpeedChange:
    """A slot that computes at another speed from a step on.

    Attributes:
        step: the first one.
        slot: which.
        factor: on the speed it has otherwise; 1 ends an earlier change.
    """

    step: int
    slot: int
    factor: float


@dataclass(frozen=True)
class SlotFailure:
    """A slot that is gone from a step on: it fails right after the one before is committed.

    Attributes:
        step: the first one without it.
        slot: which.
    """

    step: int
    slot: int


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """An emulated job.

    Attributes:
        shape: the full model. One that `Scale.of` accepts.
        workload: the step; what the cost model is to assume of overlap is up to `predicted`.
        hardware: kernels and links.
        cluster: nodes, and so scale-up domains.
        build: makes a model of a shape and a dtype on the meta device, such as `models.mixtral.build`.
        loads: what the router does, one layer of loads per layer; None: equal loads.
        speed: of computing, see `Speed`; None: what the plan says.
        pace: wall seconds of an emulated second. Layers must be long for what 16 ranks in one process need: see the
            CPU share. 0: nothing is slept, which is for tests and wide searches.
        seq_len: tokens of a sequence of the small model.
        free: roles whose messages take no time, to see what the others cost.
        seed: of the router's choices.
    """

    shape: ModelShape
    workload: Workload
    hardware: HardwareProfile
    cluster: Cluster
    build: Callable[[ModelShape, torch.dtype], nn.Module]
    loads: ExpertLoads | None = None
    speed: Speed | None = None
    pace: float = 0.0
    seq_len: int = 16
    free: frozenset[Role] = field(default_factory=frozenset)
    seed: int = 0

    def __post_init__(self) -> None:
        errors = []
        for name in ("num_dense_layers", "num_shared_experts", "kv_latent_size"):
            if getattr(self.shape, name):
                errors.append(
                    f"{name} ({getattr(self.shape, name)}) of {self.shape.name} is not emulated; use a shape without"
                )
        if self.workload.recompute:
            errors.append("recompute (True) is not emulated; use a workload without it")
        if self.pace < 0:
            errors.append(f"pace ({self.pace}) must be at least 0 wall seconds per emulated second")
        if errors:
            raise ValueError("emulation: " + "; ".join(errors))

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.workload.parameter_bytes]

    def speed_under(self, plan: Plan, changes: tuple[SpeedChange, ...]) -> Speed:
        """Speed of every slot, changes included.

        Args:
            plan: whose speeds count where none are given.
            changes: applied on top.
        """
        planned = {slot: ppm / 1e6 for slot, ppm in zip(plan.slots, plan.speeds_ppm, strict=True)}
        base = self.speed or (lambda slot, step, now_s: planned[slot])
        latest = sorted(changes, key=lambda change: change.step)

        def speed(slot: int, step: int, now_s: float) -> float:
            factor = 1.0
            for change in latest:
                if change.slot == slot and change.step <= step:
                    factor = change.factor
            return factor * base(slot, step, now_s)

        return speed

    def predicted(self, plan: Plan) -> StepTime:
        """What the planner's cost model says of a step: sums straight to owners, overlapped, as they are here."""
        return step_time(
            plan,
            shape=self.shape,
            workload=self.workload,
            cluster=self.cluster,
            hardware=self.hardware,
            loads=self.loads,
        )


def num_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))
