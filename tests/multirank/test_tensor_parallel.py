"""Lanes of several slots: any cut of heads, vocabulary and experts has the gradients of the whole model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nep.moe.aux_losses import AuxLosses
from nep.planning.shapes import ModelShape, parameter_lines
from nep.testing.parity import gather
from nep.testing.reference import ReferenceAux, reference_gradients
from nep.testing.threads import run_slots
from tests.multirank.plans import Lanes, lane_plan
from tests.multirank.steps import (
    BATCH,
    SHAPE,
    assert_close,
    make_state,
    samples,
    step_sums,
    whole_model,
)

WIDE = dataclasses.replace(SHAPE, num_heads=10, num_kv_heads=5)
TOPOLOGIES: list[tuple[str, Lanes, list[int], ModelShape]] = [
    ("tp2", [[[0, 1]]], [6], SHAPE),
    ("tp3 of 4 heads", [[[0, 1, 2]]], [6], SHAPE),
    ("tp4, more slots than kv heads", [[[0, 1, 2, 3]]], [6], SHAPE),
    ("tp5, a slot without heads", [[[0, 1, 2, 3, 4]]], [6], SHAPE),
    ("tp3 beside tp2 and tp1", [[[0, 1, 2]], [[3, 4]], [[5]]], [1, 3, 2], WIDE),
    ("two lanes in one replica, unlike", [[[0, 1, 2], [3]], [[4, 6]]], [2, 1, 3], WIDE),
    ("a lane without sequences", [[[0, 1], [2, 3]]], [6, 0], WIDE),
    ("tied", [[[0, 1, 2]], [[3, 4]]], [2, 4], dataclasses.replace(WIDE, tied_embeddings=True, sliding_window=3)),
]


@pytest.mark.parametrize(("lanes", "shares", "shape"), [t[1:] for t in TOPOLOGIES], ids=[t[0] for t in TOPOLOGIES])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_any_cut_has_the_gradients_of_the_whole(
    lanes: Lanes, shares: list[int], shape: ModelShape, micro_batch_size: int
) -> None:
    lines = parameter_lines(shape)
    plan = lane_plan(lanes, shape, shares)
    states = {slot: make_state(plan, slot, lines) for slot in plan.slots}
    results = run_slots(
        plan.replicas,
        lambda me: (step_sums(me, states[me.slot], shape, micro_batch_size)[1], me.operations),
        lanes=[lane.slots for lane in plan.lanes],
    )
    tokens, targets = samples().train_batch(0, BATCH)
    loss, expected = reference_gradients(shape, whole_model(lines), tokens, targets)
    owned = gather(plan.owners, {slot: state.owned.grad_sum for slot, state in states.items()}, lines)
    assert_close({name: tensor / targets.size for name, tensor in owned.items()}, expected)
    assert sum(own_loss for own_loss, _ in results.values()) / targets.size == pytest.approx(loss, rel=1e-12)
    for lane in plan.lanes:
        name = f"lane-{min(lane.slots)}"
        sequences = {tuple(op for where, op in results[slot][1] if where == name) for slot in lane.slots}
        assert len(sequences) == 1, f"{name}: collectives in different orders"


def test_the_loss_counts_each_token_once() -> None:
    """Counted by every slot of a lane, as a lane without sequence parallelism would, it would be too large."""
    plan = lane_plan([[[0, 1, 2]]], SHAPE, [6])
    lines = parameter_lines(SHAPE)
    losses = run_slots(
        plan.replicas,
        lambda me: step_sums(me, make_state(plan, me.slot, lines), SHAPE)[1],
        lanes=[lane.slots for lane in plan.lanes],
    )
    assert max(losses.values()) < 0.5 * sum(losses.values())
    assert all(torch.isfinite(torch.tensor(list(losses.values()))))


@pytest.mark.parametrize("name", ["tp3 of 4 heads", "two lanes in one replica, unlike", "a lane without sequences"])
@pytest.mark.parametrize("losses", [AuxLosses(z=0.3), AuxLosses(balance=0.5), AuxLosses(z=0.2, balance=0.4)])
def test_auxiliary_losses_do_not_depend_on_the_partition(name: str, losses: AuxLosses) -> None:
    """Per token, and per sequence with the counts of the lane; in micro-batches of any size."""
    _, lanes, shares, shape = next(topology for topology in TOPOLOGIES if topology[0] == name)
    lines = parameter_lines(shape)
    plan = lane_plan(lanes, shape, shares)
    states = {slot: make_state(plan, slot, lines) for slot in plan.slots}
    sums = run_slots(
        plan.replicas,
        lambda me: step_sums(me, states[me.slot], shape, 1, losses)[1],
        lanes=[lane.slots for lane in plan.lanes],
    )
    tokens, targets = samples().train_batch(0, BATCH)
    loss, expected = reference_gradients(
        shape, whole_model(lines), tokens, targets, aux=ReferenceAux(z_loss=losses.z, balance_loss=losses.balance)
    )
    _, without = reference_gradients(shape, whole_model(lines), tokens, targets)
    router = "layers.0.moe.router.weight"
    assert (expected[router] - without[router]).abs().max() > 0.01 * without[router].abs().max()
    owned = gather(plan.owners, {slot: state.owned.grad_sum for slot, state in states.items()}, lines)
    assert_close({name: tensor / targets.size for name, tensor in owned.items()}, expected)
    assert sum(sums.values()) / targets.size == pytest.approx(loss, rel=1e-12)
