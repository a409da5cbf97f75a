"""What a job should change about its plan: asked of the planner with what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nep.planning.cluster import Cluster
from nep.planning.compensate import compensate
from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.step_time import step_time
from nep.planning.cost.workload import Workload
from nep.planning.layout import Lines
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.planner import plan_mirrors
from nep.planning.search.make import make_plan
from nep.planning.search.request import Limits, PlanRequest
from nep.planning.shapes import ModelShape
from nep.train.adjustments import Adjustment
from nep.train.balance_config import HOST, BalanceConfig
from nep.train.power_facts import Offer

_COMPUTE = ("expert_gemm", "attention", "dense")

_LEAST_PRICE = 0.05
"""No kind of work costs less than this part of the other: where slots are alike, prices cannot be told apart."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a proposal depends on.

    Attributes:
        step: the last committed one.
        steps_left: until the end of the job.
        plan: in force.
        cluster: with speeds as they are believed to be.
        loads: of the router.
        seconds: slot -> compute seconds of a step, measured; empty if unknown.
        prices: seconds of a round and of an operation, dense and of experts, as `PaceMeter` learned them.
    """

    step: int
    steps_left: int
    plan: Plan
    cluster: Cluster
    loads: ExpertLoads
    seconds: Mapping[int, float]
    prices: Sequence[float] | None = None


class Proposals:
    """Asks the planner.

    Args:
        config: of the job.
        shape: of the model.
        lines: of the model.
        workload: a step.
        offer: power as the fourth lever; None: there is none.
    """

    def __init__(
        self, config: BalanceConfig, shape: ModelShape, lines: Lines, workload: Workload, offer: Offer | None = None
    ) -> None:
        self._config, self._shape, self._lines, self._workload, self._offer = config, shape, lines, workload, offer

    def with_power(self, offer: Offer) -> Proposals:
        """The same, with watts as a lever."""
        return Proposals(self._config, self._shape, self._lines, self._workload, offer)

    def compensation(self, situation: Situation) -> tuple[Plan | None, Adjustment]:
        """What to do about speeds: the plan to go on with (None: none pays), and all that is to be said of it."""
        request = self._request(situation)
        found = compensate(request, boost=None if self._offer is None else self._offer.boost)
        adjustment = Adjustment(
            kind="compensation",
            step=situation.step,
            what=found.lever or "nothing",
            why=f"{_slow(situation)}: {found.line}",
            predicted_gain=found.gain,
            predicted_move_s=found.move_s,
            moved_bytes=found.moved_bytes,
            speeds_ppm=dict(found.speeds_ppm),
        )
        if found.lever is None or found.gain < self._config.least_gain:
            return None, adjustment
        if self._offer is not None and found.lever == "power":
            watts = self._offer.boost.latest
            assert watts is not None
            adjustment.limits_w = dict(watts.limits_w)
            adjustment.before_w = {slot: self._offer.in_force_w[slot] for slot in watts.limits_w}
            adjustment.why += f"; {self._offer.line()}"
        return self._mirrored(found.plan, situation), adjustment

    def rebalance(self, situation: Situation) -> tuple[Plan | None, Adjustment]:
        """What to do about loads: likewise."""
        request = self._request(situation)
        planned = make_plan(request)
        report, plan = planned.report, planned.plan
        chosen = next((one for one in report.alternatives if one.chosen), None)
        now = report.current or report.predicted
        gain = now.total / report.predicted.total - 1
        adjustment = Adjustment(
            kind="rebalance",
            step=situation.step,
            what=chosen.name if chosen else "plan",
            why="",
            predicted_gain=gain,
            predicted_move_s=report.move_s,
            moved_bytes=report.moved_bytes,
            speeds_ppm={slot: situation.cluster.speeds_ppm[slot] for slot in situation.plan.slots},
        )
        saved = (now.total - report.predicted.total) * request.horizon_steps
        if _same(plan, situation.plan):
            adjustment.why = f"skip: {report.skipped or 'the plan in force is the best found'}"
            return None, adjustment
        step = f"{now.total:.4g} -> {report.predicted.total:.4g} s a step"
        if gain < self._config.least_gain:
            adjustment.why = f"skip: {adjustment.what} would gain {gain:.1%}, less than {self._config.least_gain:.1%}"
            return None, adjustment
        if saved <= report.move_s:
            adjustment.why = (
                f"skip: {adjustment.what} would gain {saved:.3g} s in {request.horizon_steps} steps and take "
                f"{report.move_s:.3g} s to get there"
            )
            return None, adjustment
        adjustment.why = (
            f"{adjustment.what}: {step}, predicted gain {gain:.1%} ({saved:.3g} s in {request.horizon_steps} steps), "
            f"{report.moved_bytes:,} bytes in {report.move_s:.3g} s"
        )
        return self._mirrored(plan, situation), adjustment

    # What the planner is asked.

    def _request(self, situation: Situation) -> PlanRequest:
        plan = situation.plan
        return PlanRequest(
            cluster=situation.cluster,
            shape=self._shape,
            workload=self._workload,
            hardware=self._config.hardware or self._as_measured(situation),
            loads=situation.loads,
            num_replicas=len(plan.replicas),
            redundancy=plan.redundancy,
            limits=Limits(max_tp=max(len(lane.slots) for lane in plan.lanes), physical_experts=self._copies(plan)),
            current=plan,
            horizon_steps=max(1, min(situation.steps_left, self._config.horizon_steps)),
        )

    def _copies(self, plan: Plan) -> int | None:
        """Copies per layer and replica that the plan has; None: every expert is there once."""
        axes = self._lines_of_experts()
        most = 0
        for axis in axes:
            by_slot = plan.holders.by_slot(axis)
            for slots in plan.replicas:
                units = sum(hi - lo for slot in slots for lo, hi in by_slot.get(slot, ()))
                most = max(most, units // self._shape.units_per_expert)
        return most if most > self._shape.num_experts else None

    def _lines_of_experts(self) -> list[str]:
        found: list[str] = []
        for line in self._lines.values():
            if line.units_per_expert is not None and line.axis not in found:
                found.append(line.axis)
        return found

    def _as_measured(self, situation: Situation) -> HardwareProfile:
        """The assumed host, as fast as this job's slots have computed: a round, dense work and experts each."""
        plan, hardware = situation.plan, HOST
        if not situation.seconds or situation.prices is None:
            return hardware
        _, dense, expert = (max(price, max(situation.prices[1:]) * _LEAST_PRICE) for price in situation.prices)
        size = self._workload.parameter_bytes
        hardware = replace(
            HOST,
            flops_per_s={size: 1 / dense},
            expert_efficiency=dense / expert,
            memory_bytes_per_s=None,
            launch_s=0.0,
        )
        products = self._busy_s(hardware, situation)
        launches = self._busy_s(replace(hardware, launch_s=1.0), situation)
        rounds = max(1.0, max(lane.num_sequences for lane in plan.lanes) / self._workload.micro_batch_size)
        count = float(np.median([launches[slot] - products[slot] for slot in plan.slots])) / rounds
        hardware = replace(hardware, launch_s=situation.prices[0] / count if count > 0 else 0.0)
        busy = self._busy_s(hardware, situation)
        speeds = situation.cluster.speeds_ppm
        # Predicted at full speed.
        ratios = [
            seconds * speeds[slot] / 1e6 / busy[slot]
            for slot, seconds in situation.seconds.items()
            if busy[slot] > 0 and seconds > 0
        ]
        return slowed(hardware, float(np.median(ratios))) if ratios else hardware

    def _busy_s(self, hardware: HardwareProfile, situation: Situation) -> dict[int, float]:
        """Slot -> predicted compute seconds of a step under the plan in force, at full speed."""
        plan = situation.plan
        predicted = step_time(
            replace(plan, speeds_ppm=(1_000_000,) * len(plan.slots)),
            shape=self._shape,
            workload=self._workload,
            cluster=situation.cluster,
            hardware=hardware,
            loads=situation.loads,
        )
        return {slot: sum(predicted.by_slot[slot][part] for part in _COMPUTE) for slot in plan.slots}

    def _mirrored(self, plan: Plan, situation: Situation) -> Plan:
        """With all mirrors in place, so that nothing is left to be completed afterwards."""
        return plan_mirrors(plan, situation.cluster, self._lines)


def slowed(hardware: HardwareProfile, factor: float) -> HardwareProfile:
    """A profile that computes so many times as slowly; links stay."""
    memory = hardware.memory_bytes_per_s
    return replace(
        hardware,
        flops_per_s={size: speed / factor for size, speed in hardware.flops_per_s.items()},
        memory_bytes_per_s=None if memory is None else memory / factor,
        launch_s=hardware.launch_s * factor,
    )


def _same(plan: Plan, other: Plan) -> bool:
    return plan is other or replace(plan, number=other.number) == other


def _slow(situation: Situation) -> str:
    speeds = situation.cluster.speeds_ppm
    off = {slot: speeds[slot] for slot in situation.plan.slots if speeds[slot] != 1_000_000}
    if not off and len(situation.plan.slots) < len(situation.cluster.slots):
        return f"{len(situation.plan.slots)} of {len(situation.cluster.slots)} slots train"
    if not off:
        return "all slots are equally fast again"
    return "speeds " + ", ".join(f"slot {slot} {speed / 1e6:.2f}" for slot, speed in off.items())
