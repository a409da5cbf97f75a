"""Which slots form a replica: runs of neighbours, inside scale-up domains where the numbers allow it."""

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import pairwise

from nep.planning.batch import split_sequences

Replicas = tuple[tuple[int, ...], ...]


def replica_choices(slots: Sequence[int], domains: Mapping[int, int], num_replicas: int) -> tuple[Replicas, ...]:
    """Sensible ways to divide slots into replicas; all of them use every slot.

    Rows between slots of one scale-up domain are cheap, so the first choice keeps replicas inside domains, or
    makes them of whole ones. The second has sizes that differ by one at most, since equal replicas need
    equally much memory and sum their gradients more cheaply. They are often the same.

    Args:
        slots: that may be used.
        domains: slot -> scale-up domain.
        num_replicas: at least 1.

    Raises:
        ValueError: if there are fewer slots than replicas.
    """
    if not 1 <= num_replicas <= len(slots):
        raise ValueError(
            f"num_replicas ({num_replicas}) must be from 1 to the healthy slots ({len(slots)}); every replica needs one"
        )
    ordered = sorted(slots, key=lambda slot: (domains[slot], slot))
    inside = _inside_domains(ordered, domains, num_replicas)
    even = _runs(ordered, split_sequences(len(ordered), [1] * num_replicas))
    return (inside,) if inside == even else (inside, even)


def is_even(replicas: Replicas) -> bool:
    """Whether sizes differ by one at most."""
    sizes = [len(replica) for replica in replicas]
    return max(sizes) - min(sizes) <= 1


def _inside_domains(ordered: Sequence[int], domains: Mapping[int, int], num_replicas: int) -> Replicas:
    sizes: dict[int, int] = {}
    for slot in ordered:
        sizes[domains[slot]] = sizes.get(domains[slot], 0) + 1
    if num_replicas < len(sizes):
        return _runs(ordered, _group(list(sizes.values()), num_replicas))
    # One replica more at a time for the domain whose replicas are largest.
    counts = dict.fromkeys(sizes, 1)
    largest = [(-float(size), domain) for domain, size in sizes.items()]
    heapify(largest)
    for _ in range(num_replicas - len(sizes)):
        domain = largest[0][1]
        counts[domain] += 1
        heapreplace(largest, (-sizes[domain] / counts[domain], domain))
    return _runs(
        ordered, [part for domain, size in sizes.items() for part in split_sequences(size, [1] * counts[domain])]
    )


def _group(sizes: Sequence[int], num_groups: int) -> list[int]:
    """Sizes of groups of whole neighbouring domains, as equal as the nearest boundaries make them."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    cuts = [0]
    for group in range(1, num_groups):
        ideal = ends[-1] * group / num_groups
        # Enough domains must be left for the groups that follow.
        candidates = range(cuts[-1] + 1, len(sizes) - (num_groups - group) + 1)
        cuts.append(min(candidates, key=lambda cut: (abs(ends[cut] - ideal), cut)))
    return [ends[hi] - ends[lo] for lo, hi in pairwise([*cuts, len(sizes)])]


def _runs(ordered: Sequence[int], sizes: Sequence[int]) -> Replicas:
    """Cuts slots into runs of these sizes; replicas come in the order of their first slots."""
    replicas = []
    start = 0
    for size in sizes:
        replicas.append(tuple(sorted(ordered[start : start + size])))
        start += size
    return tuple(sorted(replicas))
