"""A large change in stages: each of them a plan that could stay, and the last one the goal."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nep.planning.cluster import Cluster
from nep.planning.compensate import merge_replicas
from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.workload import Workload
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.planner import plan_from_scratch, plan_mirrors
from nep.planning.search.make import make_plan
from nep.planning.search.request import PlanRequest
from nep.planning.shapes import parameter_lines, preset
from nep.planning.stages import count_stages, next_stage, reached
from nep.planning.validation import check_runnable

SHAPE = replace(preset("debug"), num_layers=5)
LINES = parameter_lines(SHAPE)
CLUSTER = Cluster.uniform(6, 3)
WORKLOAD = Workload(global_batch_size=12, micro_batch_size=2, seq_len=16, parameter_bytes=8)
LAYER_BYTES = 8 * 3 * SHAPE.num_experts * SHAPE.ffn_hidden_size * SHAPE.hidden_size


@cache
def plans(seed: int, replicas: int) -> tuple[Plan, Plan]:
    """A plan for equal loads, and where it should go for others."""
    now = plan_from_scratch(CLUSTER, LINES, num_replicas=replicas, global_batch_size=12)
    loads = ExpertLoads(mean=np.random.default_rng(seed).gamma(0.5, size=(5, SHAPE.num_experts)) + 0.01)
    request = PlanRequest(
        cluster=CLUSTER.with_speeds({1: 700_000}),
        shape=SHAPE,
        workload=WORKLOAD,
        hardware=HardwareProfile(name="free links", flops_per_s={8: 1e9}),
        loads=loads,
        num_replicas=replicas,
        current=now,
    )
    return now, plan_mirrors(make_plan(request).plan, CLUSTER, LINES)


@settings(max_examples=12)
@given(seed=st.integers(0, 5), replicas=st.sampled_from([1, 2]), most=st.integers(1, 8 * LAYER_BYTES))
def test_every_stage_is_a_plan_and_the_last_one_is_the_goal(seed: int, replicas: int, most: int) -> None:
    now, goal = plans(seed, replicas)
    stage, stages = now, 0
    while not reached(stage, goal):
        before, stage = stage, next_stage(stage, goal, LINES, most_bytes=most, parameter_bytes=8)
        stages += 1
        assert stage.number == before.number + 1
        assert stages <= SHAPE.num_layers + 1, "every stage gets nearer"
        check_runnable(stage, LINES, slots=range(6), global_batch_size=12)
        assert not stage.unprotected(LINES)
        assert (stage.lanes, stage.speeds_ppm) == (goal.lanes, goal.speeds_ppm), "what costs nothing comes first"
    assert stages == count_stages(now, goal, LINES, most_bytes=most, parameter_bytes=8)


def test_without_a_limit_all_moves_at_once_and_with_one_a_layer_at_a_time() -> None:
    now, goal = plans(1, 1)
    assert count_stages(now, goal, LINES, most_bytes=None, parameter_bytes=8) == 1
    assert count_stages(now, goal, LINES, most_bytes=1, parameter_bytes=8) == SHAPE.num_layers
    assert 1 < count_stages(now, goal, LINES, most_bytes=LAYER_BYTES, parameter_bytes=8) <= SHAPE.num_layers
    assert count_stages(now, replace(now, number=7), LINES, most_bytes=1, parameter_bytes=8) == 0


def test_other_replicas_come_at_once() -> None:
    now, _ = plans(1, 2)
    goal = merge_replicas(now, dict.fromkeys(range(6), 0))
    assert count_stages(now, goal, LINES, most_bytes=1, parameter_bytes=8) == 1


@pytest.mark.parametrize("lost", [0, 4])
def test_a_stage_survives_a_failure_like_any_plan(lost: int) -> None:
    now, goal = plans(2, 2)
    stage = next_stage(now, goal, LINES, most_bytes=1, parameter_bytes=8)
    live = [slot for slot in range(6) if slot != lost]
    for axis in stage.owners.cuts:
        kept = stage.owners.restrict(live).covered(axis) + stage.mirrors.restrict(live).covered(axis)
        assert sum(hi - lo for lo, hi in kept) >= stage.owners.covered(axis)[-1][1]
