"""Lost units shared out evenly over survivors: what a recovery has time for.

With equal loads the fewest units are the fewest seconds, so no search is needed: integers are poured to a level
and dealt in runs. Large jobs have thousands of replicas that lost a slot, but few kinds of them; each kind is
answered once.
"""

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from nep.planning.holding.assignment import deal, water_fill
from nep.planning.intervals import Intervals, arrange, count_units, subtract

# Layers take turns in who is first where units do not divide, so that nobody has more in all of them. In large
# replicas a unit more is soon somebody else's.
_TURNS, _TURNS_OF_MANY = 8, 2


class EvenShares:
    """Completes what the survivors of replicas hold of a layer's experts.

    Args:
        num_units: of a layer.
        units_per_expert: units of an expert.
        speeds_ppm: slot -> relative speed.
    """

    def __init__(self, num_units: int, units_per_expert: int, speeds_ppm: Mapping[int, int]) -> None:
        self._num_units, self._size, self._speeds = num_units, units_per_expert, speeds_ppm
        self._known: dict[object, list[Intervals]] = {}

    def turn(self, layer: int) -> int:
        """Which turn it is; layers with equal holders and equal turns are completed alike."""
        return layer % _TURNS

    def complete(self, slots: Sequence[int], held: Sequence[Intervals], turn: int) -> list[Intervals]:
        """What each slot of a replica holds, with what nobody of them held.

        Args:
            slots: of the replica.
            held: by each of them; answers are found again by the identity of these, so they must stay alive.
            turn: see `turn`.

        Returns:
            In the order of the slots; the very objects of before for those that get nothing.
        """
        number = len(slots) if len(slots) <= _TURNS else _TURNS_OF_MANY
        first = turn % number * len(slots) // number
        speeds = tuple(self._speeds[slot] for slot in slots)
        key = (first, speeds, tuple(map(id, held)))
        if key not in self._known:
            self._known[key] = self._complete(held, speeds, first)
        return self._known[key]

    def _complete(self, held: Sequence[Intervals], speeds: Sequence[int], first: int) -> list[Intervals]:
        lost = subtract([(0, self._num_units)], [interval for intervals in held for interval in intervals])
        order = [(first + place) % len(held) for place in range(len(held))]
        units = [count_units(held[place]) for place in order]
        counts = fill_level(units, [speeds[place] for place in order], count_units(lost))
        now = list(held)
        for place, interval in deal(lost, zip(order, counts, strict=True)):
            now[place] = (*now[place], interval)
        return [
            before if after is before else arrange(after, self._size) for before, after in zip(held, now, strict=True)
        ]


def fill_level(units: Sequence[int], speeds: Sequence[int], count: int) -> list[int]:
    """How many of ``count`` units each slot gets, for the slowest to be done as early as possible.

    Of slots that would be done at the same time the earlier comes first.

    Args:
        units: that each has already.
        speeds: of each.
        count: to give out.
    """
    if min(speeds) == max(speeds):
        return [int(part) for part in water_fill(np.array(units, dtype=np.int64), count, 1)]
    # The level up to which slots are filled, slowest first: those that are above it get nothing.
    order = sorted(range(len(units)), key=lambda place: (units[place] / speeds[place], place))
    have = speed = 0
    for index, place in enumerate(order):
        have += units[place]
        speed += speeds[place]
        following = order[index + 1] if index + 1 < len(order) else None
        if following is None or (have + count) / speed <= units[following] / speeds[following]:
            break
    shares = [0] * len(units)
    for place in order[: index + 1]:
        shares[place] = max(0, (have + count) * speeds[place] // speed - units[place])
    heap = [((units[place] + shares[place] + 1) / speeds[place], place) for place in range(len(units))]
    heapq.heapify(heap)
    for _ in range(count - sum(shares)):
        place = heap[0][1]
        shares[place] += 1
        heapq.heapreplace(heap, ((units[place] + shares[place] + 1) / speeds[place], place))
    return shares
