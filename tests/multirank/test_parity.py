"""Parity with one process: losses, every gradient before clipping, every parameter, over a table of topologies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache

import pytest
import torch

from nep.parallel.grad_sync import layer_groups
from nep.parallel.optimizer import OptimizerConfig
from nep.planning.cluster import Cluster
from nep.planning.degrees import Degrees
from nep.planning.plan import Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.shapes import ModelShape, parameter_lines
from nep.testing.parity import ParityRun, Phase, Training
from nep.testing.reference import ReferenceRun, reference_gradients
from nep.train.config import TrainConfig
from tests.multirank.plans import Lanes, cut_unevenly, lane_plan
from tests.multirank.steps import BATCH, SHAPE, assert_close, samples
from tests.multirank.test_copies import hold
from tests.multirank.training import STEPS, make_training, reference_of

OPTIMIZER = OptimizerConfig(lr=3e-3, warmup_steps=2, clip_norm=0.5)

TEN_HEADS = dataclasses.replace(SHAPE, num_heads=10, num_kv_heads=5)
EIGHT_EXPERTS = dataclasses.replace(SHAPE, num_experts=8, ffn_hidden_size=11)


def training_of(shape: ModelShape, optimizer: OptimizerConfig = OPTIMIZER) -> Training:
    return make_training(shape, TrainConfig(dtype="float64", micro_batch_size=2, optimizer=optimizer))


@lru_cache
def reference(shape: ModelShape) -> ReferenceRun:
    return reference_of(training_of(shape))


@lru_cache
def last_gradients(shape: ModelShape) -> dict[str, torch.Tensor]:
    """Of the last step, at the parameters before it."""
    before = reference_of(training_of(shape), STEPS - 1)
    return reference_gradients(shape, before.params, *samples().train_batch((STEPS - 1) * BATCH, BATCH))[1]


def assert_parity(run: ParityRun, shape: ModelShape) -> None:
    expected = reference(shape)
    assert run.losses == pytest.approx(expected.losses, rel=1e-12)
    assert_close(run.gradients[0], expected.first_gradients)
    assert_close(run.gradients[-1], last_gradients(shape))
    assert_close(run.master, expected.params)


def assert_one_order(run: ParityRun, plans: Sequence[Plan]) -> None:
    """Members of a communicator launch the same operations in the same order."""
    for plan, operations in zip(plans, run.operations, strict=True):
        members = {"transfer": plan.slots, "vote": plan.slots}
        members |= {f"dispatch-{slots[0]}": slots for slots in plan.replicas}
        members |= {f"lane-{min(lane.slots)}": lane.slots for lane in plan.lanes}
        for name, slots in members.items():
            if len(slots) > 1:
                found = {tuple(op for where, op in operations[slot] if where == name) for slot in slots}
                assert len(found) == 1 and found.pop(), f"{name}: other operations on some slots, or none"


def shrinking(num_slots: int, num_replicas: int, lane_slots: int, dead: Sequence[int], shape: ModelShape) -> list[Plan]:
    """The plan of a job and what becomes of it as slots die one after the other, mirrors completed each time."""
    lines = parameter_lines(shape)
    cluster = Cluster.uniform(num_slots, num_slots)
    plans = [
        plan_from_scratch(cluster, lines, num_replicas=num_replicas, global_batch_size=BATCH, lane_slots=lane_slots)
    ]
    for slot in dead:
        cluster = cluster.fail([slot])
        plans.append(plan_mirrors(plan_after_failure(plans[-1], cluster, lines), cluster, lines))
    return plans


def spread(plans: Sequence[Plan]) -> list[Phase]:
    """The steps shared out over the plans, all of them used."""
    return [
        Phase(plan=plan, steps=steps)
        for plan, steps in zip(plans, map(len, cut_unevenly(STEPS, len(plans))), strict=True)
        if steps
    ]


SHRINKING = {
    "tp 4 to 3, 2, 1, first dies": (4, 1, 4, [0, 1, 2], TEN_HEADS),
    "tp 4 to 3, 2, 1, last dies": (4, 1, 4, [3, 2, 1], TEN_HEADS),
    "tp 4 to 2, middle dies": (4, 1, 4, [1, 2], SHAPE),
    "ep 8 to 7, 6, 5": (8, 1, 1, [3, 0, 7], EIGHT_EXPERTS),
    "two replicas, one damaged twice": (6, 2, 1, [4, 3], SHAPE),
    "two damaged unlike beside a healthy one": (9, 3, 3, [0, 4, 5], TEN_HEADS),
    "three replicas, one lost whole": (5, 3, 1, [4], SHAPE),
    "lanes of two and one, unequal batches": (5, 2, 2, [2], TEN_HEADS),
}


@pytest.mark.parametrize("name", SHRINKING)
def test_a_job_that_loses_slots_trains_like_one_process(name: str) -> None:
    num_slots, num_replicas, lane_slots, dead, shape = SHRINKING[name]
    plans = shrinking(num_slots, num_replicas, lane_slots, dead, shape)
    phases = spread(plans)
    run = training_of(shape).run(phases)
    assert_parity(run, shape)
    assert_one_order(run, [phase.plan for phase in phases])


@pytest.mark.parametrize("together", [[[-1, 0], [1, 2]], [[-1, 0, 1, 2]]])
def test_layers_whose_gradients_travel_together_train_like_one_process(together: list[list[int]]) -> None:
    """Two buckets, and all in one; between two plans."""
    shape, lines = TEN_HEADS, parameter_lines(TEN_HEADS)
    training = training_of(shape)
    size = sum(line.num_units * line.unit_numel for line in lines.values() if line.layer <= together[0][-1]) * 8
    config = dataclasses.replace(training.config, bucket_mib=size / 2**20)
    assert layer_groups(lines, torch.float64, config.smallest_bucket_bytes) == together
    phases = spread(shrinking(5, 2, 2, [2], shape))
    run = dataclasses.replace(training, config=config).run(phases)
    assert_parity(run, shape)
    assert_one_order(run, [phase.plan for phase in phases])


@pytest.mark.parametrize("micro_batch_size", [1, 6])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_rounds_overlap_and_recomputation_change_nothing(micro_batch_size: int, overlap: bool, recompute: bool) -> None:
    plans = shrinking(6, 2, 2, [1], TEN_HEADS)
    config = TrainConfig(dtype="float64", micro_batch_size=micro_batch_size, optimizer=OPTIMIZER, recompute=recompute)
    run = make_training(TEN_HEADS, config, overlap=overlap).run(spread(plans))
    assert_parity(run, TEN_HEADS)


HAND_MADE: dict[str, tuple[Lanes, list[int], Callable[..., list[list[int]]]]] = {
    # Experts 0 and 1 over two slots each, the others whole.
    "etp 2 for some experts": ([[[0], [1], [2]]], [1, 3, 2], hold({2: [0], 3: [1], 4: [2]}, {0: [0, 1], 1: [1, 2]})),
    "the same after a loss": ([[[0], [2]]], [4, 2], hold({2: [0], 3: [1], 4: [1], 0: [0]}, {1: [0, 1]})),
    "copies": ([[[0], [1], [2]]], [2, 2, 2], hold({0: [0, 1, 2], 1: [0], 2: [1], 3: [2, 0], 4: [0]}, {})),
    "copies beside slices, in lanes": (
        [[[0, 1], [2]], [[3, 4, 5]]],
        [1, 2, 3],
        hold({0: [0, 2], 1: [0, 1, 2]}, {2: [0, 1], 3: [1, 2], 4: [0, 1, 2]}),
    ),
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_any_cut_trains_like_one_process(name: str) -> None:
    lanes, shares, experts = HAND_MADE[name]
    plan = lane_plan(lanes, TEN_HEADS, shares, experts)
    run = training_of(TEN_HEADS).run([Phase(plan=plan, steps=STEPS)])
    assert_parity(run, TEN_HEADS)
    assert_one_order(run, [plan])


@pytest.mark.parametrize("text", ["EP8", "EP4xETP2", "TP2xEP4", "TP8", "TP2xEP2xETP2"])
def test_pinned_degrees_train_like_one_process_before_and_after_a_loss(text: str) -> None:
    degrees, shape = Degrees.parse(text), dataclasses.replace(EIGHT_EXPERTS, num_heads=8, num_kv_heads=2, head_dim=2)
    lines, cluster = parameter_lines(shape), Cluster.uniform(8, 8)
    first = plan_from_scratch(cluster, lines, num_replicas=1, global_batch_size=BATCH, degrees=degrees)
    assert {len(lane.slots) for lane in first.lanes} == {degrees.tp}
    second = plan_after_failure(first, cluster.fail([5]), lines)
    run = training_of(shape).run([Phase(plan=first, steps=3), Phase(plan=second, steps=3)])
    assert_parity(run, shape)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_trains_alike_however_it_is_cut(momentum: float) -> None:
    optimizer = dataclasses.replace(OPTIMIZER, algorithm="sgd", momentum=momentum, lr=0.1)
    training = training_of(SHAPE, optimizer)
    (alone,) = shrinking(1, 1, 1, [], SHAPE)
    expected = training.run([Phase(plan=alone, steps=STEPS)])
    found = training.run(spread(shrinking(5, 2, 2, [1, 3], SHAPE)))
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert found.losses[-1] < found.losses[0]
    assert_close(found.master, expected.master)
    assert len(found.moments) == bool(momentum)
    for kind, moments in expected.moments.items():
        assert_close(found.moments[kind], moments)


CHANGES = [
    ("tp to ep", [[[0, 1, 2]]], [6], [[[0], [1], [2]]], [1, 2, 3]),
    ("one replica to two", [[[0], [1], [2], [3]]], [2, 1, 2, 1], [[[0, 3]], [[1], [2]]], [2, 3, 1]),
    ("lanes regrouped", [[[0, 1], [2, 3]]], [4, 2], [[[0, 2, 3], [1]]], [3, 3]),
]


@pytest.mark.parametrize(
    ("before", "shares", "after", "new_shares"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES]
)
def test_a_run_that_changes_its_layout_is_the_run_that_started_in_it(
    before: Lanes, shares: list[int], after: Lanes, new_shares: list[int]
) -> None:
    """Moments included."""
    first, second = lane_plan(before, TEN_HEADS, shares), lane_plan(after, TEN_HEADS, new_shares, number=2)
    changed = training_of(TEN_HEADS).run([Phase(plan=first, steps=3), Phase(plan=second, steps=STEPS - 3)])
    started = training_of(TEN_HEADS).run([Phase(plan=second, steps=STEPS)])
    assert_parity(changed, TEN_HEADS)
    assert_close(changed.master, started.master)
    for kind, moments in started.moments.items():
        assert_close(changed.moments[kind], moments)
