"""How the global batch is shared over lanes."""

import heapq
from collections.abc import Sequence


def split_sequences(global_batch_size: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Splits a batch in proportion to integer weights, so that the last lane is done as early as possible.

    Rounding by the largest remainder does not do that: of 3 sequences for weights 4 and 1 it gives one to the
    slow lane, and everybody waits for it. Of lanes done at the same time the earlier one gets more, so equal
    weights give shares that differ by one at most. A share may be 0: a lane without samples still joins every
    collective of its dispatch group.

    Args:
        global_batch_size: sequences to share.
        weights: one per lane, at least 0, not all 0; a lane of weight 0 gets nothing.

    Returns:
        Sequences of each lane; they sum to ``global_batch_size``.
    """
    errors: list[str] = []
    if global_batch_size < 0:
        errors.append(f"global_batch_size ({global_batch_size}) must be at least 0")
    if any(weight < 0 for weight in weights):
        errors.append(f"weights {list(weights)} must be at least 0")
    elif sum(weights) == 0:
        errors.append(f"weights {list(weights)} must not all be 0; somebody has to take the batch")
    if errors:
        raise ValueError("; ".join(errors))
    total = sum(weights)
    # Nobody who takes a fair share, rounded down, is later than the best possible time.
    shares = [global_batch_size * weight // total for weight in weights]
    left = global_batch_size - sum(shares)
    if left and min(weights) == max(weights):
        return tuple(share + (lane < left) for lane, share in enumerate(shares))
    # When a lane would be done with one more. A division rounds alike on all machines.
    done = [((shares[lane] + 1) / weight, lane) for lane, weight in enumerate(weights) if weight]
    heapq.heapify(done)
    for _ in range(left):
        lane = done[0][1]
        shares[lane] += 1
        heapq.heapreplace(done, ((shares[lane] + 1) / weights[lane], lane))
    return tuple(shares)
