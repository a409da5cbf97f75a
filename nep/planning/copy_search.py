"""Small changes of one layer's copies that bring the fullest slots down, each judged by exact quotas.

A change adds and removes copies. What it costs is the number of copies that a slot needs and did not have in the
placement that the search began with: taking a change back is free, since the slot still has the weights.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nep.planning.copies import Copies, SlotLimits
from nep.planning.quotas import TokenGraph

_APART = 0.001
"""What one more component of slots between which no token can move counts as, in shares of the average level."""

_HOT = 3  # experts of the fullest slots, and emptiest slots, that are tried as new neighbours


class Change(NamedTuple):
    """A copy that is added to a slot (``sign`` 1) or removed from it (-1)."""

    expert: int
    slot: int
    sign: int


@dataclass(frozen=True)
class Move:
    """Changes that are made together.

    Attributes:
        changes: what is added and removed, removals before additions to the same slot.
        cost: copies that have to be sent for it; negative if fewer have to than before.
        gain: by how much it lowers the score.
    """

    changes: tuple[Change, ...]
    cost: int
    gain: float

    @property
    def value(self) -> float:
        """What the search maximises: gain per copy sent; free ones are worth four times their gain."""
        return self.gain / max(self.cost, 0.25)


class CopySearch:
    """The copies of one layer while they change.

    Args:
        copies: ``[experts, slots]``; an expert may be without a copy until `place` gives it one.
        tokens: of each expert.
        limits: the slots; copies on slots without a place are not counted.
        previous: the copies that slots have the weights of.
    """

    def __init__(self, copies: Copies, tokens: Sequence[int], limits: SlotLimits, previous: Copies) -> None:
        experts, slots = copies.shape
        self.tokens = list(tokens)
        self._speeds = list(limits.speeds_ppm)
        self._domains = limits.domains
        self._needed = limits.needed_copies(experts)
        self._slots = [slot for slot in range(slots) if limits.places[slot]]
        self._several_domains = len({limits.domains[slot] for slot in self._slots}) > 1
        self._previous: NDArray[np.bool_] = previous.astype(bool)
        self._free = [min(places, experts) for places in limits.places]
        self._on: list[set[int]] = [set() for _ in range(slots)]
        self.hosts: list[list[int]] = [[] for _ in range(experts)]
        self._single = [0] * slots  # tokens of the experts whose only copy is there
        self._fair = sum(tokens) / sum(self._speeds[slot] for slot in self._slots)
        for expert, slot in zip(*(array.tolist() for array in np.nonzero(copies)), strict=True):
            self._change(Change(expert, slot, 1))
        self._solve()

    def copies(self) -> Copies:
        """The placement as it is now, ``[experts, slots]``."""
        result = np.zeros(self._previous.shape, dtype=np.int8)
        for expert, hosts in enumerate(self.hosts):
            result[expert, hosts] = 1
        return result

    @property
    def level(self) -> float:
        """Level of the fullest slot under the best quotas; 1 is the average over all slots with a place."""
        return self._level

    def lacking(self) -> list[int]:
        """Experts with fewer copies than they need and slots allow, the heaviest first."""
        most = min(self._needed, len(self._slots))
        few = [expert for expert, hosts in enumerate(self.hosts) if len(hosts) < most]
        return sorted(few, key=lambda expert: (-self.tokens[expert], expert))

    # --- state ---

    def _change(self, change: Change) -> None:
        expert, slot, sign = change
        hosts = self.hosts[expert]
        if len(hosts) == 1:
            self._single[hosts[0]] -= self.tokens[expert]
        if sign > 0:
            insort(hosts, slot)
            self._on[slot].add(expert)
        else:
            hosts.remove(slot)
            self._on[slot].remove(expert)
        if len(hosts) == 1:
            self._single[hosts[0]] += self.tokens[expert]
        self._free[slot] -= sign

    def apply(self, changes: Sequence[Change]) -> None:
        """Makes the changes and solves the quotas anew."""
        for change in changes:
            self._change(change)
        self._solve()

    def _solve(self) -> None:
        shared = [expert for expert, hosts in enumerate(self.hosts) if len(hosts) > 1]
        self._slot_tokens = list(self._single)
        total_speed = sum([self._speeds[slot] for slot in self._slots if self._on[slot]])
        graph = TokenGraph([self.hosts[expert] for expert in shared], self._speeds, total_speed)
        shares, self._full = graph.solve([self.tokens[expert] for expert in shared], self._slot_tokens)
        self._shares = dict(zip(shared, shares, strict=True))
        level = max([self._slot_tokens[slot] / self._speeds[slot] for slot in self._slots])
        self._level = level / self._fair if self._fair else 1.0
        self._component = self._components(shared)
        self.score = self._level + _APART * len(set(self._component.values()))

    def _components(self, shared: list[int]) -> dict[int, int]:
        """Slot -> the first slot of those it is connected with."""
        parent = list(range(len(self._speeds)))
        for expert in shared:
            roots = []
            for slot in self.hosts[expert]:
                while parent[slot] != slot:
                    slot = parent[slot]
                roots.append(slot)
            first = min(roots)
            for root in roots:
                parent[root] = first
        component: dict[int, int] = {}
        for slot in self._slots:
            root = slot
            while parent[root] != root:
                root = parent[root]
            component[slot] = root
        return component

    def cost(self, changes: Sequence[Change]) -> int:
        """Copies that have to be sent for these changes; see the module."""
        return sum([change.sign for change in changes if not self._previous[change.expert, change.slot]])

    def _removable(self, expert: int, slot: int) -> bool:
        """Whether an expert can do without its copy there."""
        rest = [host for host in self.hosts[expert] if host != slot]
        if len(rest) < max(1, self._needed):
            return False
        apart = len({self._domains[host] for host in rest})
        return len(rest) == 1 or apart > 1 or len({self._domains[host] for host in self.hosts[expert]}) == 1

    def _addable(self, expert: int, slot: int) -> bool:
        """Whether a slot may get a copy, apart from its places: not there yet, and in another fault domain."""
        hosts = self.hosts[expert]
        if slot in hosts:
            return False
        if not self._several_domains or not hosts:
            return True
        return len({self._domains[host] for host in (*hosts, slot)}) > 1

    # --- moves ---

    def place(self, expert: int) -> bool:
        """Gives an expert a copy where that costs least, by an estimate; false if there is nowhere to put it.

        A free place is taken, or that of an expert that has other copies.
        """
        best: tuple[float, int, int] | None = None
        weight = self.tokens[expert]
        for slot in self._slots:
            if not self._addable(expert, slot):
                continue
            have, speed = self._slot_tokens[slot], self._speeds[slot]
            options = [(-1, 0, 0)] if self._free[slot] > 0 else []
            for victim in sorted(self._on[slot]) if not options else ():
                if self._removable(victim, slot):
                    options.append((victim, self._shares[victim][slot], self.tokens[victim]))
            for victim, there, all_of_it in options:
                # What the expert adds, less what leaves; and a heavy victim was a wide bridge.
                estimate = (have - there + weight) / speed + 0.3 * all_of_it / speed
                if best is None or (estimate, slot, victim) < best:
                    best = (estimate, slot, victim)
        if best is None:
            return False
        _, slot, victim = best
        changes = [Change(victim, slot, -1)] if victim >= 0 else []
        self.apply([*changes, Change(expert, slot, 1)])
        return True

    def refill(self) -> None:
        """Puts copies that slots still have the weights of back on free places, most tokens first."""
        changes: list[Change] = []
        for slot in self._slots:
            idle = [int(expert) for expert in np.flatnonzero(self._previous[:, slot])]
            idle = [expert for expert in idle if self._addable(expert, slot)]
            idle.sort(key=lambda expert: (-self.tokens[expert] // len(self.hosts[expert]), expert))
            changes += [Change(expert, slot, 1) for expert in idle[: max(0, self._free[slot])]]
        if changes:
            self.apply(changes)

    def best_move(self, min_gain: float) -> Move | None:
        """The move of most value that pays, by exact quotas; None if none does.

        Args:
            min_gain: what each copy that has to be sent must bring, in shares of the average level.
        """
        if not self._full:
            return None
        best: Move | None = None
        score = self.score
        for changes in self._candidates():
            cost = self.cost(changes)
            self.apply(changes)
            gain = score - self.score
            for change in reversed(changes):
                self._change(change._replace(sign=-change.sign))
            move = Move(tuple(changes), cost, gain)
            if gain > max(1e-5, min_gain * cost) and (best is None or move.value > best.value):
                best = move
        self._solve()
        return best

    def _candidates(self) -> Iterator[list[Change]]:
        full = set(self._full)
        others = [slot for slot in self._slots if slot not in full]
        if not others:
            return
        others.sort(key=lambda slot: (self._slot_tokens[slot] / self._speeds[slot], slot))
        wanted = self._wanted(full, others)
        yield from list(self._exchanges(full, wanted))
        yield from list(self._bridges(full, others))

    def _wanted(self, full: set[int], others: list[int]) -> dict[int, float]:
        """Slot -> tokens that would have to go to its component for both to be equally full."""
        inside, speed = sum([self._slot_tokens[s] for s in full]), sum([self._speeds[s] for s in full])
        totals: dict[int, list[int]] = {}
        for slot in others:
            total = totals.setdefault(self._component[slot], [0, 0])
            total[0] += self._slot_tokens[slot]
            total[1] += self._speeds[slot]
        wanted: dict[int, float] = {}
        for slot in others:
            its_tokens, its_speed = totals[self._component[slot]]
            wanted[slot] = (inside * its_speed - its_tokens * speed) / (speed + its_speed)
        return wanted

    def _exchanges(self, full: set[int], wanted: dict[int, float]) -> Iterator[list[Change]]:
        """Exchanges of two experts of one copy; of each cost the two that come closest to what is wanted.

        A slot with a free place is as one that offers an expert without tokens.
        """
        single = [expert for expert, hosts in enumerate(self.hosts) if len(hosts) == 1]
        give = [expert for expert in single if self.hosts[expert][0] in full]
        take = [expert for expert in single if self.hosts[expert][0] in wanted]
        vacant = [slot for slot in wanted if self._free[slot] > 0]
        if not give or not (take or vacant):
            return
        source = np.array([self.hosts[expert][0] for expert in give])
        target = np.array([self.hosts[expert][0] for expert in take] + vacant)
        back = np.array(take + [-1] * len(vacant))
        weight = np.array([self.tokens[expert] for expert in give], dtype=np.float64)
        returned = np.array([self.tokens[expert] for expert in take] + [0] * len(vacant), dtype=np.float64)
        ideal = np.array([wanted[slot] for slot in target.tolist()])
        missed = np.abs(weight[:, None] - returned - ideal)
        new = ~self._previous
        cost = new[give][:, target].astype(np.int64) - new[give, source][:, None]
        cost += (new[back][:, source].T - new[back, target].astype(np.int64)) * (back >= 0)
        for price in range(-2, 3):
            of_price = np.where((cost == price) & (missed < ideal), missed, np.inf).ravel()
            for _ in range(2):
                pair = int(of_price.argmin())
                if of_price[pair] == np.inf:
                    break
                of_price[pair] = np.inf
                i, j = divmod(pair, len(target))
                a, b = int(source[i]), int(target[j])
                changes = [Change(give[i], a, -1)]
                if back[j] >= 0:
                    changes += [Change(int(back[j]), b, -1), Change(int(back[j]), a, 1)]
                yield [*changes, Change(give[i], b, 1)]

    def _bridges(self, full: set[int], others: list[int]) -> Iterator[list[Change]]:
        """New copies, on the emptiest slots, of experts that only the fullest have."""
        confined = {expert for slot in full for expert in self._on[slot]}
        confined = {expert for expert in confined if full.issuperset(self.hosts[expert])}
        for expert in sorted(confined, key=lambda expert: (-self.tokens[expert], expert))[:_HOT]:
            tried = 0
            for slot in others:
                if tried == _HOT or not self._addable(expert, slot):
                    continue
                victims: list[int] = []
                if self._free[slot] <= 0:
                    victims = [victim for victim in sorted(self._on[slot]) if self._removable(victim, slot)]
                    victims.sort(key=lambda victim: (self._shares[victim][slot], victim))
                    if not victims:
                        continue
                tried += 1
                new = Change(expert, slot, 1)
                if not victims:
                    yield [new]
                for victim in victims[:2]:
                    yield [Change(victim, slot, -1), new]
