"""How likely a job survives deaths that come together, without a checkpoint.

State is lost if a unit's owner and its mirror die before the mirrors are completed again. So what matters is a
graph: slots (or nodes) that must not die together are joined, and those that must not die at all are marked.
``k`` deaths lose nothing exactly if they hit no mark and no two joined ones: an *independent set*. Counting
those exactly is hard in general but easy for what the planner makes: pairs, and a few rings and stars.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nep.planning.cluster import Cluster
from nep.planning.holding.mirrors import mirror_shares
from nep.planning.plan import Plan

Graph = dict[int, frozenset[int]]
"""Vertex -> its neighbours."""

MAX_WORK = 500_000
"""Vertices that exact counting may look at in all case distinctions (and products of large polynomials, sixteen
multiplications for a vertex): a second or two."""

MAX_DEPTH = 200
"""Case distinctions within one another; Python's own limit is not far above."""


class _TooTangled(Exception):
    """Counting exactly would take too long."""


@dataclass(frozen=True, kw_only=True)
class RecoveryProbability:
    """The probability that deaths at one moment cost no state, each choice of who dies equally likely.

    Attributes:
        probability: between 0 and 1.
        num_failures: how many die.
        by: what dies, slots or whole nodes.
        population: of how many.
        method: ``exact`` is counted, all choices taken into account; ``sampled`` is an estimate.
        standard_error: of the estimate; 0 if exact.
        num_samples: choices drawn; 0 if exact.
    """

    probability: float
    num_failures: int
    by: Literal["slot", "node"]
    population: int
    method: Literal["exact", "sampled"]
    standard_error: float = 0.0
    num_samples: int = 0


@dataclass(frozen=True, kw_only=True)
class DeathGraph:
    """Who must not die, alone or together.

    Attributes:
        vertices: slots or nodes, ascending.
        fatal: those whose death alone loses state.
        pairs: ``(a, b)`` with a < b: those whose death together does, ascending; fatal ones are left out.
    """

    vertices: tuple[int, ...]
    fatal: frozenset[int]
    pairs: tuple[tuple[int, int], ...]


def death_graph(plan: Plan, cluster: Cluster, by: Literal["slot", "node"] = "slot") -> DeathGraph:
    """What the plan's owners and mirrors depend on.

    Args:
        plan: the plan.
        cluster: every slot of the plan, with its node.
        by: whether slots die or whole nodes.

    Raises:
        ValueError: if a slot of the plan is not of the cluster.
    """
    nodes = {slot.index: slot.node for slot in cluster.slots}
    unknown = sorted(set(plan.slots) - nodes.keys())
    if unknown:
        raise ValueError(f"slots {unknown} of plan {plan.number} are not of the cluster; list failed slots too")
    vertex = {slot: nodes[slot] if by == "node" else slot for slot in plan.slots}
    shares = mirror_shares(plan.owners, plan.mirrors, dict.fromkeys(plan.owners.cuts, 1))
    fatal = {vertex[owner] for axis in plan.owners.cuts for owner in plan.unprotected_by_owner(axis)}
    pairs = {tuple(sorted((vertex[owner], vertex[mirror]))) for owner, mirror in shares.mirrored}
    fatal |= {a for a, b in pairs if a == b}
    return DeathGraph(
        vertices=tuple(sorted(set(vertex.values()))),
        fatal=frozenset(fatal),
        pairs=tuple(sorted((a, b) for a, b in pairs if a not in fatal and b not in fatal)),
    )


def recovery_probability(
    plan: Plan,
    num_failures: int,
    *,
    cluster: Cluster,
    by: Literal["slot", "node"] = "slot",
    seed: int = 0,
    num_samples: int = 20_000,
) -> RecoveryProbability:
    """The probability that so many deaths at once lose no state, so that the job goes on without a checkpoint.

    Counted exactly where that is a matter of a second, as it is for the planner's own mirrors; otherwise
    estimated from random choices. The answer says which.

    Args:
        plan: the plan.
        num_failures: how many slots or nodes die before the mirrors are completed again.
        cluster: every slot of the plan, with its node.
        by: whether slots die or whole nodes.
        seed: of the random choices.
        num_samples: how many random choices, if it comes to that.

    Raises:
        ValueError: if there are fewer slots or nodes than failures, or numbers are out of range.
    """
    graph = death_graph(plan, cluster, by)
    return chance_of(graph, num_failures, by=by, seed=seed, num_samples=num_samples)


def chance_of(
    graph: DeathGraph,
    num_failures: int,
    *,
    by: Literal["slot", "node"] = "slot",
    seed: int = 0,
    num_samples: int = 20_000,
) -> RecoveryProbability:
    """`recovery_probability` of a plan whose graph is known already.

    Args:
        graph: of the plan.
        num_failures: how many die.
        by: what the vertices are.
        seed: of the random choices.
        num_samples: how many.

    Raises:
        ValueError: if there are fewer vertices than failures, or numbers are out of range.
    """
    errors: list[str] = []
    if not 0 <= num_failures <= len(graph.vertices):
        errors.append(
            f"num_failures ({num_failures}) must be from 0 to the plan's {by}s ({len(graph.vertices)}); more cannot die"
        )
    if num_samples < 1:
        errors.append(f"num_samples ({num_samples}) must be at least 1; an estimate needs samples")
    if errors:
        raise ValueError("; ".join(errors))
    size = len(graph.vertices)
    try:
        harmless = count_independent_sets(graph, num_failures)
    except _TooTangled:
        share = _sample(graph, num_failures, seed, num_samples)
        return RecoveryProbability(
            probability=share,
            num_failures=num_failures,
            by=by,
            population=size,
            method="sampled",
            # By Laplace's rule of succession, so that "none of the samples" does not claim certainty.
            standard_error=math.sqrt(_smoothed(share, num_samples) / num_samples),
            num_samples=num_samples,
        )
    return RecoveryProbability(
        probability=harmless / math.comb(size, num_failures),
        num_failures=num_failures,
        by=by,
        population=size,
        method="exact",
    )


def _smoothed(share: float, num_samples: int) -> float:
    p = (share * num_samples + 1) / (num_samples + 2)
    return p * (1 - p)


def count_independent_sets(graph: DeathGraph, size: int) -> int:
    """How many choices of ``size`` vertices hit neither a fatal vertex nor both ends of a pair."""
    neighbours: dict[int, set[int]] = {vertex: set() for vertex in graph.vertices if vertex not in graph.fatal}
    for a, b in graph.pairs:
        neighbours[a].add(b)
        neighbours[b].add(a)
    counter = _Counter(size)
    return counter.count({vertex: frozenset(others) for vertex, others in neighbours.items()})[size]


class _Counter:
    """Counts independent sets by size, up to a limit.

    Counts of separate parts multiply as polynomials (the independence polynomial); of a vertex, sets without
    it and sets with it (then without its neighbours) add up. Paths and rings have a closed form, so only
    vertices with three or more neighbours cost a case distinction.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._work = 0
        self._depth = 0

    def count(self, graph: Graph) -> list[int]:
        """``result[k]``: independent sets of k vertices, for k up to the limit."""
        shapes: dict[tuple[str, int], int] = {}  # equal parts are counted once
        total = self._one()
        for part in _parts(graph):
            degrees = [len(graph[vertex]) for vertex in part]
            if max(degrees) > 2:
                total = self._times(total, self._branch({vertex: graph[vertex] for vertex in part}))
            else:
                kind = "ring" if min(degrees) == 2 else "path"
                shapes[kind, len(part)] = shapes.get((kind, len(part)), 0) + 1
        for (kind, length), times in sorted(shapes.items()):
            total = self._times(total, self._power(self._line(kind, length), times))
        return total

    def _branch(self, graph: Graph) -> list[int]:
        self._spend(len(graph))
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _TooTangled
        vertex = max(graph, key=lambda one: (len(graph[one]), -one))
        without = self.count(_less(graph, {vertex}))
        having = self.count(_less(graph, {vertex, *graph[vertex]}))
        self._depth -= 1
        return [a + b for a, b in zip(without, [0, *having], strict=False)]

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise _TooTangled

    def _line(self, kind: str, length: int) -> list[int]:
        """Independent sets of a path, C(n-k+1, k), or a ring, n/(n-k) C(n-k, k); of sets of k among n."""
        if kind == "path":
            return [math.comb(max(0, length - k + 1), k) for k in range(self._limit + 1)]
        return [length * math.comb(length - k, k) // (length - k) if k < length else 0 for k in range(self._limit + 1)]

    def _times(self, a: list[int], b: list[int]) -> list[int]:
        self._spend((len(a) - a.count(0)) * self._limit // 16)
        product = [0] * (self._limit + 1)
        for i, x in enumerate(a):
            if x:
                for j in range(self._limit + 1 - i):
                    product[i + j] += x * b[j]
        return product

    def _power(self, base: list[int], exponent: int) -> list[int]:
        """A polynomial with constant term 1, to a power."""
        if not any(base[2:]):  # single vertices, pairs, rings of three: nearly all there is
            slope = base[1] if self._limit else 0
            return [math.comb(exponent, k) * slope**k for k in range(self._limit + 1)]
        result = self._one()
        for _ in range(exponent):
            result = self._times(result, base)
        return result

    def _one(self) -> list[int]:
        return [int(k == 0) for k in range(self._limit + 1)]


def _parts(graph: Mapping[int, Iterable[int]]) -> list[list[int]]:
    """The connected parts."""
    seen: set[int] = set()
    parts: list[list[int]] = []
    for start in sorted(graph):
        if start in seen:
            continue
        seen.add(start)
        part = [start]
        for vertex in part:
            fresh = sorted(set(graph[vertex]) - seen)
            seen.update(fresh)
            part += fresh
        parts.append(part)
    return parts


def _less(graph: Graph, gone: set[int]) -> Graph:
    return {vertex: others - gone for vertex, others in graph.items() if vertex not in gone}


def _sample(graph: DeathGraph, size: int, seed: int, num_samples: int) -> float:
    """The share of random choices that lose nothing."""
    place = {vertex: index for index, vertex in enumerate(graph.vertices)}
    fatal = np.zeros(len(place), dtype=bool)
    fatal[[place[vertex] for vertex in graph.fatal]] = True
    first, second = (np.array([place[pair[end]] for pair in graph.pairs], dtype=np.int64) for end in (0, 1))
    generator = np.random.Generator(np.random.PCG64(seed))
    harmless = 0
    batch = max(1, 4_000_000 // (len(place) + len(first)))
    for start in range(0, num_samples, batch):
        rows = min(batch, num_samples - start)
        dead = np.zeros((rows, len(place)), dtype=bool)
        chosen = np.argpartition(generator.random((rows, len(place))), min(size, len(place) - 1), axis=1)[:, :size]
        np.put_along_axis(dead, chosen, True, axis=1)
        lost = (dead & fatal).any(axis=1) | (dead[:, first] & dead[:, second]).any(axis=1)
        harmless += int(rows - lost.sum())
    return harmless / num_samples
