"""Plans made by hand: any cut that the layout allows, whether or not a planner would make it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from nep.planning.layout import Layout, Line, LineKind, Lines, arrange, axis_lines, normalize
from nep.planning.plan import Lane, Plan
from nep.planning.shapes import ModelShape, parameter_lines

Lanes = Sequence[Sequence[Sequence[int]]]
"""Replica -> lane -> slots."""

HoldExperts = Callable[[Line, int], list[list[int]]]
"""(expert line, slots of a replica) -> the units of each of them."""


def runs(units: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return normalize((unit, unit + 1) for unit in units)


def cut_unevenly(num_units: int, parts: int) -> list[list[int]]:
    """Contiguous parts, the earlier ones larger; some may be empty."""
    bounds = [round(num_units * (index / parts) ** 1.5) for index in range(parts + 1)]
    return [list(range(lo, hi)) for lo, hi in itertools.pairwise(bounds)][::-1]


def cut_experts_unevenly(line: Line, slots: int) -> list[list[int]]:
    """Contiguous parts of the line."""
    return cut_unevenly(line.num_units, slots)


def lane_plan(
    lanes: Lanes, shape: ModelShape, shares: Sequence[int], experts: HoldExperts = cut_experts_unevenly, number: int = 1
) -> Plan:
    """A plan made without the planner, unit by unit.

    Args:
        lanes: slots of each lane of each replica.
        shape: of the model.
        shares: sequences of each lane, replica by replica.
        experts: which units each slot of a replica holds of a layer's expert line.
        number: of the plan.
    """
    lines = parameter_lines(shape)
    group = shape.num_heads // shape.num_kv_heads
    held: dict[str, dict[int, tuple[tuple[int, int], ...]]] = {}
    for axis, line in axis_lines(lines).items():
        held[axis] = {}
        for replica in lanes:
            everyone = [slot for lane in replica for slot in lane]
            if line.kind is LineKind.EXPERTS:
                for slot, units in zip(everyone, experts(line, len(everyone)), strict=True):
                    held[axis][slot] = arrange(runs(sorted(units)), line.units_per_expert)
                continue
            for lane in replica:
                for slot, units in hold_in_lane(line, lane, shape.num_heads, group).items():
                    held[axis][slot] = runs(units)
    slots = sorted(slot for replica in lanes for lane in replica for slot in lane)
    owners, mirrors = own(held, lines, slots)
    flat = [(index, lane) for index, replica in enumerate(lanes) for lane in replica]
    return Plan(
        number=number,
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
    if line.kind in (LineKind.VOCAB, LineKind.NEURONS):
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
