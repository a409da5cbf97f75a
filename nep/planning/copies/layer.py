"""The copies of one layer while they change, with exact quotas after every change.

What a change costs is the number of copies that a slot needs and has not got the weights of. Taking a change back is
free: until the new placement is in force a slot still has what it had.
"""

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nep.planning.copies.place import Copies, SlotLimits
from nep.planning.copies.quotas import TokenGraph

_APART = 0.003
"""What one more component of slots between which no token can move counts as, in shares of the average level."""

_SQUARINGS = 5
"""The score is the 2**5-norm of the levels: nearly the fullest slot, but relief of the second fullest counts."""


class Change(NamedTuple):
    """A copy that is added to a slot (``sign`` 1) or removed from it (-1)."""

    expert: int
    slot: int
    sign: int


@dataclass(frozen=True)
class Solved:
    """The best quotas of a placement.

    Attributes:
        tokens: of each slot.
        shares: of each expert with several copies, slot -> tokens.
        full: the fullest slots, which no token can leave; empty if all are within a token of the average.
        component: slot -> the first of the slots that tokens can move between over experts with several copies.
        level: tokens per speed of the fullest slot; 1 is the average over all slots with a place.
        score: what changes are judged by, lower is better: the level, smoothed, what the sums of copies' gradients
            cost, and what it is worth that tokens can move.
    """

    tokens: list[int]
    shares: dict[int, dict[int, int]]
    full: list[int]
    component: dict[int, int]
    level: float
    score: float


class LayerCopies:
    """See the module.

    Args:
        copies: ``[experts, slots]``; an expert may lack copies at first. Copies on slots without a place are ignored.
        tokens: of each expert, at least 1.
        limits: the slots.
        previous: ``[experts, slots]``, the copies that slots have the weights of.
        needed: copies that every expert should keep or get: 1 or 2.
    """

    def __init__(
        self, copies: Copies, tokens: Sequence[int], limits: SlotLimits, previous: Copies, needed: int = 1
    ) -> None:
        experts, slots = copies.shape
        self.tokens = list(tokens)
        self.speeds = list(limits.speeds_ppm)
        self.slots = [slot for slot in range(slots) if limits.places[slot]]
        self.previous: NDArray[np.bool_] = previous.astype(bool)
        self.free = [min(places, experts) for places in limits.places]
        self.on_slot: list[set[int]] = [set() for _ in range(slots)]
        self.hosts: list[list[int]] = [[] for _ in range(experts)]
        self.average = sum(self.tokens) / sum(self.speeds[slot] for slot in self.slots)
        self._domains = limits.apart_in
        self._several_domains = len({self._domains[slot] for slot in self.slots}) > 1
        self._links, self._far = limits.links, limits.far_price
        self._needed = min(needed, len(self.slots))
        self._shared: set[int] = set()
        self._single_tokens = [0] * slots
        for expert, slot in zip(*(array.tolist() for array in np.nonzero(copies)), strict=True):
            if limits.places[slot]:
                self._change(Change(expert, slot, 1))
        self.solved = self._solve()

    def copies(self) -> Copies:
        """The placement as it is now, ``[experts, slots]``."""
        result = np.zeros(self.previous.shape, dtype=np.int8)
        for expert, hosts in enumerate(self.hosts):
            result[expert, hosts] = 1
        return result

    def lacking(self) -> list[int]:
        """Experts with fewer copies than needed, those without any first, then the heaviest."""
        few = [expert for expert, hosts in enumerate(self.hosts) if len(hosts) < self._needed]
        return sorted(few, key=lambda expert: (len(self.hosts[expert]), -self.tokens[expert], expert))

    def apply(self, changes: Sequence[Change]) -> None:
        """Makes the changes and solves the quotas anew."""
        for change in changes:
            self._change(change)
        self.solved = self._solve()

    def judge(self, changes: Sequence[Change]) -> Solved:
        """What `apply` would lead to."""
        for change in changes:
            self._change(change)
        solved = self._solve()
        for change in reversed(changes):
            self._change(change._replace(sign=-change.sign))
        return solved

    def cost(self, changes: Sequence[Change]) -> int:
        """Copies that have to be sent for these changes; negative if fewer have to than without them."""
        return sum([change.sign for change in changes if not self.previous[change.expert, change.slot]])

    def sums(self, changes: Sequence[Change]) -> float:
        """By how much these changes raise what gradient sums between scale-up domains cost, as `score`."""
        if not self._far:
            return 0.0
        added: dict[int, list[int]] = {}
        removed: dict[int, list[int]] = {}
        for expert, slot, sign in changes:
            (added if sign > 0 else removed).setdefault(expert, []).append(slot)
        more = 0.0
        for expert in sorted(added.keys() | removed.keys()):
            hosts = self.hosts[expert]
            gone = removed.get(expert, [])
            after = [host for host in hosts if host not in gone] + added.get(expert, [])
            more += self._sum_price(after) - self._sum_price(hosts)
        return more

    @property
    def largest_relief(self) -> float:
        """By how much taking away one copy can lower what gradient sums cost, at most."""
        return 2 * self._far

    def _sum_price(self, hosts: Sequence[int]) -> float:
        """Every copy sends to those in other scale-up domains what they own: each as much."""
        links = [self._links[host] for host in hosts]
        number = len(links)
        if number < 2 or links.count(links[0]) == number:
            return 0.0
        return sum([number - links.count(link) for link in links]) * self._far / number

    def removable(self, expert: int, slot: int) -> bool:
        """Whether an expert can do without its copy there and stays in two fault domains if it was."""
        hosts = self.hosts[expert]
        if len(hosts) <= self._needed:
            return False
        before = {self._domains[host] for host in hosts}
        after = {self._domains[host] for host in hosts if host != slot}
        return len(hosts) == 2 or len(after) > 1 or len(before) == 1

    def addable(self, expert: int, slot: int) -> bool:
        """Whether a slot may get a copy, its places apart: not one there already, nor all in one fault domain."""
        hosts = self.hosts[expert]
        if slot in hosts:
            return False
        domain = self._domains[slot]
        return not self._several_domains or not hosts or any(self._domains[host] != domain for host in hosts)

    def _change(self, change: Change) -> None:
        expert, slot, sign = change
        hosts = self.hosts[expert]
        if len(hosts) == 1:
            self._single_tokens[hosts[0]] -= self.tokens[expert]
        if sign > 0:
            insort(hosts, slot)
            self.on_slot[slot].add(expert)
        else:
            hosts.remove(slot)
            self.on_slot[slot].remove(expert)
        self.free[slot] -= sign
        if len(hosts) == 1:
            self._single_tokens[hosts[0]] += self.tokens[expert]
        if len(hosts) > 1:
            self._shared.add(expert)
        else:
            self._shared.discard(expert)

    def _solve(self) -> Solved:
        shared = sorted(self._shared)
        tokens = list(self._single_tokens)
        total_speed = sum([self.speeds[slot] for slot in self.slots if self.on_slot[slot]])
        graph = TokenGraph([self.hosts[expert] for expert in shared], self.speeds, total_speed)
        shares, full = graph.solve([self.tokens[expert] for expert in shared], tokens)
        levels = [tokens[slot] / self.speeds[slot] / self.average for slot in self.slots]
        component = self._components(shared)
        return Solved(
            tokens=tokens,
            shares=dict(zip(shared, shares, strict=True)),
            full=full,
            component=component,
            level=max(levels),
            score=_norm(levels)
            + _APART * len(set(component.values()))
            + (sum([self._sum_price(self.hosts[expert]) for expert in shared]) if self._far else 0.0),
        )

    def _components(self, shared: list[int]) -> dict[int, int]:
        parent = list(range(len(self.speeds)))
        for expert in shared:
            roots = []
            for slot in self.hosts[expert]:
                while parent[slot] != slot:
                    slot = parent[slot]
                roots.append(slot)
            first = min(roots)
            for root in roots:
                parent[root] = first
        # Roots are the first slots, so a parent's own root is known by the time it is asked for.
        for slot in range(len(parent)):
            parent[slot] = parent[parent[slot]]
        return {slot: parent[slot] for slot in self.slots}


def _norm(levels: list[float]) -> float:
    """A mean that the largest rule; of products and square roots, which round the same way everywhere."""
    total = 0.0
    for level in levels:
        for _ in range(_SQUARINGS):
            level *= level
        total += level
    total /= len(levels)
    for _ in range(_SQUARINGS):
        total = math.sqrt(total)
    return total
