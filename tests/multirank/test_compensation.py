"""A slow slot is compensated while training goes on, and nothing of what is computed changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest

from nep.planning.cluster import Cluster
from nep.planning.compensate import Compensation, Lever, compensate
from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.work import WorkOfSlots
from nep.planning.cost.workload import Workload
from nep.planning.pace import PaceMeter
from nep.planning.plan import Plan
from nep.planning.planner import plan_from_scratch
from nep.planning.search.request import PlanRequest
from nep.planning.shapes import ModelShape, parameter_lines
from nep.planning.stages import next_stage
from nep.planning.validation import check_runnable
from nep.testing.parity import Phase
from nep.testing.reference import ReferenceRun
from tests.multirank.steps import BATCH, SEQ_LEN, SHAPE
from tests.multirank.training import STEPS, assert_equals, make_training, reference_of

FREE_LINKS = HardwareProfile(name="free links", flops_per_s={8: 1e6})
EVEN = dataclasses.replace(SHAPE, num_experts=4)
WORKLOAD = Workload(global_batch_size=BATCH, micro_batch_size=2, seq_len=SEQ_LEN, parameter_bytes=8)


def speeds_of(plan: Plan, shape: ModelShape, slow: Mapping[int, float]) -> dict[int, int]:
    """What is measured when slots need so many times the seconds of the others."""
    lines, meter = parameter_lines(shape), PaceMeter()
    work = WorkOfSlots(plan, lines, tokens_per_sequence=SEQ_LEN, micro_batch_size=2).of(
        np.full((shape.num_moe_layers, shape.num_experts), BATCH * SEQ_LEN * shape.top_k / shape.num_experts)
    )
    for _ in range(8):
        meter.observe({slot: (sum(one) + 1.0) * 1e-9 * slow.get(slot, 1.0) for slot, one in work.items()}, work)
    assert meter.flagged.keys() == slow.keys()
    return meter.speeds_ppm()


def compensated(
    plan: Plan, shape: ModelShape, slow: Mapping[int, float], levers: tuple[Lever, ...], **others: object
) -> Compensation:
    return compensate(
        PlanRequest(
            cluster=Cluster.uniform(4, 4).with_speeds(speeds_of(plan, shape, slow)),
            shape=shape,
            workload=WORKLOAD,
            hardware=FREE_LINKS,
            num_replicas=len(plan.replicas),
            current=plan,
        ),
        levers=levers,
        **others,  # type: ignore[arg-type]
    )


@cache
def expected_of(shape: ModelShape) -> ReferenceRun:
    return reference_of(make_training(shape))


def first_plan(shape: ModelShape, replicas: int, tp: int = 1) -> Plan:
    return plan_from_scratch(
        Cluster.uniform(4, 4), parameter_lines(shape), num_replicas=replicas, global_batch_size=BATCH, lane_slots=tp
    )


@pytest.mark.parametrize(
    ("lever", "shape", "replicas", "tp"),
    [("batch", EVEN, 4, 1), ("cuts", EVEN, 1, 1), ("cuts", SHAPE, 1, 2), ("copies", EVEN, 2, 1), ("power", EVEN, 2, 1)],
)
def test_training_under_each_lever_equals_the_reference(
    lever: Lever, shape: ModelShape, replicas: int, tp: int
) -> None:
    plan = first_plan(shape, replicas, tp)
    others = {"boost": lambda plan, speeds: dict(speeds) | {1: 800_000}} if lever == "power" else {}
    levers: tuple[Lever, ...] = ("power", "batch") if lever == "power" else (lever,)
    found = compensated(plan, shape, {1: 1.6}, levers, **others)
    assert found.lever == lever and found.plan is not plan and found.after_s < 0.97 * found.before_s
    check_runnable(found.plan, parameter_lines(shape), slots=plan.slots, global_batch_size=BATCH)
    assert found.plan.speeds_ppm[1] < found.plan.speeds_ppm[0]
    run = make_training(shape).run([Phase(plan=plan, steps=2), Phase(plan=found.plan, steps=STEPS - 2)])
    assert_equals(run.slots, expected_of(shape))


def test_a_change_in_stages_is_exact_at_every_one() -> None:
    plan, lines = first_plan(SHAPE, 1), parameter_lines(SHAPE)
    goal = compensated(plan, SHAPE, {2: 2.0}, ("cuts",)).plan
    stages = [plan]
    while len(stages) < 4 and dataclasses.replace(goal, number=stages[-1].number) != stages[-1]:
        stages.append(next_stage(stages[-1], goal, lines, most_bytes=1, parameter_bytes=8))
    assert len(stages) == 3, "a layer at a time"
    phases = [Phase(plan=one, steps=steps) for one, steps in zip(stages, (1, 2, 3), strict=True)]
    assert_equals(make_training(SHAPE).run(phases).slots, expected_of(SHAPE))
