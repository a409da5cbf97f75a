"""What the emulation is compared with the planner's cost model on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from nep.planning.cluster import Cluster
from nep.planning.cost.hardware import HardwareProfile, Link
from nep.planning.cost.profiles import published_profile
from nep.planning.cost.workload import Workload
from nep.planning.plan import Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.shapes import ModelShape, parameter_lines, preset
from nep.testing.emulation.run import EmulatedRun, run_emulated
from nep.testing.emulation.setting import LABEL, Emulation

Build = Callable[[ModelShape, torch.dtype], nn.Module]

_H100 = published_profile("h100-sxm")

IDEAL = HardwareProfile(
    name="ideal, as fast as an H100",
    flops_per_s={2: _H100.speed(2) * _H100.gemm_efficiency},
    scale_up=Link(bytes_per_s=_H100.scale_up.bytes_per_s),
    network=Link(bytes_per_s=_H100.network.bytes_per_s),
)
"""Products take operations over speed, messages bytes over bandwidth, nothing else takes any time."""

MIXTRAL_LIKE = replace(preset("mixtral-8x7b"), name="Mixtral-like", num_layers=4, vocab_size=16)
FINE_GRAINED = replace(
    MIXTRAL_LIKE,
    name="fine-grained",
    hidden_size=2048,
    ffn_hidden_size=1408,
    num_experts=64,
    top_k=6,
    num_heads=16,
    num_kv_heads=4,
)
"""As many experts, as small, as DeepSeek-V2-Lite has (arXiv 2405.04434), without its shared ones."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job to emulate and to predict.

    Attributes:
        name: for people.
        slots: of the job; nodes are the replicas' first slots.
        replicas: copies of the model.
        failed: slots that fail one after the other before the run; the plan is what recovery leaves.
        slow: slot -> speed.
        planned: the plan knows the speeds.
        lane_slots: most slots of a lane.
        sequences: per slot.
        micro_batch_size: sequences that a lane runs at a time.
        shape: the model.
        hardware: the accelerators.
        seq_len: see `Emulation`; the slots of a lane share its tokens, so it needs more of them.
        pace: wall seconds of an emulated second.
    """

    name: str
    slots: int = 16
    replicas: int = 2
    failed: tuple[int, ...] = ()
    slow: Mapping[int, float] = field(default_factory=dict)
    planned: bool = True
    lane_slots: int = 1
    sequences: int = 8
    micro_batch_size: int = 8
    shape: ModelShape = MIXTRAL_LIKE
    hardware: HardwareProfile = IDEAL
    seq_len: int = 16
    pace: float = 6.0

    def emulation(self, build: Build, pace: float | None = None) -> Emulation:
        """What to emulate.

        Args:
            build: see `Emulation.build`.
            pace: another one than the case's.
        """
        slow = self.slow
        return Emulation(
            shape=self.shape,
            workload=Workload(
                global_batch_size=self.sequences * self.slots,
                micro_batch_size=self.micro_batch_size,
                seq_len=4096,
                grad_sync="point_to_point",
                overlap=True,
            ),
            hardware=self.hardware,
            cluster=Cluster.uniform(self.slots, self.slots // self.replicas),
            build=build,
            speed=lambda slot, step, now_s: slow.get(slot, 1.0),
            pace=self.pace if pace is None else pace,
            seq_len=self.seq_len,
        )

    def plan(self) -> Plan:
        """The plan that the job runs under."""
        lines = parameter_lines(self.shape)
        cluster = Cluster.uniform(self.slots, self.slots // self.replicas)
        if self.planned:
            cluster = cluster.with_speeds(self._ppm())
        plan = plan_from_scratch(
            cluster,
            lines,
            num_replicas=self.replicas,
            global_batch_size=self.sequences * self.slots,
            lane_slots=self.lane_slots,
        )
        for slot in self.failed:
            cluster = cluster.fail([slot])
            plan = plan_mirrors(plan_after_failure(plan, cluster, lines), cluster, lines)
        return plan

    def as_it_is(self, plan: Plan) -> Plan:
        """The plan with the speeds that slots really have, for the prediction."""
        ppm = self._ppm()
        return replace(plan, speeds_ppm=tuple(ppm.get(slot, 1_000_000) for slot in plan.slots))

    def _ppm(self) -> dict[int, int]:
        return {slot: round(speed * 1e6) for slot, speed in self.slow.items()}


DEFAULT_CASES = (
    Case(name="healthy"),
    Case(name="one slot failed", failed=(3,)),
    Case(name="both replicas cut, differently", failed=(3, 8, 12)),
    Case(name="a slow slot, planned for", slow={5: 2 / 3}),
    Case(name="a slow slot, not planned for", slow={5: 2 / 3}, planned=False),
    Case(name="lanes of 4", lane_slots=4, micro_batch_size=32),
    Case(name="lanes of 4, one slot failed", lane_slots=4, failed=(2,), micro_batch_size=32),
    Case(name="fine-grained, one slot failed", shape=FINE_GRAINED, failed=(3,), pace=30.0),
    Case(name="one slot failed, H100 with its tiles and memory", failed=(3,), hardware=_H100),
    Case(
        name="16 layers: how much of the sums is hidden",
        slots=8,
        shape=replace(MIXTRAL_LIKE, num_layers=16),
        pace=2.5,
    ),
)

QUICK_CASES = tuple(
    replace(
        case, slots=8, shape=replace(case.shape, num_layers=2), pace=8.0, failed=tuple(slot % 8 for slot in case.failed)
    )
    for case in (DEFAULT_CASES[0], DEFAULT_CASES[1], DEFAULT_CASES[3])
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A case, predicted and emulated.

    Attributes:
        case: which.
        predicted_s: step of the cost model.
        parts: of it.
        run: what was emulated.
    """

    case: Case
    predicted_s: float
    parts: Mapping[str, float]
    run: EmulatedRun

    @property
    def ratio(self) -> float:
        """Predicted over emulated seconds, as slept."""
        return self.predicted_s / self.run.step_s()

    @property
    def timeline_ratio(self) -> float:
        """Predicted over emulated seconds of the time lines."""
        return self.predicted_s / self.run.timeline_s()

    def to_json(self) -> dict[str, Any]:
        """For scripts. Seconds are emulated ones but those of `behind_wall_s`."""
        run = self.run
        busiest = {
            kind: max(kinds.get(kind, 0.0) for kinds in run.busy_s().values())
            for kind in next(iter(run.busy_s().values()))
        }
        return {
            "label": LABEL,
            "model": self.case.shape.name,
            "layers": self.case.shape.num_layers,
            "slots": self.case.slots - len(self.case.failed),
            "predicted_s": self.predicted_s,
            "emulated_s": run.step_s(),
            "ratio": self.ratio,
            "timeline_s": run.timeline_s(),
            "timeline_ratio": self.timeline_ratio,
            "steps_s": [step.wall_s if run.pace else step.seconds for step in run.steps],
            "overlap": run.overlap(),
            "cpu_share": run.cpu_share,
            "behind_wall_s": run.behind_s,
            "pace": run.pace,
            "busiest_slot_s": busiest,
            "predicted_parts_s": dict(self.parts),
        }


def compare(case: Case, build: Build, *, steps: int = 4, pace: float | None = None) -> Compared:
    """Emulate and predict one case.

    Args:
        case: which.
        build: see `Emulation.build`.
        steps: to run; the first is left out.
        pace: another one than the case's.
    """
    plan, emulation = case.plan(), case.emulation(build, pace)
    run = run_emulated(plan, emulation, steps=steps)
    predicted = emulation.predicted(case.as_it_is(plan))
    return Compared(case=case, predicted_s=predicted.total, parts=predicted.parts, run=run)
