"""Who fails: computed from the plan in force, the same on every slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from nep.planning.layout import Lines
from nep.planning.plan import Plan
from nep.planning.planner import lost_intervals
from nep.testing.chaos.cases import ONE, PAIR, REPLICA, SAME_REPLICA, TWO_REPLICAS


def choose(plan: Plan, lines: Lines, victims: str, number: int) -> tuple[int, ...]:
    """Slots that fail together.

    Args:
        plan: in force, with complete mirrors.
        lines: the model's.
        victims: ONE, SAME_REPLICA, TWO_REPLICAS, REPLICA: such that every interval keeps an owner or a mirror; PAIR:
            such that one does not.
        number: which of those that qualify; every slot gets its turn.

    Returns:
        The slots in the order in which they fail; none if nobody qualifies.
    """
    found = [slots for slots in _candidates(plan, victims) if survives(plan, lines, slots) != (victims == PAIR)]
    return found[number % len(found)] if found else ()


def survives(plan: Plan, lines: Lines, slots: Iterable[int]) -> bool:
    """Whether every interval keeps an owner or a mirror without these slots."""
    gone = set(slots)
    return not lost_intervals(plan, [slot for slot in plan.slots if slot not in gone], lines)


def companion_for(plan: Plan, lines: Lines, victims: Sequence[int], number: int) -> int | None:
    """Another slot that may be lost with them: its loss is the recovery in which they fail."""
    others = [slot for slot in plan.slots if slot not in victims and survives(plan, lines, (*victims, slot))]
    return others[number % len(others)] if others else None


def _candidates(plan: Plan, victims: str) -> Iterator[tuple[int, ...]]:
    if victims == ONE:
        yield from ((slot,) for slot in plan.slots)
    elif victims == REPLICA:
        yield from plan.replicas
    else:
        for pair in combinations(plan.slots, 2):
            same = plan.replica_of(pair[0]) == plan.replica_of(pair[1])
            if victims == PAIR or same == (victims == SAME_REPLICA):
                yield pair
    assert victims in (ONE, REPLICA, SAME_REPLICA, TWO_REPLICAS, PAIR)
