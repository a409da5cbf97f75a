"""The last sequences: shares of the batch moved between replicas as long as that makes the whole step shorter.

Sharing by pace looks at forward and backward alone and rounds. Where a lane has few sequences, one more or less in a
replica is a part of a per cent, and so are sums that hide behind a backward that became longer.
"""

from collections.abc import Callable, Sequence

from nep.planning.cost.step_time import StepTime
from nep.planning.holding.lanes import share_in_replicas
from nep.planning.plan import Lane

MOST_SLOTS = 64
"""In larger jobs a step takes long to predict, and a sequence more or less is nothing."""

_STRIDES = (2, 1)


def climb_shares(
    lanes: tuple[Lane, ...],
    time: StepTime,
    predict: Callable[[tuple[Lane, ...]], StepTime],
    weights: Sequence[int],
) -> tuple[StepTime, tuple[Lane, ...]]:
    """Moves sequences between the slowest and the fastest replica, either way, by two and then by one.

    Args:
        lanes: with their shares.
        time: the step with these.
        predict: the step with others.
        weights: of the lanes inside their replicas.

    Returns:
        The shortest step that was found, and its lanes.
    """
    seconds = time.replica_seconds
    slowest = max(range(len(seconds)), key=lambda index: (seconds[index], -index))
    fastest = min(range(len(seconds)), key=lambda index: (seconds[index], -index))
    for stride in _STRIDES:
        for give, take in ((slowest, fastest), (fastest, slowest)):
            while (moved := _moved(lanes, give, take, stride, weights)) is not None:
                other = predict(moved)
                if other.total >= time.total:
                    break
                time, lanes = other, moved
    return time, lanes


def _moved(lanes: Sequence[Lane], give: int, take: int, number: int, weights: Sequence[int]) -> tuple[Lane, ...] | None:
    """The lanes with so many sequences moved to another replica; None if it has not as many."""
    sequences = [0] * (1 + max(lane.replica for lane in lanes))
    for lane in lanes:
        sequences[lane.replica] += lane.num_sequences
    if sequences[give] < number or give == take:
        return None
    sequences[give] -= number
    sequences[take] += number
    return share_in_replicas(lanes, sequences, weights)
