"""A checkpoint of any layout loads into any other: parameters, moments and the next five losses are equal."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from pathlib import Path

import pytest
import torch

from nep.moe.aux_losses import AuxLosses
from nep.planning.plan import Plan
from nep.planning.shapes import parameter_lines
from nep.testing.parity import Training, check_agreement, gather
from nep.testing.reference import ReferenceRun
from nep.train.config import TrainConfig
from nep.train.resume import Resumption
from tests.multirank.plans import lane_plan
from tests.multirank.saved import go_on, load, save
from tests.multirank.steps import BATCH
from tests.multirank.test_parity import EIGHT_EXPERTS, shrinking
from tests.multirank.test_training import FINE
from tests.multirank.training import OPTIMIZER, STEPS, assert_equals, make_training, reference_of

SAVED_AT = 1
LAYOUTS = {
    "one slot": ([[[0]]], [BATCH]),
    "ep3": ([[[0], [1], [2]]], [2, 3, 1]),
    "tp3": ([[[0, 1, 2]]], [BATCH]),
    "two replicas": ([[[0], [1]], [[2], [3]]], [2, 1, 2, 1]),
    "tp3, tp2 and tp1": ([[[0, 1, 2]], [[3, 4]], [[5]]], [1, 3, 2]),
    "unlike lanes in one replica": ([[[0, 1], [2]], [[3, 4]]], [2, 1, 3]),
    "other slots": ([[[7, 2]], [[5], [9]]], [3, 2, 1]),
}
SAVED = ["tp3", "unlike lanes in one replica", "tp3, tp2 and tp1", "one slot"]
TRAINED = list(zip([*SAVED, *SAVED], LAYOUTS, strict=False))
PAIRS = [
    pytest.param(*pair, marks=() if pair in TRAINED else pytest.mark.soak) for pair in itertools.product(SAVED, LAYOUTS)
]


def plan_of(layout: str) -> Plan:
    lanes, shares = LAYOUTS[layout]
    return lane_plan(lanes, FINE, shares)


@cache
def training() -> Training:
    """Dense and shared experts, biases and counts of the step before: everything that a checkpoint has to have."""
    losses = AuxLosses(balance=0.4, counts="previous", z=0.02)
    return make_training(
        FINE,
        TrainConfig(dtype="float64", micro_batch_size=2, optimizer=OPTIMIZER, aux_losses=losses, router_bias_rate=1e-2),
    )


@cache
def reference() -> ReferenceRun:
    return reference_of(training())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Resumption, dict[str, dict]]]:
    """Layout -> its checkpoint after a step, and the whole state by kind and name."""
    found = {}
    for layout in SAVED:
        plan = plan_of(layout)
        runs = {slot: training().start(plan, slot) for slot in plan.slots}
        runs = go_on(training(), runs, SAVED_AT)
        found[layout] = save(training(), runs, tmp_path_factory.mktemp("saved")), whole_state(runs)
    return found


def whole_state(runs: dict) -> dict[str, dict[str, torch.Tensor]]:
    first = runs[min(runs)]
    return {
        kind: gather(
            first.state.plan.owners,
            {slot: run.state.owned.kinds[kind] for slot, run in runs.items()},
            first.recipe.lines,
        )
        for kind in first.state.owned.kinds
    }


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_any_layout_loads_into_any_other(checkpoints: dict, before: str, after: str) -> None:
    """Every bit of weights and moments, at owners, mirrors and holders; and the next five steps of one process."""
    checkpoint, state = checkpoints[before]
    plan = plan_of(after)
    runs = load(training(), checkpoint, plan)
    for kind, tensors in whole_state(runs).items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, state[kind][name]), f"{kind} of {name}"
    check_agreement(plan, runs, training().lines)
    if (before, after) in TRAINED:
        assert_equals(go_on(training(), runs, STEPS), reference())


def test_a_damaged_plan_with_copies_and_slices(tmp_path: Path) -> None:
    """From eight slots to five: what the planner makes of two losses, and back to one slot."""
    plans = shrinking(8, 1, 1, [3, 0, 7], EIGHT_EXPERTS)
    some = make_training(EIGHT_EXPERTS)
    expected = reference_of(some)
    runs = go_on(some, {slot: some.start(plans[0], slot) for slot in plans[0].slots}, 2)
    for step, plan in zip((3, 4, 5), plans[1:], strict=True):
        runs = go_on(some, load(some, save(some, runs, tmp_path / str(step)), plan), step)
    alone = lane_plan([[[0]]], EIGHT_EXPERTS, [BATCH])
    assert_equals(go_on(some, load(some, save(some, runs, tmp_path / "last"), alone), STEPS), expected)


def test_another_size_of_blocks_is_the_same_model(tmp_path: Path) -> None:
    """Blocks are for kernels; a checkpoint counts neurons."""
    big, small = (dataclasses.replace(FINE, neuron_block=block) for block in (3, 2))
    runs = go_on(coarse := make_training(big), {0: coarse.start(lane_plan([[[0]]], big, [BATCH]), 0)}, 2)
    checkpoint = save(coarse, runs, tmp_path)
    fine = make_training(small)
    assert parameter_lines(big) != parameter_lines(small)
    plan = lane_plan([[[0, 1], [2]]], small, [4, 2])
    again = go_on(fine, load(fine, checkpoint, plan), STEPS)
    straight = go_on(coarse, runs, STEPS)
    for mine, its in zip(again[0].history.steps, straight[0].history.steps, strict=True):
        assert mine.loss == pytest.approx(its.loss, rel=1e-12)
