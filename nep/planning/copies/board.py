"""Fills the places of slots with copies, all layers at once."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_SWAP_ROUNDS = 12
_GOOD_ENOUGH = 1.002  # level of the fullest slot; quotas do the rest
_CHUNK = 1 << 22  # entries of the largest array of an exchange

# Reasons against a slot, each beyond the next; levels are near 1, so all but the last are beyond them.
_SAME_DOMAIN = 1e9
_CONNECTED = 1e6
_OTHER_LINK = 1e7
_NOT_IN_TURN = 1e4
_TIE = 1e-9


class Board:
    """Places of all layers while they fill up.

    ``sequence`` lists for each layer the expert of every copy: experts with several copies first, then by load.

    Args:
        share: ``[layers, experts]``, load of each copy if they share equally, on the scale of ``speeds``: a slot's
            level is its load over its speed, and on average 1.
        copies: ``[layers, experts]``, copies of each expert; every layer has as many in all.
        speeds: of each slot.
        places: of each slot, for copies of one layer.
        domains: fault domain of each slot, at least 0.
        fewest: copies that every expert must have, in as many fault domains: 1 or 2.
        links: scale-up domain of each slot, at least 0.
        bridges: experts, the first of the sequence, whose first two copies lie in different scale-up domains.

    Attributes:
        dropped: whether some copy found no place on a slot without one of the same expert.
        confined: whether some expert may have got all its copies in one fault domain.
    """

    def __init__(
        self,
        share: Floats,
        copies: Ints,
        speeds: Floats,
        places: Ints,
        domains: Ints,
        fewest: int,
        links: Ints,
        bridges: int,
    ) -> None:
        layers, experts = share.shape
        self.shape = (layers, experts, len(places))
        self.layer = np.arange(layers)
        self.speeds, self.places, self.domains = speeds, places, domains
        self.links = None
        if len(set(links[places > 0].tolist())) > 1:
            self.links = _Links(layers, experts, links, places > 0, bridges)
        shared = copies > 1
        order = np.lexsort((-share, ~shared), axis=-1)
        if fewest > 1:
            # Copies that every expert must have come before those that only balance.
            extra = np.take_along_axis(copies, order, axis=1) - fewest
            order = np.concatenate([order, order], axis=1)
            repeats = np.concatenate([np.full_like(extra, fewest), extra], axis=1)
        else:
            repeats = np.take_along_axis(copies, order, axis=1)
        self.num_needed = experts * fewest if fewest > 1 else 0
        self.sequence = np.repeat(order.ravel(), repeats.ravel()).reshape(layers, -1)
        self.of_copy = np.take_along_axis(share, self.sequence, axis=1)
        self.is_shared = np.take_along_axis(shared, self.sequence, axis=1)
        self.num_shared = self.is_shared.sum(axis=1)
        self.level = np.zeros((layers, len(places)))
        self.free = np.tile(places, (layers, 1))
        self.slot_of = np.full(self.sequence.shape, -1)
        self.dropped = False
        self.confined = False

    def place_shared(self) -> None:
        """Places experts with several copies, and singles that stand beside them in the sequence."""
        layers, experts, slots = self.shape
        layer, share = self.layer, self.of_copy
        # Of slots that are alike each layer begins with another one, or some had the hot experts of all layers.
        tie = _TIE * ((np.arange(slots) - layer[:, None]) % slots)
        several_domains = len(set(self.domains[self.places > 0].tolist())) > 1
        component = np.tile(np.arange(slots), (layers, 1))
        has = np.zeros((layers, experts, slots), dtype=bool)
        first = np.full((layers, experts), -1)  # slot of the first copy
        domain = np.full((layers, experts), -1)  # of all copies; -1 if there are none, -2 if they are in several
        for index in range(int(self.num_shared.max())):
            expert = self.sequence[:, index]
            begin = first[layer, expert]
            own = np.where(begin >= 0, component[layer, begin], -1)
            used = has[layer, expert]
            key = self.level + share[:, index, None] / self.speeds + tie
            key += _CONNECTED * (component == own[:, None])
            if several_domains:
                key += _SAME_DOMAIN * (self.domains == domain[layer, expert][:, None])
                if index < self.num_needed:
                    key += _SAME_DOMAIN * self._scarce(index, domain[layer, expert])
            if self.links is not None:
                key += self.links.against(expert, begin >= 0, component)
            key[used | (self.free <= 0)] = np.inf
            slot = key.argmin(axis=1)
            fits = key[layer, slot] < np.inf
            self.dropped |= not fits.all()
            self.confined |= bool((key[layer, slot] >= _SAME_DOMAIN).any())
            self._put(index, np.where(fits, slot, -1))
            at, expert, slot = layer[fits], expert[fits], slot[fits]
            has[at, expert, slot] = True
            if self.links is not None:
                self.links.put(at, expert, slot)
            joined, here, before = component[at, slot], self.domains[slot], domain[at, expert]
            own = np.where(own[fits] >= 0, own[fits], joined)
            merge = (component[at] == joined[:, None]) & self.is_shared[at, index][:, None]
            component[at] = np.where(merge, own[:, None], component[at])
            first[at, expert] = np.where(first[at, expert] < 0, slot, first[at, expert])
            domain[at, expert] = np.where((before == -1) | (before == here), here, -2)

    def _scarce(self, index: int, domain: Ints) -> NDArray[np.bool_]:
        """Slots in fault domains that must be left to others, or not every expert can be in two.

        With ``left`` experts to come, a domain can serve no more of them than it has free places: the places that
        count sum to at least twice ``left`` as long as all can be in two domains. A domain with ``left`` places or
        more loses nothing by serving one. What the others may lose is the slack.

        Args:
            index: place in the sequence, in which the two copies of an expert follow each other.
            domain: of the first copy; -1 if this is the first.

        Returns:
            ``[layers, slots]``.
        """
        number = int(self.domains.max()) + 1
        member = self.domains == np.arange(number)[:, None]
        free = np.maximum(self.free, 0) @ member.T.astype(np.int64)
        second = index % 2
        rows = self.layer[domain >= 0] if second else self.layer[:0]
        free[rows, domain[rows]] += 1  # as before the first copy
        left = self.num_needed // 2 - index // 2
        large = free >= left
        slack = np.minimum(free, left).sum(axis=1) - 2 * left + 2 - large.sum(axis=1)
        slack[rows] -= ~large[rows, domain[rows]]
        scarce: NDArray[np.bool_] = ~large & (slack < 1)[:, None]
        return scarce[:, self.domains]

    def _put(self, index: int, slot: Ints) -> None:
        fits = slot >= 0
        self.slot_of[:, index] = slot
        layer, slot = self.layer[fits], slot[fits]
        self.level[layer, slot] += self.of_copy[fits, index] / self.speeds[slot]
        self.free[layer, slot] -= 1

    def place_single(self) -> None:
        """Places what is left, heaviest first: each goes where the level is then lowest."""
        slots = self.shape[2]
        open_level = np.where(self.free > 0, self.level, np.inf)
        rows = self.layer * slots
        level, free, flat = self.level.ravel(), self.free.ravel(), open_level.ravel()
        for index in range(int(self.num_shared.max()), self.sequence.shape[1]):
            added = self.of_copy[:, index, None] / self.speeds
            slot = (open_level + added).argmin(axis=1)
            self.slot_of[:, index] = slot
            at = rows + slot
            level[at] += added[self.layer, slot]
            free[at] -= 1
            flat[at] = np.where(free[at] > 0, level[at], np.inf)

    def exchange(self) -> None:
        """Exchanges experts of one copy between full and less full slots, or moves them to a free place.

        The fullest slot is paired with the emptiest, the second fullest with the second emptiest and so on; each
        pair makes the one exchange that brings its levels closest. Every second round pairs differently.
        """
        table, load = self._singles()
        width = table.shape[2]
        half = self.shape[2] // 2
        if half == 0 or width == 0:
            return
        chunk = max(1, _CHUNK // (half * width * width))
        for begin in range(0, self.shape[0], chunk):
            rows = self.layer[begin : begin + chunk]
            idle = 0
            for turn in range(_SWAP_ROUNDS):
                rows = rows[self.level[rows].max(axis=1) > _GOOD_ENOUGH]
                if len(rows) == 0 or idle == 2:
                    break
                idle = 0 if self._exchange_pairs(rows, turn, table, load) else idle + 1

    def _singles(self) -> tuple[Ints, Floats]:
        """For each slot its copies that may be exchanged, as places in the sequence, and their load.

        Returns:
            ``[layers, slots, most per slot]`` twice: place, or -1 where there is no copy; load, 0 at one free place
            if the slot has one, and else nan.
        """
        layers, _, slots = self.shape
        layer, index = np.nonzero(~self.is_shared)
        slot = self.slot_of[layer, index]
        order = np.lexsort((slot, layer))
        layer, index, slot = layer[order], index[order], slot[order]
        number = np.bincount(layer * slots + slot, minlength=layers * slots)
        position = np.arange(len(layer)) - np.repeat(number.cumsum() - number, number)
        number = number.reshape(layers, slots)
        width = int((number + (self.free > 0)).max())
        table = np.full((layers, slots, width), -1)
        load = np.full((layers, slots, width), np.nan)
        table[layer, slot, position] = index
        load[layer, slot, position] = self.of_copy[layer, index]
        layer, slot = np.nonzero(self.free > 0)
        load[layer, slot, number[layer, slot]] = 0.0
        return table, load

    def _exchange_pairs(self, rows: Ints, turn: int, table: Ints, load: Floats) -> bool:
        """One round of `exchange` in these layers; whether anything changed."""
        half = self.shape[2] // 2
        order = self.level[rows].argsort(axis=1, kind="stable")
        emptier, fuller = order[:, :half], order[:, ::-1][:, :half]
        if turn % 2:
            emptier = np.roll(emptier, turn // 2 + 1, axis=1)
        row = rows[:, None]
        gap = self.level[row, fuller] - self.level[row, emptier]
        ideal = gap / (1.0 / self.speeds[fuller] + 1.0 / self.speeds[emptier])
        moved = load[row, fuller][:, :, :, None] - load[row, emptier][:, :, None, :]
        missed = np.abs(moved - ideal[:, :, None, None]).reshape(len(rows), half, -1)
        # nan compares as false: what may not be exchanged is not.
        useful = missed < (ideal * (1 - 1e-6))[:, :, None]
        missed = np.where(useful, missed, np.inf)
        best = missed.argmin(axis=2)
        which, pair = np.nonzero(useful.any(axis=2))
        give, take = np.divmod(best[which, pair], table.shape[2])
        layer, source, target = rows[which], fuller[which, pair], emptier[which, pair]
        amount = load[layer, source, give] - load[layer, target, take]
        self.level[layer, source] -= amount / self.speeds[source]
        self.level[layer, target] += amount / self.speeds[target]
        for array in (table, load):
            kept = array[layer, source, give].copy()
            array[layer, source, give] = array[layer, target, take]
            array[layer, target, take] = kept
        for slot, position in ((source, give), (target, take)):
            index = table[layer, slot, position]
            self.slot_of[layer[index >= 0], index[index >= 0]] = slot[index >= 0]
        return len(layer) > 0

    def copies(self) -> NDArray[np.int8]:
        """The placement."""
        result = np.zeros(self.shape, dtype=np.int8)
        layer, index = np.nonzero(self.slot_of >= 0)
        result[layer, self.sequence[layer, index], self.slot_of[layer, index]] = 1
        return result


class _Links:
    """Which scale-up domains experts with several copies are in.

    The sum of an expert's gradients is cheap inside a scale-up domain. So all its copies lie in one, but for those
    of a few bridges, the hottest experts, over which tokens can move between domains: the first joins two domains,
    every other one more.

    Args:
        layers: number of them.
        experts: likewise.
        links: scale-up domain of each slot.
        used: whether a slot has a place.
        bridges: how many bridges there are.
    """

    def __init__(self, layers: int, experts: int, links: Ints, used: NDArray[np.bool_], bridges: int) -> None:
        self.links, self.layer = links, np.arange(layers)
        number = int(links.max()) + 1
        self.has = np.zeros((layers, experts, number), dtype=bool)
        self.joined = np.zeros((layers, number), dtype=bool)
        self.left = np.full(layers, bridges)
        self.is_bridge = np.zeros((layers, experts), dtype=bool)
        self.position = np.array([(links[:slot] == link).sum() for slot, link in enumerate(links.tolist())])
        self.size = np.bincount(links)[links]
        self.order = np.flatnonzero(used)[links[used].argsort(kind="stable")]
        self.domains, self.begin = np.unique(links[self.order], return_index=True)
        self.complete = np.ones((layers, number), dtype=bool)
        self.finished = False

    def against(self, expert: Ints, begun: NDArray[np.bool_], component: Ints) -> Floats:
        """What speaks against slots, ``[layers, slots]``.

        Args:
            expert: of each layer, that gets a copy.
            begun: whether it has one already.
            component: of slots that tokens can move between, ``[layers, slots]``.
        """
        layer = self.layer
        if self.left.any():
            new = ~begun & (self.left > 0)
            self.is_bridge[layer[new], expert[new]] = True
            self.left[new] -= 1
        has = self.has[layer, expert]
        bridge = self.is_bridge[layer, expert]
        against = np.where(begun[:, None], ~has, self._complete(component))
        if not bridge.any():
            usual: Floats = _OTHER_LINK * against[:, self.links]
            return usual
        # A bridge goes from domains that are joined to one that is not; where there is none yet, from anywhere.
        start = bridge & ~begun & self.joined.any(axis=1)
        cross = bridge & (has.sum(axis=1) == 1)
        against = np.where(cross[:, None], self.joined | has, against)
        against = np.where(bridge[:, None] & ~begun[:, None], start[:, None] & ~self.joined, against)
        reasons: Floats = _OTHER_LINK * against[:, self.links] + self._turn() * bridge[:, None]
        return reasons

    def _complete(self, component: Ints) -> NDArray[np.bool_]:
        """Domains in which tokens can move from any slot to any other, ``[layers, domains]``: no need to join more."""
        if self.finished:
            return self.complete
        ordered = component[:, self.order]
        first = np.minimum.reduceat(ordered, self.begin, axis=1)
        self.complete[:, self.domains] = first == np.maximum.reduceat(ordered, self.begin, axis=1)
        self.finished = bool(self.complete.all())
        return self.complete

    def _turn(self) -> Floats:
        """Bridges go to other slots in every layer, each to one without another, or some had those of all layers."""
        number = self.has.shape[2]
        layer = self.layer[:, None]
        shift = layer + layer // self.size + self.is_bridge.sum(axis=1)[:, None]
        turn = (self.position - shift) % self.size / self.size + (self.links - layer) % number
        result: Floats = _NOT_IN_TURN / number * turn
        return result

    def put(self, layer: Ints, expert: Ints, slot: Ints) -> None:
        """Takes note of copies that were placed, at most one in each layer."""
        link = self.links[slot]
        self.has[layer, expert, link] = True
        bridge = self.is_bridge[layer, expert]
        self.joined[layer[bridge], link[bridge]] = True
