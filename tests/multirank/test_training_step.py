"""Gradients, updates and moves of state over threads as ranks, against the single-process reference in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from nep.parallel.grad_sync import GradSync, Return
from nep.parallel.migrate import migrate
from nep.parallel.state import SlotState
from nep.planning.layout import LineKind, axes
from nep.planning.plan import Plan
from nep.planning.shapes import ModelShape, parameter_lines
from nep.testing.parity import gather
from nep.testing.reference import reference_gradients
from nep.testing.threads import ThreadSlot, run_slots
from tests.multirank.steps import (
    BATCH,
    DTYPE,
    SHAPE,
    assert_close,
    make_plan,
    make_state,
    no_probe,
    samples,
    step_sums,
    whole_model,
)

PLANS: list[tuple[int, int, list[int]]] = [
    (1, 1, []),
    (2, 1, []),
    (3, 1, []),
    (5, 1, []),
    (7, 1, []),
    (7, 3, []),
    (4, 1, [0]),
    (4, 2, [1]),
    (5, 2, [4, 0]),
    (6, 3, [1, 2, 3]),
    (8, 2, [0, 7]),
]
SHAPES = [
    SHAPE,
    dataclasses.replace(SHAPE, tied_embeddings=True, top_k=5, sliding_window=3),
    dataclasses.replace(SHAPE, num_experts=1, top_k=1),
]


@pytest.mark.parametrize(("num_slots", "replicas", "dead"), PLANS)
@pytest.mark.parametrize("shape", SHAPES, ids=["plain", "tied, all experts", "one expert"])
def test_every_gradient_is_a_plain_sum_over_holders(
    num_slots: int, replicas: int, dead: list[int], shape: ModelShape
) -> None:
    lines = parameter_lines(shape)
    plan = make_plan(num_slots, replicas, dead, lines)
    states = {slot: make_state(plan, slot, lines) for slot in plan.slots}
    losses = run_slots(plan.replicas, lambda me: step_sums(me, states[me.slot], shape)[1])
    tokens, targets = samples().train_batch(0, BATCH)
    loss, expected = reference_gradients(shape, whole_model(lines), tokens, targets)

    owned = gather(plan.owners, {slot: state.owned.grad_sum for slot, state in states.items()}, lines)
    assert_close({name: tensor / targets.size for name, tensor in owned.items()}, expected)
    assert sum(losses.values()) / targets.size == pytest.approx(loss, rel=1e-12)
    if len(plan.slots) > 1:
        mirrored = gather(plan.mirrors, {s: state.mirrored.grad_sum for s, state in states.items()}, lines)
        for name in owned:
            assert torch.equal(mirrored[name], owned[name]), f"the mirror of {name} has other bits"


def test_lanes_without_samples_join_with_no_tokens() -> None:
    """Seven lanes and six sequences: one lane has none, in one round and in several."""
    lines = parameter_lines(SHAPE)
    plan = make_plan(7, 1, [], lines)
    assert min(lane.num_sequences for lane in plan.lanes) == 0
    states = {slot: make_state(plan, slot, lines) for slot in plan.slots}
    operations = run_slots(plan.replicas, lambda me: (step_sums(me, states[me.slot], SHAPE, 1), me.operations)[1])
    assert len({tuple(launched) for launched in operations.values()}) == 1, "collectives in different orders"


def test_members_launch_the_same_operations_in_the_same_order() -> None:
    """Per communicator; replicas of different sizes run different numbers of rounds."""
    lines = parameter_lines(SHAPE)
    plan = make_plan(5, 2, [4], lines)
    states = {slot: make_state(plan, slot, lines) for slot in plan.slots}
    operations = run_slots(plan.replicas, lambda me: (step_sums(me, states[me.slot], SHAPE, 1), me.operations)[1])
    members = {"transfer": plan.slots} | {f"dispatch-{slots[0]}": slots for slots in plan.replicas if len(slots) > 1}
    assert len(members) == 2, "the second replica has one slot, which dispatches to nobody"
    for name, slots in members.items():
        sequences = {tuple(op for communicator, op in operations[slot] if communicator == name) for slot in slots}
        assert len(sequences) == 1, name
        assert sequences.pop(), f"{name} was not used"


def test_sums_travel_while_backward_still_runs() -> None:
    """Each layer's transfer starts before the backward of the layers below it dispatches."""
    lines = parameter_lines(SHAPE)
    plan = make_plan(2, 1, [], lines)
    states = {slot: make_state(plan, slot, lines) for slot in plan.slots}
    launched = run_slots(plan.replicas, lambda me: (step_sums(me, states[me.slot], SHAPE), me.operations)[1])[0]
    order = [communicator for communicator, _ in launched]
    last_dispatch = len(order) - 1 - order[::-1].index("dispatch-0")
    # Head, and the upper of two layers; the lower layer and the embedding have nothing left to hide behind.
    assert order[:last_dispatch].count("transfer") >= 2


def test_a_move_and_back_is_the_identity_and_what_stays_is_not_copied() -> None:
    lines = parameter_lines(SHAPE)
    before = make_plan(4, 2, [], lines)
    after = make_plan(4, 2, [1], lines)
    order = tuple(axes(lines))
    first = {slot: make_state(before, slot, lines) for slot in before.slots}
    for slot, state in first.items():  # moments that tell where they are from
        for name, tensor in state.owned.moments["exp_avg"].items():
            tensor.copy_(state.owned.master[name] * 3)
            state.owned.moments["exp_avg_sq"][name].copy_(state.owned.master[name] ** 2)
            assert state.params_version == 0, slot
        for name, tensor in state.mirrored.moments["exp_avg"].items():
            tensor.copy_(state.mirrored.master[name] * 3)
            state.mirrored.moments["exp_avg_sq"][name].copy_(state.mirrored.master[name] ** 2)

    def move(me: ThreadSlot, state: SlotState, plan: Plan, live: Sequence[int]) -> SlotState:
        return migrate(
            state,
            plan,
            live=live,
            params_versions=dict.fromkeys(live, 0),
            version=0,
            lines=lines,
            dtype=DTYPE,
            communicator=me.groups.transfer,
            waiter=me.waiter,
            probe=no_probe,
        )

    # Slot 1 is gone; the three others move to the plan without it.
    moved = run_slots(after.replicas, lambda me: move(me, first[me.slot], after, after.slots))
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        expected = gather(before.owners, {s: st.owned.kinds[kind] for s, st in first.items()}, lines)
        for layout, part in ((after.owners, "owned"), (after.mirrors, "mirrored")):
            found = gather(layout, {s: getattr(st, part).kinds[kind] for s, st in moved.items()}, lines)
            assert all(torch.equal(found[name], expected[name]) for name in expected), (kind, part)
    model = whole_model(lines)
    for slot, state in moved.items():
        assert state.params_version == 0
        for name, line in lines.items():
            offset = 0
            for lo, hi in after.holders.intervals(line.axis, slot):
                held = state.params[name][offset : offset + hi - lo]
                assert torch.equal(held, model[name][None] if line.kind is LineKind.WHOLE else model[name][lo:hi])
                offset += hi - lo
    # Dense parameters are held whole before and after: the same memory serves both.
    assert moved[0].params["embedding.weight"] is first[0].params["embedding.weight"]
    assert set(order) == {line.axis for line in lines.values()}


def test_params_of_mixed_steps_are_not_trusted() -> None:
    """A slot whose parameters are not all of the committed step gets them anew from the owners."""
    lines = parameter_lines(SHAPE)
    plan = make_plan(3, 1, [], lines)
    later = dataclasses.replace(plan, number=plan.number + 1)
    states = {slot: make_state(plan, slot, lines) for slot in plan.slots}
    for tensor in states[2].params.values():
        tensor.fill_(7.0)

    def move(me: ThreadSlot) -> SlotState:
        return migrate(
            states[me.slot],
            later,
            live=plan.slots,
            params_versions={0: 0, 1: 0, 2: None},
            version=0,
            lines=lines,
            dtype=DTYPE,
            communicator=me.groups.transfer,
            waiter=me.waiter,
            probe=no_probe,
        )

    moved = run_slots(plan.replicas, move)
    fresh = make_state(plan, 2, lines)
    assert all(torch.equal(moved[2].params[name], fresh.params[name]) for name in lines)


def test_returned_parameters_carry_their_step() -> None:
    lines = parameter_lines(SHAPE)
    plan = make_plan(4, 2, [1], lines)
    states = {slot: make_state(plan, slot, lines) for slot in plan.slots}

    def body(me: ThreadSlot) -> None:
        state = states[me.slot]
        for tensor in state.owned.master.values():
            tensor.add_(1.0)
        sync = GradSync.build(state, lines, DTYPE)
        returning = Return(sync, me.groups.transfer, me.waiter, 1, no_probe)
        returning.need(0)
        assert state.params_version is None, "the later layers are still of the step before"
        returning.finish()

    run_slots(plan.replicas, body)
    expected = {name: tensor + 1.0 for name, tensor in whole_model(lines).items()}
    for slot, state in states.items():
        assert state.params_version == 1
        for name in ("embedding.weight", "final_norm.weight"):
            assert torch.equal(state.params[name].reshape(expected[name].shape), expected[name]), slot
