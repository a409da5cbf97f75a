"""Bits that flip in somebody's memory: found, named where that can be told, mended, and nothing of it in the numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Literal

import pytest
import torch

from nep.fault_tolerance.bit_flip import flip_bit
from nep.fault_tolerance.corruption import Corruption
from nep.fault_tolerance.runtime import SlotRun
from nep.parallel.optimizer import OptimizerConfig
from nep.planning.cluster import Cluster
from nep.planning.plan import Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.shapes import parameter_lines
from nep.testing.parity import Phase, Training, check_agreement
from nep.testing.threads import ThreadSlot, run_slots
from nep.train.config import TrainConfig
from tests.multirank.steps import BATCH
from tests.multirank.test_training import FINE
from tests.multirank.training import OPTIMIZER, STEPS, make_training

SHAPE = dataclasses.replace(FINE, num_layers=2, num_dense_layers=0, dense_ffn_hidden_size=0)
LINES = parameter_lines(SHAPE)
Flip = Callable[[SlotRun], None]
Part = Literal["owned", "mirrored", "held"]
SIGN, EXPONENT, MANTISSA = 63, 62, 0  # of a float64


def flip(part: Part, kind: str = "params", *, bit: int = MANTISSA, name: str | None = None, element: int = 5) -> Flip:
    """Of some tensor that the slot has, of the parameter of that name if one is given."""

    def act(run: SlotRun) -> None:
        tensors = run.state.params if part == "held" else getattr(run.state, part).kinds[kind]
        chosen = next(tensor for key, tensor in tensors.items() if tensor.numel() > element and name in (None, key))
        flip_bit(chosen, element, bit)

    return act


def training(**changes: object) -> Training:
    config = TrainConfig(
        dtype="float64", micro_batch_size=4, optimizer=OPTIMIZER, state_check_every=1, **changes  # type: ignore[arg-type]
    )
    return make_training(SHAPE, config)


def plan_for(num_slots: int, dead: int | None = None) -> Plan:
    cluster = Cluster.uniform(num_slots, num_slots)
    plan = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=BATCH)
    if dead is None:
        return plan
    cluster = cluster.fail([dead])
    return plan_mirrors(plan_after_failure(plan, cluster, LINES), cluster, LINES)


PLANS = {"two replicas": plan_for(4), "a damaged replica": plan_for(4, dead=1)}


def train(what: Training, plan: Plan, flips: dict[tuple[int, int, str], Flip]) -> dict[int, SlotRun]:
    """All steps, with something done to a slot's memory in a phase of a step, once.

    Args:
        flips: (slot, step, phase) -> what is done.
    """
    left = dict(flips)

    def body(me: ThreadSlot) -> SlotRun:
        run = what.start(plan, me.slot)
        what.enter(run, me, plan, 1)

        def meddle(phase: str, step: int) -> None:
            flip = left.pop((me.slot, step, phase), None)
            if flip is not None:
                flip(run)

        what.go_on(run, me, STEPS, meddle=meddle)
        return run

    runs = run_slots(plan.replicas, body, lanes=[lane.slots for lane in plan.lanes])
    assert not left, "injected, and never came to it"
    check_agreement(plan, runs, LINES)
    return runs


def found(runs: dict[int, SlotRun]) -> list[Corruption]:
    """The same on all slots."""
    lists = [run.history.corruptions for run in runs.values()]
    assert all(one == lists[0] for one in lists)
    return lists[0]


@cache
def twin(plan: str) -> dict[int, SlotRun]:
    """The same training without anything wrong."""
    runs = train(training(), PLANS[plan], {})
    assert found(runs) == [] and all(run.integrity.checks == STEPS for run in runs.values())
    return runs


def assert_like_twin(runs: dict[int, SlotRun], plan: str) -> None:
    """To the last bit."""
    for slot, run in runs.items():
        expected = twin(plan)[slot]
        assert [entry.loss for entry in run.history.steps] == [entry.loss for entry in expected.history.steps]
        for kind, tensors in run.state.owned.kinds.items():
            for name, tensor in tensors.items():
                assert torch.equal(tensor, expected.state.owned.kinds[kind][name]), f"{kind} of {name} on {slot}"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("bit", [SIGN, EXPONENT, MANTISSA])
@pytest.mark.parametrize("part, kind", [
    ("owned", "master"), ("owned", "exp_avg"), ("owned", "exp_avg_sq"),
    ("mirrored", "master"), ("mirrored", "exp_avg"), ("mirrored", "exp_avg_sq"), ("held", "params"),
])  # fmt: skip
def test_a_flip_is_found_named_and_undone(plan: str, part: Part, kind: str, bit: int) -> None:
    runs = train(training(), PLANS[plan], {(2, 3, "backward"): flip(part, kind, bit=bit)})
    (one,) = found(runs)
    assert (one.step, one.slot, one.part, one.kind, one.action) == (3, 2, part, kind, "drain"), one
    assert_like_twin(runs, plan)
