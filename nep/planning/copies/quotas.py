"""How many of an expert's tokens each of its copies takes, in this step.

An expert with one copy leaves no choice. The tokens of an expert with several may be shared out so that all slots
finish together, and since that is solved anew from the counts of every step, it repairs what no placement could
foresee. The question is a flow from experts to slots with the least possible level, tokens per speed, of the
fullest slot. On a tree it has a greedy answer: from the leaves up, the slots below an expert take what they can
and the rest goes up. So the solver starts from shares in proportion to speed, finds every slot that tokens of the
fullest one could move to, evens out a tree over those, and stops once the set it found proves that nothing better
exists. Placements with few copies are trees already and need one round; where copies are many, flows need fewer.

Everything is arithmetic on Python integers in a fixed order: equal counts give equal quotas on any machine.
"""

from collections.abc import Sequence
from math import gcd

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nep.planning.copies.tree import Branch, tree_limits

Counts = NDArray[np.int64]

_TREE_ROUNDS = 2
"""Rounds that even out a tree; where copies are few, that is all it takes."""

_FLOW_ROUNDS = 50
"""Rounds, those of trees included, after which paths are taken one by one: slow, but sure to end."""


class TokenGraph:
    """The experts of one layer that have several copies, and the slots that share them.

    Args:
        hosts: for each such expert the slots with a copy, ascending, at least one.
        speeds: relative speed of each slot, positive integers.
        total_speed: of the slots that have any copy of the layer.
    """

    def __init__(self, hosts: list[list[int]], speeds: list[int], total_speed: int) -> None:
        self.hosts = hosts
        self.speeds = speeds
        self.total_speed = total_speed
        self._host_speeds = [sum([speeds[host] for host in of_expert]) for of_expert in hosts]
        self._on_slot: list[list[int]] = [[] for _ in speeds]
        for expert, of_expert in enumerate(hosts):
            for host in of_expert:
                self._on_slot[host].append(expert)
        self._members = [slot for slot, experts in enumerate(self._on_slot) if experts]
        beyond_tree = sum([len(of_expert) for of_expert in hosts]) - len(hosts) - len(self._members) + 1
        self._cyclic = 2 * beyond_tree > len(self._members)

    def solve(self, counts: list[int], tokens: list[int]) -> tuple[list[dict[int, int]], list[int]]:
        """Shares out the counts so that the level of the fullest slot is as low as possible.

        Args:
            counts: tokens of each expert of the graph.
            tokens: what each slot has besides; becomes what it has in all.

        Returns:
            For each expert slot -> tokens, and the slots that no token can leave and that are therefore as full as
            they are; empty if all slots are within a token of the average.
        """
        shares = self._proportional(counts, tokens)
        total = sum(tokens)
        rounds, flows_first = 0, self._cyclic and _FLOW_ROUNDS > 0
        while True:
            top = self._fullest(tokens)
            # `excess / speed` is the level that the fullest slot would keep with one token less.
            excess, speed = tokens[top] - 1, self.speeds[top]
            if excess * self.total_speed < total * speed:
                return shares, []
            if flows_first:
                flows_first, rounds = False, _TREE_ROUNDS
                self._flow(self._members, shares, tokens)
                continue
            reached, branches = self._reach(top, shares)
            inside = sum([tokens[slot] for slot in reached])
            # No token can leave the reached slots: if their average level is as high, nothing better exists.
            if excess * sum([self.speeds[slot] for slot in reached]) < inside * speed:
                return shares, reached
            if rounds < _TREE_ROUNDS:
                self._even_out(reached, branches, shares, tokens)
            elif rounds < _FLOW_ROUNDS:
                self._flow(reached, shares, tokens)
            else:
                self._take_path(reached, branches, shares, tokens)
            rounds += 1

    def _proportional(self, counts: list[int], tokens: list[int]) -> list[dict[int, int]]:
        """Shares in proportion to speed, the remainder on the first host; adds them to ``tokens``."""
        speeds = self.speeds
        shares: list[dict[int, int]] = []
        for count, hosts, host_speed in zip(counts, self.hosts, self._host_speeds, strict=True):
            left = count
            share: dict[int, int] = {}
            for host in hosts[1:]:
                part = count * speeds[host] // host_speed
                share[host] = part
                tokens[host] += part
                left -= part
            share[hosts[0]] = left
            tokens[hosts[0]] += left
            shares.append(share)
        return shares

    def _fullest(self, tokens: list[int]) -> int:
        """The slot, the first of equals, that would have the highest level with one token less."""
        top, most, its_speed = 0, tokens[0] - 1, self.speeds[0]
        for slot, (have, speed) in enumerate(zip(tokens, self.speeds, strict=True)):
            if (have - 1) * its_speed > most * speed:
                top, most, its_speed = slot, have - 1, speed
        return top

    def _reach(self, top: int, shares: list[dict[int, int]]) -> tuple[list[int], list[Branch]]:
        """All slots that tokens of ``top`` can move to, over any number of experts, and a tree that leads there.

        Of several experts of a slot the one with most tokens there goes first, since tokens are what can move.
        """
        seen = [False] * len(self.speeds)
        seen[top] = True
        visited: set[int] = set()
        reached = [top]
        branches: list[Branch] = []
        for slot in reached:
            waiting = [(-shares[expert][slot], expert) for expert in self._on_slot[slot] if expert not in visited]
            for minus_tokens, expert in sorted(waiting):
                if not minus_tokens:
                    break
                visited.add(expert)
                below = [host for host in self.hosts[expert] if not seen[host]]
                if below:
                    branches.append((expert, slot, below))
                    reached += below
                    for host in below:
                        seen[host] = True
        return reached, branches

    def _even_out(
        self, reached: list[int], branches: list[Branch], shares: list[dict[int, int]], tokens: list[int]
    ) -> None:
        """Makes the levels as equal as a tree allows, in place; tokens that other hosts have stay there."""
        branches = branches[::-1]  # leaves first
        movable: dict[int, int] = {}
        for expert, above, below in branches:
            share = shares[expert]
            for host in (above, *below):
                tokens[host] -= share[host]
            movable[expert] = sum([share[host] for host in below], share[above])
        limits = tree_limits(branches, reached, movable, tokens, self.speeds)
        for expert, above, below in branches:
            left = movable[expert]
            share = shares[expert]
            for host in below:
                part = min(left, limits[host] - tokens[host])
                share[host] = part
                tokens[host] += part
                left -= part
            share[above] = left
            tokens[above] += left

    def _flow(self, slots: list[int], shares: list[dict[int, int]], tokens: list[int]) -> None:
        """Brings as many tokens as possible below the average level of some slots, in place.

        A maximum flow: every wave moves what is above it one expert further on the shortest ways to slots with room,
        farthest first, until what is left has no way. (Preflows in waves, as Karzanov 1974.)
        """
        inside = sum([tokens[slot] for slot in slots])
        speed = sum([self.speeds[slot] for slot in slots])
        limits = [0] * len(tokens)
        for slot in slots:
            limits[slot] = -(-inside * self.speeds[slot] // speed)
        while self._wave(slots, limits, shares, tokens):
            pass

    def _wave(self, slots: list[int], limits: list[int], shares: list[dict[int, int]], tokens: list[int]) -> bool:
        """One wave of `_flow`; whether a token has moved."""
        distance = [len(tokens)] * len(tokens)  # no distance is as large: slots outside take no part
        near: list[int] = []
        waiting = 0  # slots with too much that are not found yet
        for slot in slots:
            room = limits[slot] - tokens[slot]
            distance[slot] = -1
            if room > 0:
                distance[slot] = 0
                near.append(slot)
            elif room:
                waiting += 1
        visited = [False] * len(self.hosts)
        for slot in near:  # grows: nearest first
            if not waiting:
                break
            further = distance[slot] + 1
            for expert in self._on_slot[slot]:
                if visited[expert]:
                    continue
                visited[expert] = True
                for host, part in shares[expert].items():
                    if part and distance[host] < 0:
                        distance[host] = further
                        near.append(host)
                        waiting -= tokens[host] > limits[host]
        moved = False
        for slot in reversed(near):
            excess = tokens[slot] - limits[slot]
            if excess > 0 and distance[slot]:
                tokens[slot] -= self._push(slot, excess, distance, shares, tokens)
                moved |= tokens[slot] < limits[slot] + excess
        return moved

    def _push(
        self, slot: int, excess: int, distance: list[int], shares: list[dict[int, int]], tokens: list[int]
    ) -> int:
        """Moves up to so many tokens of a slot to slots that are nearer, in place; returns how many it gave."""
        closer = distance[slot] - 1
        left = excess
        for expert in self._on_slot[slot]:
            share = shares[expert]
            part = min(left, share[slot])
            if part:
                for host in self.hosts[expert]:
                    if distance[host] == closer:
                        share[slot] -= part
                        share[host] += part
                        tokens[host] += part
                        left -= part
                        break
                if not left:
                    break
        return excess - left

    def _take_path(
        self, reached: list[int], branches: list[Branch], shares: list[dict[int, int]], tokens: list[int]
    ) -> None:
        """Moves tokens from the fullest slot to the emptiest that it reaches, in place.

        The fullest keeps a level that is not below the other's. So the highest level with one token less falls, or
        fewer slots have it, and that cannot go on for ever.
        """
        speeds = self.speeds
        above_of = {host: (expert, above) for expert, above, below in branches for host in below}
        top, end = reached[0], reached[0]
        for slot in reached:
            if tokens[slot] * speeds[end] < tokens[end] * speeds[slot]:
                end = slot
        amount = (tokens[top] * speeds[end] - tokens[end] * speeds[top]) // (speeds[top] + speeds[end])
        slot = end
        while slot != top:
            expert, slot = above_of[slot]
            amount = min(amount, shares[expert][slot])
        amount = max(1, amount)
        tokens[top] -= amount
        tokens[end] += amount
        slot = end
        while slot != top:
            expert, above = above_of[slot]
            shares[expert][above] -= amount
            shares[expert][slot] += amount
            slot = above


class LayerQuotas:
    """Quotas for the copies of one layer, prepared once and solved in every step.

    Args:
        copies: ``[experts, slots]``, 1 where a slot has a copy of an expert.
        speeds: relative speed of each slot, positive integers.
    """

    def __init__(self, copies: NDArray[np.int8], speeds: list[int]) -> None:
        self.shape: tuple[int, int] = (copies.shape[0], copies.shape[1])
        num_copies = copies.sum(axis=1, dtype=np.int64)
        self._orphans = np.flatnonzero(num_copies == 0)
        self._single = np.flatnonzero(num_copies == 1)
        self._single_slot = copies[self._single].argmax(axis=1)
        self._shared = np.flatnonzero(num_copies > 1)
        position, slot = np.nonzero(copies[self._shared])
        self._shared_at = (self._shared[position], slot)
        hosts: list[list[int]] = [[] for _ in range(len(self._shared))]
        for expert, host in zip(position.tolist(), slot.tolist(), strict=True):
            hosts[expert].append(host)
        total_speed = sum(speeds[used] for used in np.flatnonzero(copies.any(axis=0)).tolist())
        self.graph = TokenGraph(hosts, speeds, total_speed)

    def split(self, counts: Counts) -> Counts:
        """Quotas ``[experts, slots]`` of the counts ``[experts]``; see `QuotaSolver.split`."""
        shares, _ = self.solve(counts)
        quotas = np.zeros(self.shape, dtype=np.int64)
        quotas[self._single, self._single_slot] = counts[self._single]
        quotas[self._shared_at] = [
            share[host] for share, hosts in zip(shares, self.graph.hosts, strict=True) for host in hosts
        ]
        return quotas

    def solve(self, counts: Counts) -> tuple[list[dict[int, int]], list[int]]:
        """Shares of each expert with several copies, slot -> tokens, and the tokens of each slot.

        Raises:
            ValueError: if an expert without a copy has tokens.
        """
        if counts[self._orphans].any():
            expert = int(self._orphans[counts[self._orphans] > 0][0])
            raise ValueError(f"expert {expert} has {counts[expert]} tokens and no copy; place one")
        base = np.zeros(self.shape[1], dtype=np.int64)
        np.add.at(base, self._single_slot, counts[self._single])
        tokens: list[int] = base.tolist()
        shares, _ = self.graph.solve(counts[self._shared].tolist(), tokens)
        return shares, tokens


class QuotaSolver:
    """Quotas for one placement of copies, prepared once and solved in every step.

    Args:
        copies: ``[layers, experts, slots]``, 1 where a slot has a copy of an expert.
        speeds_ppm: relative speed of each slot, positive integers.

    Raises:
        ValueError: if shapes do not fit, an entry is not 0 or 1, or a speed is not positive.
    """

    def __init__(self, copies: ArrayLike, speeds_ppm: Sequence[int]) -> None:
        array = np.asarray(copies)
        speeds = [int(speed) for speed in speeds_ppm]
        errors: list[str] = []
        if array.ndim != 3 or 0 in array.shape or array.shape[2] != len(speeds):
            errors.append(
                f"copies have shape {array.shape} and {len(speeds)} slots a speed; "
                "copies must be [layers, experts, slots], none of them 0"
            )
        if not np.isin(array, (0, 1)).all():
            errors.append("copies must be 0 or 1; a second copy of an expert on one slot is of no use")
        if any(speed < 1 for speed in speeds):
            errors.append(f"speeds_ppm ({min(speeds)}) must be at least 1; take copies off a slot that stands still")
        if errors:
            raise ValueError("; ".join(errors))
        divisor = gcd(*speeds)  # equal speeds become 1, which is faster
        flags = array.astype(np.int8)
        self.layers = tuple(LayerQuotas(layer, [speed // divisor for speed in speeds]) for layer in flags)
        self._shape = flags.shape

    def split(self, counts: ArrayLike) -> Counts:
        """Quotas of all layers.

        Args:
            counts: ``[layers, experts]``, tokens that the routers sent to each expert in this step.

        Returns:
            ``[layers, experts, slots]``: tokens for each copy, at least 0, which sum to ``counts``. Each slot has
            less than one token more than at the best possible level of the fullest slot; at equal speeds the
            fullest slot has as few tokens as possible.

        Raises:
            ValueError: if a count is negative or no integer, or an expert without a copy has tokens.
        """
        tokens = self._checked(counts)
        quotas = np.empty(self._shape, dtype=np.int64)
        for index, layer in enumerate(self.layers):
            quotas[index] = layer.split(tokens[index])
        return quotas

    def slot_tokens(self, counts: ArrayLike) -> Counts:
        """Tokens ``[layers, slots]`` of each slot under the quotas of these counts; see `split`."""
        tokens = self._checked(counts)
        return np.array([layer.solve(row)[1] for layer, row in zip(self.layers, tokens, strict=True)], np.int64)

    def _checked(self, counts: ArrayLike) -> Counts:
        array = np.asarray(counts)
        if array.shape != self._shape[:2] or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"counts have shape {array.shape} of {array.dtype}; "
                f"they must be integers [layers, experts] = {list(self._shape[:2])}"
            )
        if (array < 0).any():
            layer, expert = (int(index) for index in np.argwhere(array < 0)[0])
            raise ValueError(f"counts[{layer}, {expert}] ({array[layer, expert]}) must be at least 0")
        return array.astype(np.int64, copy=False)


def split_quotas(counts: ArrayLike, copies: ArrayLike, speeds_ppm: Sequence[int]) -> Counts:
    """Quotas for a placement that is used once; `QuotaSolver` prepares one that is used often."""
    return QuotaSolver(copies, speeds_ppm).split(counts)
