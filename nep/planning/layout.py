"""Lines of units and the layouts that cut them over slots.

A parameter is a *line* of units, stored unit-major: tensor ``[num_units, *unit_shape]``. A *layout* says
which slot has which intervals of which line. Parameters that have to be cut alike share an *axis*, and
layouts are per axis.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from nep.planning.intervals import (
    Interval,
    Intervals,
    arrange,
    count_units,
    intersect,
    normalize,
    storage_offset,
    subtract,
    union,
)

__all__ = [
    "Interval",
    "Intervals",
    "Layout",
    "Line",
    "LineKind",
    "Lines",
    "arrange",
    "axes",
    "axis_lines",
    "axis_unit_numel",
    "count_units",
    "intersect",
    "normalize",
    "storage_offset",
    "subtract",
    "union",
]


class LineKind(StrEnum):
    """What the units of a line are, and with that what may be cut."""

    EXPERTS = "experts"
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    VOCAB = "vocab"
    NEURONS = "neurons"  # of a dense feed-forward network: what every token visits
    WHOLE = "whole"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One parameter as a line of units.

    Attributes:
        kind: what a unit is.
        num_units: units in the whole model, over all slots.
        unit_shape: shape of one unit; the global tensor is ``[num_units, *unit_shape]``.
        axis: parameters with the same axis are cut alike.
        layer: index of the decoder layer, or where in forward order the parameter is used.
        units_per_expert: units of one expert; EXPERTS lines only.
        init_std: standard deviation of the initial values; None means ones (norm weights).
        weight_decay: whether the optimizer decays the parameter.
    """

    kind: LineKind
    num_units: int
    unit_shape: tuple[int, ...]
    axis: str
    layer: int
    units_per_expert: int | None = None
    init_std: float | None = 0.02
    weight_decay: bool = True

    def __post_init__(self) -> None:
        errors: list[str] = []
        is_experts = self.kind is LineKind.EXPERTS
        size = self.units_per_expert
        if self.num_units < 1:
            errors.append(f"num_units ({self.num_units}) must be at least 1; leave out an empty parameter")
        if any(extent < 1 for extent in self.unit_shape):
            errors.append(f"unit_shape {self.unit_shape} has an empty dimension; every one needs at least 1")
        if is_experts and (size is None or size < 1):
            errors.append(f"units_per_expert ({size}) must be set, and at least 1, for experts")
        elif is_experts and size and self.num_units % size:
            errors.append(
                f"num_units ({self.num_units}) is no multiple of units_per_expert ({size}); "
                "all experts of a line must be equally large"
            )
        elif not is_experts and size is not None:
            errors.append(f"units_per_expert ({size}) is for experts, not for {self.kind}; leave it out")
        if self.kind is LineKind.WHOLE and self.num_units != 1:
            errors.append(f"num_units ({self.num_units}) of a whole tensor must be 1; use unit_shape")
        if errors:
            raise ValueError(f"line on axis {self.axis!r}: " + "; ".join(errors))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the global tensor."""
        return (self.num_units, *self.unit_shape)

    @property
    def unit_numel(self) -> int:
        """Elements of one unit."""
        return math.prod(self.unit_shape)


Lines = Mapping[str, Line]
"""Global parameter name -> Line, in forward order."""


def axes(lines: Lines) -> dict[str, tuple[str, ...]]:
    """Groups parameter names by axis, axes and names both in order of first appearance.

    Raises:
        ValueError: if lines of one axis differ in kind, number of units or units per expert.
    """
    grouped: dict[str, list[str]] = {}
    errors: list[str] = []
    for name, line in lines.items():
        names = grouped.setdefault(line.axis, [])
        names.append(name)
        first = lines[names[0]]
        if line is not first and _cut(line) != _cut(first):
            errors.append(
                f"{name} {_shown(line)} cannot share axis {line.axis!r} with {names[0]} "
                f"{_shown(first)}; give it one of its own"
            )
    if errors:
        raise ValueError("; ".join(errors))
    return {axis: tuple(names) for axis, names in grouped.items()}


def _cut(line: Line) -> tuple[LineKind, int, int | None]:
    return (line.kind, line.num_units, line.units_per_expert)


def _shown(line: Line) -> tuple[str, int, int | None]:
    return (line.kind.value, line.num_units, line.units_per_expert)


def axis_lines(lines: Lines) -> dict[str, Line]:
    """The first line of each axis, in the order of `axes`: it tells how the whole axis is cut."""
    return {axis: lines[names[0]] for axis, names in axes(lines).items()}


def axis_unit_numel(lines: Lines) -> dict[str, int]:
    """Elements of one unit of each axis, summed over the axis's parameters, in the order of `axes`."""
    return {axis: sum(lines[name].unit_numel for name in names) for axis, names in axes(lines).items()}


@dataclass(frozen=True)
class Layout:
    """Which slot has which units of each axis.

    Equal by value; slots and axes without an interval are dropped, so "absent" and "empty" are the same.
    Nothing may depend on the order of the mappings (a layout read back from JSON has another one): iterate
    over `axes` and over ascending slots.

    Attributes:
        cuts: axis -> slot -> disjoint intervals in *storage* order, which need not be ascending.
    """

    cuts: Mapping[str, Mapping[int, Intervals]]

    def __post_init__(self) -> None:
        cuts: dict[str, Mapping[int, Intervals]] = {}
        errors: list[str] = []
        # Axes that are cut alike may share one mapping, and slots one tuple: each is then looked at once. Plans
        # for thousands of slots consist of little else.
        kept_of: dict[int, dict[int, Intervals]] = {}
        sound: set[int] = set()
        for axis, by_slot in self.cuts.items():
            kept = kept_of.get(id(by_slot))
            if kept is None:
                kept = {slot: intervals for slot, intervals in by_slot.items() if intervals}
                for slot, intervals in kept.items():
                    if len(intervals) == 1 and 0 <= intervals[0][0] < intervals[0][1]:
                        continue
                    if id(intervals) in sound:
                        continue
                    problem = _problem(intervals)
                    if problem:
                        errors.append(f"{axis} on slot {slot}: {problem}")
                    sound.add(id(intervals))
                kept_of[id(by_slot)] = kept
            if kept:
                cuts[axis] = kept
        if errors:
            raise ValueError("; ".join(errors))
        object.__setattr__(self, "cuts", cuts)

    def intervals(self, axis: str, slot: int) -> Intervals:
        """What the slot has of the axis, in storage order; ``()`` if nothing."""
        by_slot = self.cuts.get(axis)
        return by_slot.get(slot, ()) if by_slot is not None else ()

    def by_slot(self, axis: str) -> Mapping[int, Intervals]:
        """Slot -> intervals of one axis; empty if nobody has any of it."""
        return self.cuts.get(axis, {})

    def num_units(self, axis: str, slot: int) -> int:
        """How many units of the axis the slot has."""
        return count_units(self.intervals(axis, slot))

    def slots(self) -> tuple[int, ...]:
        """Every slot that has anything, ascending."""
        distinct = {id(by_slot): by_slot for by_slot in self.cuts.values()}
        return tuple(sorted(set().union(*distinct.values())))

    def restrict(self, slots: Iterable[int]) -> "Layout":
        """The same layout as if only these slots existed."""
        kept = frozenset(slots)
        distinct = {id(by_slot): by_slot for by_slot in self.cuts.values()}
        restricted = {
            key: {slot: intervals for slot, intervals in by_slot.items() if slot in kept}
            for key, by_slot in distinct.items()
        }
        return Layout({axis: restricted[id(by_slot)] for axis, by_slot in self.cuts.items()})

    def covered(self, axis: str) -> Intervals:
        """The units of the axis that at least one slot has, ascending."""
        # Most slots share a handful of cuts, and a set of those is far shorter than all of them.
        distinct = set(self.by_slot(axis).values())
        return normalize(interval for intervals in distinct for interval in intervals)

    def covers(self, axis: str, num_units: int) -> bool:
        """Whether the slots together have every unit of a line of ``num_units``, and none beyond it."""
        return self.covered(axis) == ((0, num_units),)

    def to_json(self) -> dict[str, dict[str, list[list[int]]]]:
        """Plain dictionaries and lists: axis -> slot (as text) -> ``[[lo, hi], ...]``."""
        return {
            axis: {str(slot): [[lo, hi] for lo, hi in by_slot[slot]] for slot in sorted(by_slot)}
            for axis, by_slot in self.cuts.items()
        }

    @classmethod
    def from_json(cls, value: Any) -> "Layout":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: if the value has another form, or the intervals are not a layout.
        """
        try:
            cuts: dict[str, Mapping[int, Intervals]] = {}
            # Axes that are cut alike share their mapping again, and slots that hold the same their tuple.
            different: list[tuple[object, Mapping[int, Intervals]]] = []
            interned: dict[Intervals, Intervals] = {}
            for axis, by_slot in value.items():
                known = next((cut for text, cut in different[-_ALIKE:] if text == by_slot), None)
                if known is None:
                    held = {
                        int(slot): tuple((_integer(lo), _integer(hi)) for lo, hi in intervals)
                        for slot, intervals in by_slot.items()
                    }
                    known = {slot: interned.setdefault(intervals, intervals) for slot, intervals in held.items()}
                    different.append((by_slot, known))
                cuts[str(axis)] = known
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"a layout must be {{axis: {{slot: [[lo, hi], ...]}}}} in integers ({error})") from error
        return cls(cuts)


_ALIKE = 32
"""With so many different axes before it, an axis that is read is compared."""


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is no integer")
    return value


def _problem(intervals: Intervals) -> str | None:
    """What is wrong with one slot's intervals, or None."""
    for lo, hi in intervals:
        if not 0 <= lo < hi:
            return f"[{lo}, {hi}) is no interval; it needs 0 <= lo < hi"
    if len(intervals) > 1:
        ascending = sorted(intervals)
        for (_, stop), (lo, hi) in pairwise(ascending):
            if lo < stop:
                return f"[{lo}, {hi}) overlaps an interval that ends at {stop}; a slot has each unit once"
    return None
