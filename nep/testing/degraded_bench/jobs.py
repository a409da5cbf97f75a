"""The jobs that are damaged: a model, its step and its slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from nep.planning.cluster import Cluster
from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.workload import Workload
from nep.planning.layout import Lines
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.planner import plan_from_scratch
from nep.planning.search.request import PlanRequest
from nep.planning.shapes import ModelShape, parameter_lines
from nep.testing.emulation.accelerator import Speed
from nep.testing.emulation.cases import FINE_GRAINED, IDEAL, MIXTRAL_LIKE
from nep.testing.emulation.setting import Emulation

Build = Callable[[ModelShape, torch.dtype], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job on two replicas, one node each.

    Attributes:
        name: for people.
        shape: the model.
        slots_per_replica: slots of a node.
        sequences: per slot of the healthy job.
        micro_batch_size: sequences that a lane runs at a time.
        hardware: the accelerators.
        loads: what the router does; None: equal loads.
        pace: wall seconds of an emulated second where time is slept: layers must be long for what the ranks need.
    """

    name: str
    shape: ModelShape
    slots_per_replica: int = 8
    sequences: int = 32
    micro_batch_size: int = 8
    hardware: HardwareProfile = IDEAL
    loads: ExpertLoads | None = None
    pace: float = 6.0

    @property
    def num_slots(self) -> int:
        return 2 * self.slots_per_replica

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step, however many slots are left."""
        return self.sequences * self.num_slots

    @property
    def cluster(self) -> Cluster:
        """All slots, healthy."""
        return Cluster.uniform(self.num_slots, self.slots_per_replica)

    @cached_property
    def lines(self) -> Lines:
        return parameter_lines(self.shape)

    @property
    def workload(self) -> Workload:
        """The step as the code runs it: sums straight to owners, overlapped."""
        return Workload(
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            seq_len=4096,
            grad_sync="point_to_point",
            overlap=True,
        )

    @cached_property
    def healthy(self) -> Plan:
        """The plan of the undamaged job, made without looking at its loads."""
        return plan_from_scratch(self.cluster, self.lines, num_replicas=2, global_batch_size=self.global_batch_size)

    def request(self, cluster: Cluster, current: Plan | None) -> PlanRequest:
        """What the planner is asked."""
        return PlanRequest(
            cluster=cluster,
            shape=self.shape,
            workload=self.workload,
            hardware=self.hardware,
            loads=self.loads,
            num_replicas=2,
            current=current,
        )

    def emulation(self, build: Build, pace: float, speed: Speed | None = None) -> Emulation:
        """What to emulate.

        Args:
            build: see `Emulation.build`.
            pace: see `Emulation.pace`.
            speed: of the slots; None: what the plan says.
        """
        return Emulation(
            shape=self.shape,
            workload=self.workload,
            hardware=self.hardware,
            cluster=self.cluster,
            build=build,
            loads=self.loads,
            speed=speed,
            pace=pace,
        )


MIXTRAL = Job(name="mixtral", shape=MIXTRAL_LIKE)
FINE = Job(name="fine", shape=FINE_GRAINED, pace=30.0)
JOBS: Mapping[str, Job] = {job.name: job for job in (MIXTRAL, FINE)}


def small(job: Job) -> Job:
    """The same with two layers, four slots in a replica and few sequences: a few seconds."""
    return replace(
        job,
        shape=replace(job.shape, num_layers=2),
        slots_per_replica=4,
        sequences=8,
        micro_batch_size=8,
    )
