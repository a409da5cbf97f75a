"""Runs a job under a plan, and says what share of its pace is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nep.planning.cluster import Cluster
from nep.planning.cost.known_times import KnownTimes
from nep.planning.cost.step_time import replica_seconds
from nep.planning.layout import LineKind, axis_lines
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.search.pace import at_best_pace
from nep.testing.degraded_bench.jobs import Build, Job
from nep.testing.emulation.accelerator import Speed
from nep.testing.emulation.run import EmulatedRun, run_emulated

# Without sleeping every steady step takes as long, but for which experts are drawn.
_STEPS, _STEPS_SLEPT = 2, 4
_MANY = 16


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One plan of one job. Seconds are emulated ones.

    Attributes:
        plan: that ran; None: the job stands still.
        step_s: of a steady step; infinite if the job stands still.
        predicted_s: of the planner's cost model.
        cpu_share: of the processors, while it ran.
        busiest: part of a step -> seconds of the slot that is busiest with it.
        limits_w: slot -> power limit, where these are planned.
    """

    plan: Plan | None
    step_s: float
    predicted_s: float
    cpu_share: float = 0.0
    busiest: Mapping[str, float] = field(default_factory=dict)
    limits_w: Mapping[int, int] = field(default_factory=dict)

    @property
    def predicted_ratio(self) -> float:
        """Predicted over emulated; 1 if the job stands still."""
        return self.predicted_s / self.step_s if self.plan is not None else 1.0


@dataclass(frozen=True, kw_only=True)
class Share:
    """A damaged job beside the healthy one.

    Attributes:
        live: part of the slots that is left.
        of_healthy: samples per second over those of the healthy job.
        intact: the same for the replicas that lost nothing, by their own samples; None if there are none.
        sequences: part of the pace that giving whole sequences to lanes leaves, as predicted.
        blocks: the same of cutting experts in whole blocks, of the replica where it is most.
        measured: the run.
    """

    live: float
    of_healthy: float
    intact: float | None
    sequences: float
    blocks: float
    measured: Measured

    @property
    def of_ideal(self) -> float:
        """Samples per second over those of the healthy job times the share of slots that live."""
        return self.of_healthy / self.live

    def to_json(self) -> dict[str, Any]:
        """For scripts; a job that stands still has no seconds."""
        runs = self.measured.plan is not None
        return {
            "share_of_healthy": self.of_healthy,
            "share_of_ideal": self.of_ideal,
            "healthy_slots": self.intact,
            "granularity": {"sequences": self.sequences, "blocks": self.blocks, "heads": 1.0},
            "step_s": self.measured.step_s if runs else None,
            "predicted_s": self.measured.predicted_s if runs else None,
            "predicted_over_emulated": self.measured.predicted_ratio if runs else None,
            "cpu_share": self.measured.cpu_share,
            "busiest_slot_s": dict(self.measured.busiest),
            "limits_w": {str(slot): watts for slot, watts in self.measured.limits_w.items()},
        }


class Bench:
    """Runs plans of one job; the same plan at the same speeds runs once.

    Args:
        job: the job.
        build: see `Emulation.build`.
        pace: wall seconds of an emulated second; None: the job's; 0: nothing is slept.
    """

    def __init__(self, job: Job, build: Build, pace: float | None):
        self.job, self.build = job, build
        self.pace = job.pace if pace is None else pace
        self._known: dict[str, Measured] = {}

    def run(self, plan: Plan | None, speed: Speed | None = None, limits_w: Mapping[int, int] | None = None) -> Measured:
        """Runs a plan.

        Args:
            plan: what to run; its speeds are those of the prediction.
            speed: of the slots; None: the plan's.
            limits_w: of their boards, if these are planned.
        """
        if plan is None:
            return Measured(plan=None, step_s=float("inf"), predicted_s=float("inf"))
        if speed is not None or plan.digest not in self._known:
            emulation = self.job.emulation(self.build, self.pace, speed)
            found = run_emulated(plan, emulation, steps=_STEPS_SLEPT if self.pace else _STEPS)
            measured = Measured(
                plan=plan,
                step_s=found.step_s(),
                predicted_s=emulation.predicted(plan).total,
                cpu_share=found.cpu_share,
                busiest=busiest(found),
                limits_w=dict(limits_w or {}),
            )
            if speed is not None:
                return measured
            self._known[plan.digest] = measured
        return self._known[plan.digest]

    def share(self, measured: Measured, failed: int) -> Share:
        """What of the healthy job's pace is left.

        Args:
            measured: the damaged job.
            failed: number of slots that are gone.
        """
        healthy = self.run(self.job.healthy).step_s
        plan = measured.plan
        return Share(
            live=1 - failed / self.job.num_slots,
            of_healthy=healthy / measured.step_s,
            intact=None if plan is None else self._intact(plan, healthy / measured.step_s),
            sequences=1.0 if plan is None else self._sequences(plan),
            blocks=1.0 if plan is None else _blocks(self.job, plan),
            measured=measured,
        )

    def _intact(self, plan: Plan, of_healthy: float) -> float | None:
        """Samples per second of the replicas that lost nothing, over those that they had."""
        before = {lane.slots: lane.num_sequences for lane in self.job.healthy.lanes}
        intact = [
            lane
            for lane in plan.lanes
            if plan.replicas[lane.replica] in self.job.healthy.replicas and lane.slots in before
        ]
        if not intact:
            return None
        now = sum(lane.num_sequences for lane in intact)
        return of_healthy * now / sum(before[lane.slots] for lane in intact)

    def _sequences(self, plan: Plan) -> float:
        """Forward and backward of the plan with many times the batch, over as many times those of the plan."""
        job = self.job
        cluster = Cluster(job.cluster.slots).with_speeds(dict(zip(plan.slots, plan.speeds_ppm, strict=True)))
        loads = job.loads or ExpertLoads.uniform(job.shape.num_moe_layers, job.shape.num_experts)
        many = replace(job.workload, global_batch_size=_MANY * job.global_batch_size)
        lanes = tuple(replace(lane, num_sequences=_MANY * lane.num_sequences) for lane in plan.lanes)
        request = replace(job.request(cluster, plan), workload=many)
        large = at_best_pace(replace(plan, lanes=lanes), request, cluster, loads, None, KnownTimes())[1]
        known = {"shape": job.shape, "cluster": cluster, "hardware": job.hardware, "loads": loads}
        now = max(replica_seconds(plan, workload=job.workload, **known))
        return max(replica_seconds(large, workload=many, **known)) / _MANY / now


def busiest(run: EmulatedRun) -> dict[str, float]:
    """Part of a step -> seconds of the slot that is busiest with it."""
    busy = run.busy_s()
    return {kind: max(kinds.get(kind, 0.0) for kinds in busy.values()) for kind in next(iter(busy.values()))}


def _blocks(job: Job, plan: Plan) -> float:
    """An even share of a layer's blocks over the same in whole blocks, of the worst replica."""
    axes = [line for line in axis_lines(job.lines).values() if line.kind is LineKind.EXPERTS]
    return min(
        line.num_units / len(replica) / -(-line.num_units // len(replica)) for replica in plan.replicas for line in axes
    )
