"""How the global batch is shared over lanes."""

from collections.abc import Sequence


def split_sequences(global_batch_size: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Splits a batch in proportion to integer weights, by largest remainder; exact in integers.

    Equal remainders go to the earlier lane, so equal weights give shares that differ by one at most. A share
    may be 0: a lane without samples still joins every collective of its dispatch group.

    Args:
        global_batch_size: sequences to share.
        weights: one per lane, at least 0, not all 0.

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
    shares = [global_batch_size * weight // total for weight in weights]
    remainders = [global_batch_size * weight % total for weight in weights]
    left = global_batch_size - sum(shares)
    # Fewer than len(weights) are left, and only lanes with a remainder can be short of a part of one.
    for lane in sorted(range(len(weights)), key=lambda lane: (-remainders[lane], lane))[:left]:
        shares[lane] += 1
    return tuple(shares)
