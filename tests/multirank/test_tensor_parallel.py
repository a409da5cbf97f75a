"""Lanes of several slots: any cut of heads, vocabulary and experts has the gradients of the whole model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch

from nep.moe.aux_losses import AuxLosses
from nep.planning.layout import Layout, Line, LineKind, Lines, arrange, axis_lines, normalize
from nep.planning.plan import Lane, Plan
from nep.planning.shapes import ModelShape, parameter_lines
from nep.testing.reference import reference_gradients
from nep.testing.threads import run_slots
from tests.multirank.steps import (
    BATCH,
    SHAPE,
    assert_close,
    collect,
    make_state,
    samples,
    step_sums,
    whole_model,
)

Lanes = Sequence[Sequence[Sequence[int]]]  # replica -> lane -> slots


def runs(units: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return normalize((unit, unit + 1) for unit in units)


def cut_unevenly(num_units: int, parts: int) -> list[list[int]]:
    """Contiguous parts, the earlier ones larger; some may be empty."""
    bounds = [round(num_units * (index / parts) ** 1.5) for index in range(parts + 1)]
    return [list(range(lo, hi)) for lo, hi in itertools.pairwise(bounds)][::-1]


def lane_plan(lanes: Lanes, shape: ModelShape, shares: Sequence[int]) -> Plan:
    """A plan made without the planner, unit by unit."""
    lines = parameter_lines(shape)
    group = shape.num_heads // shape.num_kv_heads
    held: dict[str, dict[int, tuple[tuple[int, int], ...]]] = {}
    for axis, line in axis_lines(lines).items():
        held[axis] = {}
        for replica in lanes:
            everyone = [slot for lane in replica for slot in lane]
            if line.kind is LineKind.EXPERTS:
                for slot, units in zip(everyone, cut_unevenly(line.num_units, len(everyone)), strict=True):
                    held[axis][slot] = arrange(runs(units), line.units_per_expert)
                continue
            for lane in replica:
                for slot, units in hold_in_lane(line, lane, shape.num_heads, group).items():
                    held[axis][slot] = runs(units)
    slots = sorted(slot for replica in lanes for lane in replica for slot in lane)
    owners, mirrors = own(held, lines, slots)
    flat = [(index, lane) for index, replica in enumerate(lanes) for lane in replica]
    return Plan(
        number=1,
        slots=tuple(slots),
        replicas=tuple(tuple(sorted(slot for lane in replica for slot in lane)) for replica in lanes),
        lanes=tuple(Lane(index, tuple(lane), share) for (index, lane), share in zip(flat, shares, strict=True)),
        holders=Layout(held),
        owners=owners,
        mirrors=mirrors,
        redundancy="device",
        speeds_ppm=(1_000_000,) * len(slots),
    )


def hold_in_lane(line: Line, lane: Sequence[int], num_heads: int, group: int) -> dict[int, list[int]]:
    if line.kind is LineKind.WHOLE:
        return {slot: [0] for slot in lane}
    if line.kind is LineKind.VOCAB:
        return dict(zip(lane, cut_unevenly(line.num_units, len(lane)), strict=True))
    heads = cut_unevenly(num_heads, len(lane))
    if line.kind is LineKind.KV_HEADS:
        heads = [sorted({head // group for head in part}) for part in heads]
    return dict(zip(lane, heads, strict=True))


def own(held: dict, lines: Lines, slots: Sequence[int]) -> tuple[Layout, Layout]:
    """Owners in turn among a unit's holders; the next slot mirrors."""
    owned: dict[str, dict[int, list[int]]] = {}
    mirrored: dict[str, dict[int, list[int]]] = {}
    for axis, line in axis_lines(lines).items():
        owned[axis], mirrored[axis] = {}, {}
        for unit in range(line.num_units):
            holders = [slot for slot in slots if any(lo <= unit < hi for lo, hi in held[axis].get(slot, ()))]
            owner = holders[unit % len(holders)]
            owned[axis].setdefault(owner, []).append(unit)
            mirror = slots[(slots.index(owner) + 1) % len(slots)]
            mirrored[axis].setdefault(mirror, []).append(unit)
    return tuple(
        Layout({axis: {slot: runs(units) for slot, units in by_slot.items()} for axis, by_slot in part.items()})
        for part in (owned, mirrored)
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
    owned = collect(plan.owners, {slot: state.owned.grad_sum for slot, state in states.items()}, lines)
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
        shape, whole_model(lines), tokens, targets, z_loss=losses.z, balance_loss=losses.balance
    )
    _, without = reference_gradients(shape, whole_model(lines), tokens, targets)
    router = "layers.0.moe.router.weight"
    assert (expected[router] - without[router]).abs().max() > 0.01 * without[router].abs().max()
    owned = collect(plan.owners, {slot: state.owned.grad_sum for slot, state in states.items()}, lines)
    assert_close({name: tensor / targets.size for name, tensor in owned.items()}, expected)
    assert sum(sums.values()) / targets.size == pytest.approx(loss, rel=1e-12)
