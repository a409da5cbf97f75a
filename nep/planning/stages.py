"""A large change of layout in several small ones: a few MoE layers at each boundary between steps.

Every stage is a whole plan, complete and mirrored, so that a failure between two of them is like any other. Stages
follow from the plan in force and the goal alone: all slots find the same ones, whatever happened before.
"""

from collections.abc import Mapping
from dataclasses import replace

from nep.planning.intervals import Intervals, count_units, subtract, union
from nep.planning.layout import Layout, LineKind, Lines, axis_lines, axis_unit_numel
from nep.planning.plan import Plan


def next_stage(current: Plan, goal: Plan, lines: Lines, *, most_bytes: int | None, parameter_bytes: int) -> Plan:
    """The plan to change to at this boundary.

    Args:
        current: in force.
        goal: to get to, of the same slots.
        lines: the model's.
        most_bytes: that a slot may receive at once; a layer that is larger still moves whole. None: no limit.
        parameter_bytes: of one parameter.

    Returns:
        The goal under the next number, or a plan on the way to it.
    """
    final = replace(goal, number=current.number + 1)
    lanes_stay = [(lane.replica, lane.slots) for lane in current.lanes] == [
        (lane.replica, lane.slots) for lane in goal.lanes
    ]
    if most_bytes is None or current.replicas != goal.replicas or not lanes_stay:
        return final
    layers = [axis for axis, line in axis_lines(lines).items() if line.kind is LineKind.EXPERTS]
    numel = axis_unit_numel(lines)
    wide = 3 * max(4, parameter_bytes)
    arriving: dict[int, int] = {}
    _add(
        arriving, _bytes_of(current, goal, [axis for axis in numel if axis not in layers], numel, parameter_bytes, wide)
    )
    left: list[str] = []
    moved = False
    for axis in layers:
        more = _bytes_of(current, goal, [axis], numel, parameter_bytes, wide)
        if not more:
            continue
        fits = all(arriving.get(slot, 0) + size <= most_bytes for slot, size in more.items())
        if left or not (fits or not moved):
            left.append(axis)
            continue
        _add(arriving, more)
        moved = True
    if not left:
        return final
    return replace(
        final,
        holders=_with(final.holders, current.holders, left),
        owners=_with(final.owners, current.owners, left),
        mirrors=_with(final.mirrors, current.mirrors, left),
    )


def reached(current: Plan, goal: Plan) -> bool:
    """Whether a plan is the goal but for its number."""
    return replace(goal, number=current.number) == current


def count_stages(current: Plan, goal: Plan, lines: Lines, *, most_bytes: int | None, parameter_bytes: int) -> int:
    """How many boundaries it takes to get to a goal; 0 if it is reached."""
    stages = 0
    while not reached(current, goal):
        current = next_stage(current, goal, lines, most_bytes=most_bytes, parameter_bytes=parameter_bytes)
        stages += 1
    return stages


def _bytes_of(
    current: Plan, goal: Plan, axes: list[str], numel: Mapping[str, int], parameter_bytes: int, wide: int
) -> dict[int, int]:
    """Slot -> bytes that it receives for some axes."""
    found: dict[int, int] = {}
    for axis in axes:
        for slot in goal.slots:
            state = union(current.owners.intervals(axis, slot), current.mirrors.intervals(axis, slot))
            size = parameter_bytes * _new(
                goal.holders.intervals(axis, slot), union(state, current.holders.intervals(axis, slot))
            )
            for layout in (goal.owners, goal.mirrors):
                size += wide * _new(layout.intervals(axis, slot), state)
            if size:
                found[slot] = found.get(slot, 0) + size * numel[axis]
    return found


def _new(wanted: Intervals, have: Intervals) -> int:
    return count_units(subtract(wanted, have))


def _add(into: dict[int, int], more: Mapping[int, int]) -> None:
    for slot, size in more.items():
        into[slot] = into.get(slot, 0) + size


def _with(layout: Layout, other: Layout, axes: list[str]) -> Layout:
    """A layout with some axes of another one."""
    return Layout({**layout.cuts, **{axis: other.by_slot(axis) for axis in axes}})
