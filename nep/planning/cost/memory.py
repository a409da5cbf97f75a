"""Bytes that each slot needs under a plan, by kind. The busiest slot's counts, never the mean."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np

from nep.planning.cost.dispatch_rows import hit_chance, inclusion
from nep.planning.cost.held import Floats, elements, expert_axes, expert_units, held_layers, vocab_rows
from nep.planning.cost.workload import Workload
from nep.planning.layout import Lines, axis_lines, axis_unit_numel, count_units, subtract
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Lane, Plan
from nep.planning.shapes import ModelShape, parameter_lines

KINDS = ("parameters", "gradients", "state", "mirrors", "staging", "activations")
"""Kinds of memory, in order: what a slot computes with; its accumulated gradients and the finished sums of
what it owns and mirrors; master weights and moments that it owns; the same that it mirrors; messages of
transfers in flight; what the backward needs of the forward, with the head's logits."""

CHANGE_KINDS = ("old", "new", "staging")
"""Kinds of memory while a layout changes: the layout in force, what of the next one lies elsewhere, messages."""


@dataclass(frozen=True)
class Memory:
    """Bytes by slot and kind.

    Attributes:
        by_slot: slot -> kind -> bytes.
    """

    by_slot: Mapping[int, Mapping[str, int]]

    def total(self, slot: int) -> int:
        """Bytes of one slot."""
        return sum(self.by_slot[slot].values())

    @property
    def busiest(self) -> tuple[int, int]:
        """The slot that needs most (the lowest of equals) and how many bytes."""
        slot = max(self.by_slot, key=lambda slot: (self.total(slot), -slot))
        return slot, self.total(slot)

    def excess(self, limits: Mapping[int, int | None]) -> dict[int, int]:
        """Slots that need more than they have, and by how many bytes; a limit of None is none."""
        found: dict[int, int] = {}
        for slot in self.by_slot:
            limit = limits.get(slot)
            if limit is not None and self.total(slot) > limit:
                found[slot] = self.total(slot) - limit
        return found


def step_memory(
    plan: Plan,
    *,
    shape: ModelShape,
    workload: Workload,
    loads: ExpertLoads | None = None,
    shares: Floats | None = None,
) -> Memory:
    """What a training step needs at its peak, if all kinds peak together.

    Args:
        plan: who holds, owns and mirrors what. Mirrors kept on the host take no device memory.
        shape: the model.
        workload: the step.
        loads: of the MoE layers; None means equal loads.
        shares: see `nep.planning.cost_model.step_time`.
    """
    lines = parameter_lines(shape)
    held, owned, mirrored = (
        dict(zip(plan.slots, elements(layout, plan.slots, lines).astype(int).tolist(), strict=True))
        for layout in (plan.holders, plan.owners, plan.mirrors)
    )
    if plan.redundancy == "host":
        mirrored = dict.fromkeys(mirrored, 0)
    activations = _activations(plan, shape, workload, lines, loads, shares)
    staging = _staging(plan, workload, lines)
    wide = workload.accumulation_bytes
    return Memory(
        {
            slot: {
                "parameters": held[slot] * workload.parameter_bytes,
                "gradients": (held[slot] + owned[slot] + mirrored[slot]) * wide,
                "state": owned[slot] * workload.state_bytes,
                "mirrors": mirrored[slot] * workload.state_bytes,
                "staging": staging[slot],
                "activations": activations[slot],
            }
            for slot in plan.slots
        }
    )


def change_memory(before: Plan, after: Plan, *, shape: ModelShape, workload: Workload) -> Memory:
    """What a change of layout needs between two steps: the next layout is received before the old is freed.

    Parameters and state of an axis that a slot keeps exactly as they are stay in place and count once. What
    comes from other slots is staged in messages first. There are no activations between steps, and the
    accumulated gradients of the old layout are already summed; its finished sums are kept.
    """
    lines = parameter_lines(shape)
    numel = axis_unit_numel(lines)
    slots = sorted({*before.slots, *after.slots})
    state, narrow = workload.state_bytes + workload.accumulation_bytes, workload.parameter_bytes
    pairs = (
        (before.holders, after.holders, narrow),
        (before.owners, after.owners, state),
        (before.mirrors, after.mirrors, state),
    )
    by_slot: dict[int, dict[str, int]] = {slot: dict.fromkeys(CHANGE_KINDS, 0) for slot in slots}
    for slot, kinds in by_slot.items():
        for axis, size in numel.items():
            had = [*before.owners.intervals(axis, slot), *before.mirrors.intervals(axis, slot)]
            for index, (old, new, width) in enumerate(pairs):
                was, becomes = old.intervals(axis, slot), new.intervals(axis, slot)
                kinds["old"] += count_units(was) * size * width
                if was == becomes:
                    continue
                kinds["new"] += count_units(becomes) * size * width
                # Parameters of what a slot owns or mirrors can be copied from its own master weights.
                arriving = subtract(becomes, was if index == 0 else had)
                wire = narrow if index == 0 else workload.state_bytes
                kinds["staging"] += count_units(arriving) * size * wire
    return Memory(by_slot)


def expert_unit_bytes(shape: ModelShape, workload: Workload, *, num_replicas: int, mirrored: bool) -> int:
    """Bytes that one unit of one layer's experts costs the slot that holds it.

    Parameter and gradient, and an equal share of its state: each of the replicas' holders owns a part, and
    mirrors another one where state is mirrored on devices.
    """
    wide = workload.accumulation_bytes
    state = (workload.state_bytes + wide) * (2 if mirrored else 1)
    elements = 3 * shape.neuron_block * shape.hidden_size
    return elements * (workload.parameter_bytes + wide) + ceil(elements * state / num_replicas)


def expert_units_limit(memory: Memory, slot: int, limit_bytes: int, *, held_units: int, unit_bytes: int) -> int:
    """How many units of experts a slot can hold, over all layers, beside everything else that it needs.

    Args:
        memory: of a plan in which the slot holds ``held_units``; what is not proportional to them stays.
        slot: the slot.
        limit_bytes: of its memory.
        held_units: units of experts that it holds in that plan, over all layers.
        unit_bytes: see `expert_unit_bytes`.
    """
    rest = memory.total(slot) - held_units * unit_bytes
    return max(0, (limit_bytes - rest) // unit_bytes)


def _staging(plan: Plan, workload: Workload, lines: Lines) -> dict[int, int]:
    """Two messages of the largest bucket, or the one message of everything: gradients sent, sums received.

    A slot packs what others own of what it holds, and gets from each other holder what it owns.
    """
    numel = axis_unit_numel(lines)
    buckets: dict[int, dict[int, float]] = {}
    for axis, line in axis_lines(lines).items():
        bucket = buckets.setdefault(line.layer if workload.buckets else 0, dict.fromkeys(plan.slots, 0.0))
        held = {slot: count_units(units) for slot, units in plan.holders.by_slot(axis).items()}
        owned = {slot: count_units(units) for slot, units in plan.owners.by_slot(axis).items()}
        copies = sum(held.values()) / line.num_units
        # A collective adds up on the way; straight to the owner every holder's piece has its own place.
        pieces = 1.0 if workload.grad_sync == "reduce_scatter" else max(copies - 1, 0.0)
        for slot, units in held.items():
            bucket[slot] += max(units - owned.get(slot, 0), 0) * numel[axis]
        for slot, units in owned.items():
            bucket[slot] += units * pieces * numel[axis]
    in_flight = 2 if workload.buckets else 1
    return {
        slot: in_flight * workload.accumulation_bytes * ceil(max(bucket[slot] for bucket in buckets.values()))
        for slot in plan.slots
    }


def _activations(
    plan: Plan,
    shape: ModelShape,
    workload: Workload,
    lines: Lines,
    loads: ExpertLoads | None,
    shares: Floats | None,
) -> dict[int, int]:
    """Tensors that the backward needs, for one micro-batch; rows as expected from the loads."""
    layers = expert_axes(lines)
    popularity = (loads or ExpertLoads.uniform(len(layers), shape.num_experts)).normalised().mean
    chance = inclusion(popularity, shape.top_k)
    where = [axis_lines(lines)[axis].layer for axis in layers]
    found: dict[int, int] = {}
    known: dict[object, list[float]] = {}
    lanes_of: dict[int, list[Lane]] = {}
    for lane in plan.lanes:
        lanes_of.setdefault(lane.replica, []).append(lane)
    for index, slots in enumerate(plan.replicas):
        lanes = lanes_of[index]
        key = (
            tuple((tuple(map(slots.index, lane.slots)), lane.num_sequences) for lane in lanes),
            tuple(tuple(by.get(slot, ()) for slot in slots) for by in plan.holders.cuts.values()),
        )
        if shares is None and key in known:
            found |= {slot: ceil(size) for slot, size in zip(slots, known[key], strict=True)}
            continue
        units, mine = expert_units(plan.holders, slots, lines)
        if shares is not None:
            columns = [plan.slots.index(slot) for slot in slots]
            mine = np.where(units > 0, shares[:, :, columns], 0.0)
        tokens, own = np.zeros(len(slots)), np.zeros(len(slots))
        for lane in lanes:
            places = [slots.index(slot) for slot in lane.slots]
            tokens[places] = min(lane.num_sequences, workload.micro_batch_size) * workload.seq_len
            own[places] = tokens[places] / len(places)
        rows = own.sum() * hit_chance(chance, mine, shape.top_k)
        pairs = own.sum() * shape.top_k * popularity[:, :, None] * mine
        # Rows as received, and gate and up of every slice's neurons.
        experts = rows * shape.hidden_size + 2 * (pairs * units * shape.neuron_block).sum(axis=1)
        per_layer = _attention_bytes(plan, slots, shape, workload, lines, tokens, own)
        per_layer[where] += experts * workload.parameter_bytes
        if workload.recompute:
            inputs = len(per_layer) * own * shape.hidden_size * workload.parameter_bytes
            needed = inputs + per_layer.max(axis=0)
        else:
            needed = per_layer.sum(axis=0)
        # Logits and their gradient, in the parameters' and in the accumulation dtype.
        logits = tokens * vocab_rows(plan.holders, slots, lines)
        needed = needed + logits * 2 * (workload.parameter_bytes + workload.accumulation_bytes)
        known[key] = needed.tolist()
        found |= {slot: ceil(size) for slot, size in zip(slots, known[key], strict=True)}
    return found


def _attention_bytes(
    plan: Plan,
    slots: tuple[int, ...],
    shape: ModelShape,
    workload: Workload,
    lines: Lines,
    tokens: Floats,
    own: Floats,
) -> Floats:
    """[layers, s]: residual stream, norms, projections and output of attention; router.

    Args:
        plan: for its holders.
        slots: of one replica.
        shape: the model.
        workload: the step.
        lines: the model's.
        tokens: [s], of the slot's lane.
        own: [s], those that the slot norms and routes.
    """
    held = held_layers(plan.holders, slots, lines)
    values = shape.value_head_dim or shape.head_dim
    # Latents are projected up to keys and values of every head.
    keys = held.heads if shape.kv_latent_size else held.kv_heads
    latent = held.kv_heads * (shape.kv_latent_size + shape.rope_head_dim)
    # Of the lane's tokens: rotated queries, keys, values, output, and the output in the order of its
    # projection; the scores' normalisers in float32; gate and up of what every token visits.
    wide = held.heads * (shape.head_dim + 2 * values) + keys * (shape.head_dim + values) + latent
    projected = tokens * (wide + 2 * held.neurons) * workload.parameter_bytes
    scores = tokens * held.heads * 4
    # Of the slot's own: input and norm of both halves, output of the experts; router's chances, ids, weights.
    stream = own * 5 * shape.hidden_size * workload.parameter_bytes
    routing = own * (shape.num_experts * workload.accumulation_bytes + shape.top_k * 16)
    return np.asarray(projected + scores + stream + routing)
