"""Parallelism with pinned degrees, as other frameworks have it: EP8, EP4xETP2, TP2xEP4, TP8."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nep.planning.batch import split_sequences
from nep.planning.intervals import Interval, Intervals, arrange

_FACTOR = re.compile(r"(TP|EP|ETP)([1-9][0-9]*)")


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How a replica is cut, in the terms of Megatron Core.

    Attributes:
        tp: slots of a lane: attention, vocabulary and dense networks are cut over them.
        ep: groups of slots that share out the experts of a layer.
        etp: slots of such a group, over which each of its experts is cut.
    """

    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        errors = [f"{name} ({value}) must be at least 1" for name, value in vars(self).items() if value < 1]
        if not errors and self.replica_slots % self.tp:
            errors.append(
                f"a replica of ep {self.ep} x etp {self.etp} = {self.replica_slots} slots must be a multiple of tp "
                f"({self.tp}), so that lanes fit into it"
            )
        if errors:
            raise ValueError("; ".join(errors))

    @classmethod
    def parse(cls, text: str) -> "Degrees":
        """Reads factors joined by x, in any order and case; ETP is TP unless it is given.

        Raises:
            ValueError: if the text has another form.
        """
        factors: dict[str, int] = {}
        for factor in text.upper().split("X"):
            match = _FACTOR.fullmatch(factor)
            if match is None or match[1] in factors:
                raise ValueError(
                    f"degrees ({text!r}) must be factors TP, EP and ETP with a number, each at most once, such as EP8, "
                    "EP4xETP2, TP2xEP4 or TP8"
                )
            factors[match[1]] = int(match[2])
        tp = factors.get("TP", 1)
        return cls(tp=tp, ep=factors.get("EP", 1), etp=factors.get("ETP", tp))

    def __str__(self) -> str:
        return f"TP{self.tp}xEP{self.ep}xETP{self.etp}"

    @property
    def replica_slots(self) -> int:
        """Slots of a replica."""
        return self.ep * self.etp

    def replicas(self, slots: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Neighbours by the replica.

        Raises:
            ValueError: if slots are left over.
        """
        size = self.replica_slots
        if not slots or len(slots) % size:
            raise ValueError(
                f"{self} needs {size} slots for each replica and there are {len(slots)}; use a multiple of {size}, or "
                "let the planner choose the degrees"
            )
        return tuple(tuple(slots[start : start + size]) for start in range(0, len(slots), size))

    def cut_experts(
        self, slots: Sequence[int], speeds_ppm: Mapping[int, int], num_experts: int, units_per_expert: int
    ) -> list[Intervals]:
        """What each slot of a replica holds of a layer: groups share out the line, a group's slots each expert.

        Experts that do not divide over the groups are cut at a group's end, and units that do not divide over a group
        go to its slots in turn.

        Args:
            slots: of the replica.
            speeds_ppm: slot -> relative speed.
            num_experts: of the layer.
            units_per_expert: units of each.

        Returns:
            In the order of the slots.
        """
        groups = [slots[start : start + self.etp] for start in range(0, len(slots), self.etp)]
        weights = [sum(speeds_ppm[slot] for slot in group) for group in groups]
        held: list[Intervals] = []
        end = 0
        for group, units in zip(groups, split_sequences(num_experts * units_per_expert, weights), strict=True):
            start, end = end, end + units
            held += _cut_over(group, speeds_ppm, (start, end), units_per_expert)
        return held


def _cut_over(
    group: Sequence[int], speeds_ppm: Mapping[int, int], line: Interval, units_per_expert: int
) -> list[Intervals]:
    parts: list[list[Interval]] = [[] for _ in group]
    speeds = [speeds_ppm[slot] for slot in group]
    start, number = line[0], 0
    while start < line[1]:
        end = min(line[1], (start // units_per_expert + 1) * units_per_expert)
        # Who gets the unit that is left over changes from expert to expert.
        order = [(number + place) % len(group) for place in range(len(group))]
        shares = split_sequences(end - start, [speeds[place] for place in order])
        for place, share in zip(order, shares, strict=True):
            parts[place] += [(start, start + share)] if share else []
            start += share
        number += 1
    return [arrange(part, units_per_expert) for part in parts]
