"""What each slot of a replica holds of a model, as tables over layers.

Shapes: l layers, m MoE layers, e experts, s slots of the replica.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nep.planning.intervals import segments
from nep.planning.layout import Layout, LineKind, Lines, axes, axis_lines, axis_unit_numel, count_units

Floats = NDArray[np.float64]


def expert_axes(lines: Lines) -> list[str]:
    """Axes of the MoE layers, in forward order."""
    return [axis for axis, line in axis_lines(lines).items() if line.kind is LineKind.EXPERTS]


@dataclass(frozen=True)
class HeldLayers:
    """What the slots hold of each decoder layer, all arrays [l, s].

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        neurons: of the dense and shared feed-forward networks.
        attention: elements of the matrices that are cut by heads.
        dense: elements of the feed-forward networks' matrices.
        whole: elements of the matrices that nobody cuts: routers, projections down to latents.
    """

    heads: Floats
    kv_heads: Floats
    neurons: Floats
    attention: Floats
    dense: Floats
    whole: Floats


def held_layers(holders: Layout, slots: Sequence[int], lines: Lines) -> HeldLayers:
    """Tables of one replica; norms, which are no matrices, are left out.

    Args:
        holders: of the plan.
        slots: of the replica.
        lines: the model's.
    """
    order = axis_lines(lines)
    num_layers = 1 + max(order[axis].layer for axis in expert_axes(lines))
    tables = {name: np.zeros((num_layers, len(slots))) for name in HeldLayers.__dataclass_fields__}
    counted = {LineKind.HEADS: "heads", LineKind.KV_HEADS: "kv_heads", LineKind.NEURONS: "neurons"}
    weighed = {
        LineKind.HEADS: "attention",
        LineKind.KV_HEADS: "attention",
        LineKind.NEURONS: "dense",
        LineKind.WHOLE: "whole",
    }
    for axis, names in axes(lines).items():
        line = order[axis]
        if not 0 <= line.layer < num_layers or line.kind not in weighed:
            continue
        units = np.array([holders.num_units(axis, slot) for slot in slots], dtype=np.float64)
        size = sum(lines[name].unit_numel for name in names if lines[name].init_std is not None)
        tables[weighed[line.kind]][line.layer] += units * size
        if line.kind in counted:
            tables[counted[line.kind]][line.layer] += units
    return HeldLayers(**tables)


def elements(layout: Layout, slots: Sequence[int], lines: Lines) -> Floats:
    """Elements of all axes that each slot has in a layout, [s]; exact, since they are fewer than 2 ** 53."""
    numel = axis_unit_numel(lines)
    found = dict.fromkeys(slots, 0)
    for axis, by_slot in layout.cuts.items():
        for slot, intervals in by_slot.items():
            found[slot] += count_units(intervals) * numel[axis]
    return np.array([found[slot] for slot in slots], dtype=np.float64)


def vocab_rows(holders: Layout, slots: Sequence[int], lines: Lines) -> Floats:
    """Rows of the head that each slot holds; the embedding's where both are one."""
    axis = [axis for axis, line in axis_lines(lines).items() if line.kind is LineKind.VOCAB][-1]
    return np.array([holders.num_units(axis, slot) for slot in slots], dtype=np.float64)


def expert_units(layout: Layout, slots: Sequence[int], lines: Lines) -> tuple[Floats, Floats]:
    """How a replica cuts its experts.

    Args:
        layout: holders.
        slots: of the replica.
        lines: the model's.

    Returns:
        Units [m, e, s], and shares [m, e, s]: the part of the expert's tokens that the slot's slice gets if
        holders of a unit share it evenly; 1 for the slices of an expert that exists once.
    """
    order = axis_lines(lines)
    moe_axes = expert_axes(lines)
    size = order[moe_axes[0]].units_per_expert
    assert size is not None
    num_experts = order[moe_axes[0]].num_units // size
    starts = np.arange(num_experts) * size
    units = np.zeros((len(moe_axes), num_experts, len(slots)))
    for layer, axis in enumerate(moe_axes):
        for place, slot in enumerate(slots):
            for lo, hi in layout.intervals(axis, slot):
                first, last = lo // size, (hi - 1) // size + 1
                inside = np.minimum(hi, starts[first:last] + size) - np.maximum(lo, starts[first:last])
                units[layer, first:last, place] += inside
    shares = (units > 0).astype(np.float64)
    several = units.sum(axis=2) > size
    for layer, expert in np.argwhere(several):
        shares[layer, expert] = 0.0
        cut = {place: layout.intervals(moe_axes[layer], slot) for place, slot in enumerate(slots)}
        lo = int(starts[expert])
        for first, last, places in segments(cut, [(lo, lo + size)]):
            for place in places:
                part = (last - first) / units[layer, expert, place]
                shares[layer, expert, place] += part / len(places)
    return units, shares
