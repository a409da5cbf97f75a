"""Which units of which experts a slot stores, and in what order."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class ExpertSlice:
    """One interval of one expert in local storage.

    Attributes:
        expert: Global expert id.
        lo: First unit in local storage (not on the expert line).
        hi: One past the last unit in local storage.
    """

    expert: int
    lo: int
    hi: int


def expert_slices(intervals: Iterable[tuple[int, int]], units_per_expert: int) -> tuple[ExpertSlice, ...]:
    """The slices that a slot stores when its cut of an expert line is `intervals`.

    Args:
        intervals: Half-open intervals on the expert line, in storage order.
        units_per_expert: Units of one expert on the line.

    Returns:
        Slices in storage order; they lie end to end from unit 0.
    """
    slices: list[ExpertSlice] = []
    offset = 0
    for lo, hi in intervals:
        while lo < hi:
            expert = lo // units_per_expert
            num_units = min(hi, (expert + 1) * units_per_expert) - lo
            slices.append(ExpertSlice(expert, offset, offset + num_units))
            offset += num_units
            lo += num_units
    return tuple(slices)


def merge_slices(slices: Iterable[ExpertSlice]) -> tuple[ExpertSlice, ...]:
    """Joins slices of one expert that touch in storage, wherever they lie on the line: one matrix product."""
    merged: list[ExpertSlice] = []
    for piece in slices:
        if merged and merged[-1].expert == piece.expert and merged[-1].hi == piece.lo:
            merged[-1] = ExpertSlice(piece.expert, merged[-1].lo, piece.hi)
        else:
            merged.append(piece)
    return tuple(merged)


def check_slices(slices: tuple[ExpertSlice, ...], *, num_experts: int, num_units: int) -> None:
    """Refuses slices that do not partition the local storage.

    Raises:
        ValueError: A slice is empty or names an unknown expert, or they do not lie end to end over all units.
    """
    offset = 0
    for piece in slices:
        if not 0 <= piece.expert < num_experts:
            raise ValueError(f"{piece} names an expert outside 0..{num_experts - 1}; use global expert ids")
        if piece.lo != offset or piece.hi <= piece.lo:
            raise ValueError(f"{piece} must start at unit {offset} and hold at least one unit; see expert_slices")
        offset = piece.hi
    if offset != num_units:
        raise ValueError(f"slices end at unit {offset} but w13 and w2 store {num_units} units; pass them together")
