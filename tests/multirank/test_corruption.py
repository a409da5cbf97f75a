"""Bits that flip in somebody's memory: found, named where that can be told, mended, and nowhere in the numbers."""

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
from nep.testing.reference import ReferenceRun
from nep.testing.threads import ThreadSlot, run_slots
from nep.train.config import TrainConfig
from tests.multirank.steps import BATCH
from tests.multirank.test_training import FINE
from tests.multirank.training import OPTIMIZER, STEPS, assert_equals, make_training, reference_of

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


@cache
def reference() -> ReferenceRun:
    """The same training by one process, in code that shares nothing with this one."""
    return reference_of(training())


def training(**changes: object) -> Training:
    options = {"dtype": "float64", "micro_batch_size": 4, "optimizer": OPTIMIZER, "state_check_every": 1, **changes}
    return make_training(SHAPE, TrainConfig(**options))  # type: ignore[arg-type]


def plan_for(num_slots: int, dead: int | None = None) -> Plan:
    cluster = Cluster.uniform(num_slots, num_slots)
    plan = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=BATCH)
    if dead is None:
        return plan
    cluster = cluster.fail([dead])
    return plan_mirrors(plan_after_failure(plan, cluster, LINES), cluster, LINES)


PLANS = {"two replicas": plan_for(4), "a damaged replica": plan_for(4, dead=1)}
AFTER = dataclasses.replace(PLANS["a damaged replica"], number=PLANS["two replicas"].number + 1)


def train(
    what: Training, plan: Plan, flips: dict[tuple[int, int, str], Flip], *, again: int = 0, alike: bool = True
) -> dict[int, SlotRun]:
    """All steps, with something done to a slot's memory in a phase of a step.

    Args:
        flips: (slot, step, phase) -> what is done.
        again: how often more, if the step is run again.
        alike: whether copies are to be the same in the end.
    """
    left = dict.fromkeys(flips, 1 + again)

    def body(me: ThreadSlot) -> SlotRun:
        run = what.start(plan, me.slot)
        what.enter(run, me, plan, 1)

        def meddle(phase: str, step: int) -> None:
            key = (me.slot, step, phase)
            if left.get(key, 0):
                left[key] -= 1
                flips[key](run)

        what.go_on(run, me, STEPS, meddle=meddle)
        return run

    runs = run_slots(plan.replicas, body, lanes=[lane.slots for lane in plan.lanes])
    assert all(count <= again for count in left.values()), "injected, and never came to it"
    if alike:
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


# Step -> slot, part, kind, bit. All layouts of what is checked, each kind of bit, two flips at once.
SPREAD: dict[str, dict[int, list[tuple[int, Part, str, int]]]] = {
    "two replicas": {
        2: [(2, "owned", "master", SIGN)],
        3: [(1, "owned", "exp_avg", EXPONENT)],
        4: [(3, "owned", "exp_avg_sq", MANTISSA), (0, "mirrored", "master", MANTISSA)],
        5: [(2, "held", "params", SIGN)],
        6: [(1, "mirrored", "exp_avg_sq", EXPONENT)],
    },
    "a damaged replica": {
        2: [(2, "mirrored", "exp_avg", SIGN)],
        3: [(3, "held", "params", EXPONENT)],
        4: [(0, "owned", "master", MANTISSA), (2, "held", "params", MANTISSA)],
        5: [(2, "owned", "exp_avg_sq", SIGN), (2, "owned", "exp_avg", MANTISSA)],
        6: [(0, "mirrored", "master", EXPONENT)],
    },
}


@pytest.mark.parametrize("plan", PLANS)
def test_flips_are_found_named_and_undone(plan: str) -> None:
    wanted: dict[tuple[int, int, str], Flip] = {}
    for step, several in SPREAD[plan].items():
        for slot in {slot for slot, *_ in several}:
            # Held ones elsewhere: where the owner is wrong, its holders are not judged.
            flips = [
                flip(part, kind, bit=bit, name="head.weight" if part == "held" else None)
                for one, part, kind, bit in several
                if one == slot
            ]
            wanted[slot, step, "backward"] = lambda run, flips=flips: [act(run) for act in flips] and None
    runs = train(training(), PLANS[plan], wanted)
    told = {(one.step, one.slot, one.part, one.kind, one.action) for one in found(runs)}
    assert told == {
        (step, slot, part, kind, "drain") for step, several in SPREAD[plan].items() for slot, part, kind, _ in several
    }
    assert_like_twin(runs, plan)


def test_the_owner_is_wrong_before_its_parameters_leave() -> None:
    """All holders got wrong parameters, and a whole forward and backward went by."""
    plan = "two replicas"

    def at_once(run: SlotRun) -> None:
        seal = run.integrity.seal_for

        def seal_and_flip(*arguments: object) -> None:
            seal(*arguments)  # type: ignore[arg-type]
            run.integrity.seal_for = seal  # type: ignore[method-assign]
            for name in ("head.weight", "final_norm.weight"):  # of the last layer: not yet on their way
                if run.state.owned.master[name].numel():
                    flip_bit(run.state.owned.master[name], 0, EXPONENT - 3)

        run.integrity.seal_for = seal_and_flip  # type: ignore[method-assign]

    runs = train(training(), PLANS[plan], {(1, 3, "apply"): at_once})
    assert found(runs) and {(one.step, one.slot, one.part) for one in found(runs)} == {(4, 1, "owned")}
    assert_like_twin(runs, plan)


def test_without_a_seal_bounds_tell_and_else_nobody_does() -> None:
    """Flips between a vote and its update are sealed with the rest: both sides are as their last update left them."""
    plan = "two replicas"
    runs = train(
        training(),
        PLANS[plan],
        {
            (1, 2, "apply"): flip("owned", "exp_avg", bit=EXPONENT),  # the update makes the weight impossible, too
            (2, 4, "apply"): flip("mirrored", "exp_avg", bit=40),
        },
    )
    assert {(one.step, one.slot, one.part, one.kind, one.action) for one in found(runs)} == {
        (3, 1, "owned", "exp_avg", "drain"),
        (3, 1, "owned", "master", "drain"),
        (5, None, "", "exp_avg", "resync"),
    }
    assert all("slots 3 and 2 differ" in one.why for one in found(runs) if one.slot is None)
    assert_like_twin(runs, plan)


def test_both_sides_of_the_same_units_are_named() -> None:
    plan, name = "two replicas", "layers.1.moe.router.weight"  # one unit
    owner = next(slot for slot, cut in PLANS[plan].owners.by_slot(LINES[name].axis).items() if cut)
    mirror = next(slot for slot, cut in PLANS[plan].mirrors.by_slot(LINES[name].axis).items() if cut)
    runs = train(
        training(),
        PLANS[plan],
        {
            (owner, 3, "backward"): flip("owned", "exp_avg", name=name),
            (mirror, 3, "backward"): flip("mirrored", "exp_avg", name=name, element=6),
        },
    )
    assert [(one.slot, one.part) for one in found(runs)] == [(owner, "owned"), (mirror, "mirrored")]


def test_flips_between_checks_are_found_at_the_next() -> None:
    """They have been in use meanwhile; from there on all copies are alike."""
    every = 3
    flips = {(1, 2, "backward"): flip("mirrored", "master", bit=51), (2, 2, "backward"): flip("held", bit=51)}
    runs = train(training(state_check_every=every), PLANS["two replicas"], flips)
    assert {(one.step, one.slot) for one in found(runs)} == {(every, None)}
    assert all(run.integrity.checks == STEPS // every + 1 for run in runs.values())


def test_what_is_only_reported_stays_and_is_told_once() -> None:
    flips = {(2, 3, "backward"): flip("mirrored", "exp_avg", bit=30)}
    runs = train(training(corruption_action="report"), PLANS["two replicas"], flips, alike=False)
    (one,) = found(runs)
    assert (one.step, one.slot, one.action) == (3, 2, "report")
    assert all(run.integrity.checks == 3 for run in runs.values()), "copies are known to differ"
    with pytest.raises(AssertionError, match="slot 2 mirrors exp_avg"):
        check_agreement(PLANS["two replicas"], runs, LINES)


def test_memory_that_cannot_be_mended_does_not_stop_the_job() -> None:
    """The same bit is wrong again each time that the step is run."""
    runs = train(training(), PLANS["two replicas"], {(3, 3, "backward"): flip("held", bit=20)}, again=5)
    assert {(one.step, one.slot) for one in found(runs)} == {(3, 3)}
    assert [entry.step for entry in runs[0].history.steps] == list(range(1, STEPS + 1))


ALARMLESS: dict[str, dict[str, object]] = {
    "float64 over layouts": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float32 and sgd": {"dtype": "float32", "optimizer": OptimizerConfig(algorithm="sgd", lr=0.05, warmup_steps=1)},
}


@pytest.mark.parametrize("name", ALARMLESS)
def test_no_false_alarm(name: str) -> None:
    """Also after slots were lost, and after one has come (threads keep what they had)."""
    what = training(**ALARMLESS[name])
    done = what.run([Phase(plan=PLANS["two replicas"], steps=3), Phase(plan=AFTER, steps=3)])
    for run in done.slots.values():
        assert run.integrity.checks == STEPS and run.history.corruptions == []


def test_a_skipped_step_is_no_alarm() -> None:
    def body(me: ThreadSlot) -> SlotRun:
        what = training()
        run = what.start(PLANS["two replicas"], me.slot)
        what.enter(run, me, PLANS["two replicas"], 1)

        def meddle(phase: str, step: int) -> None:
            if (me.slot, step, phase) == (1, 2, "backward"):
                gradient = next(tensor for tensor in run.sync.grads.values() if tensor.numel())
                gradient.view(-1)[0] = torch.inf

        what.go_on(run, me, 4, meddle=meddle)
        return run

    runs = run_slots(PLANS["two replicas"].replicas, body)
    for run in runs.values():
        assert [entry.skipped for entry in run.history.steps] == [False, True, False, False]
        assert run.history.corruptions == [] and run.integrity.checks == 4


@pytest.mark.parametrize("saw_the_vote", [(1,), (0, 3)])
def test_a_loss_is_no_alarm(saw_the_vote: tuple[int, ...]) -> None:
    """Survivors replay the step, or some roll forward."""
    what = training()
    runs = what.run_with_loss(PLANS["two replicas"], AFTER, 3, saw_the_vote)
    assert all(run.history.corruptions == [] and run.integrity.checks >= STEPS for run in runs.values())
    assert_equals(runs, reference())


@pytest.mark.parametrize(("bit", "named"), [(MANTISSA, None), (EXPONENT, 2)])
def test_a_slot_is_lost_before_the_vote_is_seen(bit: int, named: int | None) -> None:
    """The survivors' state is another one and has no seal of the time before; what differs, they find in the replay."""
    what, act = training(), flip("mirrored", "master", bit=bit, name="embedding.weight")

    def meddle(run: SlotRun, phase: str, step: int) -> None:
        if (run.slot, phase, step) == (2, "backward", 3):
            act(run)

    runs = what.run_with_loss(PLANS["two replicas"], AFTER, 3, (), meddle)
    (one,) = found(runs)
    assert (one.step, one.slot, one.kind) == (3, named, "master")
    assert_equals(runs, reference())
