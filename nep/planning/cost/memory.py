"""Bytes that each slot needs under a plan, by kind. The busiest slot's counts, never the mean."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np

from nep.planning.cost.dispatch_rows import hit_chance, inclusion
from nep.planning.cost.held import Floats, elements, expert_axes, expert_units, held_layers, vocab_rows
from nep.planning.cost.peak import Activations, step_peak
from nep.planning.cost.workload import Workload
from nep.planning.layout import Layout, Lines, axis_lines, axis_unit_numel, count_units, subtract, union
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Lane, Plan
from nep.planning.shapes import ModelShape, parameter_lines
from nep.planning.transfer import fetch

KINDS = ("parameters", "gradients", "state", "mirrors", "staging", "activations", "workspace")
"""Kinds of memory, in order: what a slot computes with; its accumulated gradients and the finished sums of
what it owns and mirrors; master weights and moments that it owns; the same that it mirrors; messages of
transfers in flight; what the backward needs of the forward, with the head's logits; what it has for a moment:
gradients of a layer before they are accumulated, and of the rows of its experts."""

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
    """What a training step needs at its peak. See `nep.planning.cost.peak` for the moments that are looked at.

    Args:
        plan: who holds, owns and mirrors what. Mirrors kept on the host take no device memory.
        shape: the model.
        workload: the step.
        loads: of the MoE layers; None means equal loads.
        shares: see `nep.planning.cost.step_time.step_time`.
    """
    lines = parameter_lines(shape)
    held, owned, mirrored = (
        dict(zip(plan.slots, elements(layout, plan.slots, lines).astype(int).tolist(), strict=True))
        for layout in (plan.holders, plan.owners, plan.mirrors)
    )
    if plan.redundancy == "host":
        mirrored = dict.fromkeys(mirrored, 0)
    passing = step_peak(plan, workload, lines, _activations(plan, shape, workload, lines, loads, shares))
    wide = workload.accumulation_bytes
    return Memory(
        {
            slot: {
                "parameters": held[slot] * workload.parameter_bytes,
                "gradients": (held[slot] + owned[slot] + mirrored[slot]) * wide,
                "state": owned[slot] * workload.state_bytes,
                "mirrors": mirrored[slot] * workload.state_bytes,
                **passing[slot],
            }
            for slot in plan.slots
        }
    )


def change_memory(
    before: Plan, after: Plan, *, shape: ModelShape, workload: Workload, live: Collection[int] | None = None
) -> Memory:
    """What a change of layout needs between two steps: the next layout is received before the old is freed.

    Parameters and state of an axis that a slot keeps exactly as they are stay in place and count once. What
    comes from other slots is staged in messages first. There are no activations between steps, and the
    accumulated gradients of the old layout are given back; its finished sums are kept.

    Args:
        before, after: the plans.
        shape: the model.
        workload: for the sizes.
        live: slots of the plan before that can give. With it the peak is that of `nep.parallel.migrate`: messages
            that a slot sends count as well, one kind of them at a time, and so do the gradients of the next layout.
            Without it, an estimate that needs no transfers: all that a slot receives.
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
    replaced = dict.fromkeys(slots, 0)
    for slot, kinds in by_slot.items():
        for axis, size in numel.items():
            had = [*before.owners.intervals(axis, slot), *before.mirrors.intervals(axis, slot)]
            for index, (old, new, width) in enumerate(pairs):
                was, becomes = old.intervals(axis, slot), new.intervals(axis, slot)
                kinds["old"] += count_units(was) * size * width
                if was == becomes:
                    continue
                kinds["new"] += count_units(becomes) * size * width
                replaced[slot] += count_units(was) * size * width if index else 0
                # Parameters of what a slot owns or mirrors can be copied from its own master weights.
                arriving = subtract(becomes, was if index == 0 else had)
                wire = narrow if index == 0 else workload.state_bytes
                kinds["staging"] += count_units(arriving) * size * wire
    if live is None:
        return Memory(by_slot)
    staged = change_messages(before, after, live, workload=workload, lines=lines)
    held = dict(zip(slots, elements(after.holders, slots, lines).astype(int).tolist(), strict=True))
    for slot, kinds in by_slot.items():
        kinds["staging"] = staged.get(slot, 0)
        # Old state is freed before there are new gradients; old parameters only with the model that has them.
        gradients = held[slot] * workload.accumulation_bytes
        if gradients > kinds["staging"] + replaced[slot]:
            kinds["old"] -= replaced[slot]
            kinds["new"] += gradients
            kinds["staging"] = 0
    return Memory(by_slot)


def change_messages(
    before: Plan, after: Plan, live: Collection[int], *, workload: Workload, lines: Lines
) -> dict[int, int]:
    """Slot -> most bytes that it has in messages while a layout changes: owned state, mirrored state or parameters."""
    numel = axis_unit_numel(lines)
    order = tuple(numel)
    owners, mirrors, holders = (layout.restrict(live) for layout in (before.owners, before.mirrors, before.holders))
    kept = Layout(
        {
            axis: {slot: union(owners.intervals(axis, slot), mirrors.intervals(axis, slot)) for slot in live}
            for axis in order
        }
    )
    most: dict[int, int] = {}
    moves = (
        (after.owners, kept, workload.state_bytes, 1),
        (after.mirrors, kept, workload.state_bytes, 1),
        # Master weights are rounded into copies before they are packed.
        (after.holders, holders, workload.parameter_bytes, 2 - (workload.parameter_bytes >= 4)),
    )
    for wanted, have, width, packed in moves:
        sent: dict[int, int] = {}
        received: dict[int, int] = {}
        for piece in fetch([owners, mirrors], wanted, order, have=have, unit_numel=numel).remote():
            size = (piece.hi - piece.lo) * numel[piece.axis] * width
            sent[piece.src] = sent.get(piece.src, 0) + size
            received[piece.dst] = received.get(piece.dst, 0) + size
        for slot in sent.keys() | received.keys():
            out, come = sent.get(slot, 0), received.get(slot, 0)
            most[slot] = max(most.get(slot, 0), out + come, packed * out)
    return most


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


def _activations(
    plan: Plan,
    shape: ModelShape,
    workload: Workload,
    lines: Lines,
    loads: ExpertLoads | None,
    shares: Floats | None,
) -> Activations:
    """Tensors that the backward needs, for one micro-batch; rows as expected from the loads."""
    layers = expert_axes(lines)
    popularity = (loads or ExpertLoads.uniform(len(layers), shape.num_experts)).normalised().mean
    chance = inclusion(popularity, shape.top_k)
    where = [axis_lines(lines)[axis].layer for axis in layers]
    num_layers = 1 + max(where)
    found = Activations.zeros(num_layers, len(plan.slots))
    column = {slot: index for index, slot in enumerate(plan.slots)}
    known: dict[object, Activations] = {}
    lanes_of: dict[int, list[Lane]] = {}
    for lane in plan.lanes:
        lanes_of.setdefault(lane.replica, []).append(lane)
    for index, slots in enumerate(plan.replicas):
        lanes = lanes_of[index]
        key = (
            tuple((tuple(map(slots.index, lane.slots)), lane.num_sequences) for lane in lanes),
            tuple(tuple(by.get(slot, ()) for slot in slots) for by in plan.holders.cuts.values()),
        )
        here = [column[slot] for slot in slots]
        if shares is None and key in known:
            found.put(here, known[key])
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
        neurons = (pairs * units * shape.neuron_block).sum(axis=1)
        # Rows as received, and gate and up of every slice's neurons.
        experts = rows * shape.hidden_size + 2 * neurons
        per_layer = _attention_bytes(plan, slots, shape, workload, lines, tokens, own)
        per_layer[where] += experts * workload.parameter_bytes
        one = Activations.zeros(num_layers, len(slots))
        if workload.recompute:
            one.again[:] = per_layer
            one.kept[:-1] = own * shape.hidden_size * workload.parameter_bytes
        else:
            one.kept[:-1] = per_layer
        # Logits and their gradient, in the parameters' and in the accumulation dtype.
        logits = tokens * vocab_rows(plan.holders, slots, lines)
        one.kept[-1] = logits * 2 * (workload.parameter_bytes + workload.accumulation_bytes)
        one.passing[where] = _expert_backward_bytes(shape, workload, rows, pairs, units)
        known[key] = one
        found.put(here, one)
    return found


def _expert_backward_bytes(
    shape: ModelShape, workload: Workload, rows: Floats, visits: Floats, units: Floats
) -> Floats:
    """[m, s]: what the backward of the experts has alive in the end beside what forward kept and weights' gradients.

    Of each neuron that a token visits: the gate's activation, the product, its gradient and those of gate and up; where
    sums are wider, one gradient in their dtype too. Of each visit: gradient of the output, the same weighted, and the
    row. Full experts come together, slices one after the other. Of each row the gradients that came and that go back.

    Args:
        shape: the model.
        workload: the step.
        rows: [m, s] that a slot receives.
        visits: [m, e, s] of tokens to experts; a row may make several.
        units: [m, e, s] of experts that a slot holds.
    """
    narrow, wide = workload.parameter_bytes, workload.accumulation_bytes
    per_neuron = 5 * narrow + (wide if wide > narrow else 0)
    sizes = visits * (units * shape.neuron_block * per_neuron + 3 * narrow * shape.hidden_size) * (units > 0)
    full = units == shape.units_per_expert
    at_once = np.maximum((sizes * full).sum(axis=1), (sizes * ~full).max(axis=1))
    return np.asarray(at_once + shape.hidden_size * (narrow + wide) * rows)


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
