"""Where the copies of experts lie: how many each expert gets, and on which slots.

Copies have two uses. Tokens of an expert with several can go to any of them, so hot experts get more; and because
quotas shift tokens from slot to slot along such experts, the graph of slots and experts should be connected, which
takes experts + slots - 1 copies. Experts with several copies are therefore placed first, each next to what is not
connected yet, then all others, heaviest first, each on the slot that is fullest least; exchanges of the latter
polish. All layers are planned at once. Sums are of integers and everything else is elementwise, so the result
depends on nothing but the arguments.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nep.planning.loads import ExpertLoads

Copies = NDArray[np.int8]
"""``[layers, experts, slots]``: 1 where a slot has a copy of an expert."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_SCALE = 2**30  # the hottest expert of a layer, in the integers that planning counts tokens in
_SWAP_ROUNDS = 12
_GOOD_ENOUGH = 1.002  # fullest slot over average; quotas level the rest
_CHUNK = 1 << 22  # entries of the largest array of an exchange

# Reasons against a slot, each beyond any sum of the ones below it and of levels, which are near 1.
_IMPOSSIBLE = 1e12
_SAME_DOMAIN = 1e9
_CONNECTED = 1e6


@dataclass(frozen=True, kw_only=True)
class SlotLimits:
    """The slots of a replica as the placement of copies sees them, in the order of the slot dimension.

    Attributes:
        places: copies, of one layer, that each slot has memory for; 0 for a slot that must stay empty.
        speeds_ppm: relative speed of each slot.
        domains: fault domain of each slot.
    """

    places: tuple[int, ...]
    speeds_ppm: tuple[int, ...]
    domains: tuple[int, ...]

    def __post_init__(self) -> None:
        errors: list[str] = []
        lengths = {len(self.places), len(self.speeds_ppm), len(self.domains)}
        if lengths != {len(self.places)} or not self.places:
            errors.append(
                f"places ({len(self.places)}), speeds_ppm ({len(self.speeds_ppm)}) and domains "
                f"({len(self.domains)}) must have one entry per slot, and there must be a slot"
            )
        if any(places < 0 for places in self.places):
            errors.append(f"places {list(self.places)} must be at least 0")
        if any(speed < 1 for speed in self.speeds_ppm):
            errors.append(f"speeds_ppm {list(self.speeds_ppm)} must be at least 1; give a dead slot 0 places")
        if errors:
            raise ValueError("slot limits: " + "; ".join(errors))

    @classmethod
    def uniform(cls, num_slots: int, places: int, slots_per_domain: int = 1) -> "SlotLimits":
        """Equal slots of full speed."""
        return cls(
            places=(places,) * num_slots,
            speeds_ppm=(1_000_000,) * num_slots,
            domains=tuple(slot // slots_per_domain for slot in range(num_slots)),
        )

    @property
    def num_slots(self) -> int:
        """Slots, those without a place included."""
        return len(self.places)

    def without(self, slots: Iterable[int]) -> "SlotLimits":
        """The same with no place on these slots."""
        lost = frozenset(slots)
        places = tuple(0 if slot in lost else places for slot, places in enumerate(self.places))
        return SlotLimits(places=places, speeds_ppm=self.speeds_ppm, domains=self.domains)

    def num_places(self, num_experts: int) -> int:
        """Copies of a layer that fit, no expert twice on one slot.

        Raises:
            ValueError: if not even one copy of each expert does.
        """
        num_places = sum(min(places, num_experts) for places in self.places)
        if num_places < num_experts:
            raise ValueError(
                f"places {list(self.places)} are too few for {num_experts} experts (sum {num_places}); "
                "free memory, add a slot, or cut experts instead of copying them"
            )
        return num_places

    def needed_copies(self, num_experts: int) -> int:
        """Copies that an expert must have at least: 2, in two fault domains, where memory allows it, else 1."""
        by_domain: dict[int, int] = {}
        for places, domain in zip(self.places, self.domains, strict=True):
            by_domain[domain] = by_domain.get(domain, 0) + min(places, num_experts)
        # A domain can have no more than one of the two copies of each expert.
        return 2 if sum(min(places, num_experts) for places in by_domain.values()) >= 2 * num_experts else 1


def whole_tokens(loads: ExpertLoads) -> Ints:
    """Loads ``[layers, experts]`` as integers, in proportion within a layer, at least 1 each.

    At least 1, since an expert that nobody asked for yet may still be asked for.
    """
    largest = loads.mean.max(axis=1, keepdims=True)
    shares = loads.mean / np.where(largest > 0, largest, 1.0)
    return np.maximum(np.rint(shares * _SCALE), 1.0).astype(np.int64)


def count_copies(tokens: Ints, limits: SlotLimits, num_copies: int) -> Ints:
    """How many copies each expert gets.

    First, as far as they go, enough that no copy has more than a slot's fair share. Then by the largest quotient of
    load to the power 3/4 and copies. Plain load would minimise the largest copy, which matters if copies take equal
    shares; with quotas more experts with fewer copies are better, since more of the load can then be moved. (3/4 was
    best of 1/2 to 1 on DeepSeek-V3 loads with quotas of the next window; the power is made of square roots, which
    are exact everywhere.)

    Args:
        tokens: ``[layers, experts]``, at least 1.
        limits: the slots.
        num_copies: copies of all experts of a layer together.

    Returns:
        ``[layers, experts]``, at least 1, which sum to ``num_copies`` in each layer.
    """
    layers, experts = tokens.shape
    most = sum(places > 0 for places in limits.places)
    layer = np.arange(layers)
    fair = tokens.sum(axis=1) / most
    fewest = min(limits.needed_copies(experts), most) if num_copies >= 2 * experts else 1
    root = np.sqrt(tokens)
    weight = np.floor(root * np.sqrt(root) * 64).astype(np.int64)
    # What the loop below would arrive at anyway, for those layers where the copies suffice for it.
    enough = np.clip(np.ceil(tokens / fair[:, None]).astype(np.int64), fewest, most)
    left = num_copies - enough.sum(axis=1)
    divisor = weight.sum(axis=1) / np.maximum(left, 1)
    quotient = np.ceil(weight / divisor[:, None]).astype(np.int64)
    start = np.where(left[:, None] > 0, np.clip(quotient, enough, most), enough)
    copies = np.where(left[:, None] >= 0, start, fewest)
    left = num_copies - copies.sum(axis=1)

    def urgency(share: Floats, weighted: Floats, number: Ints, fair_share: Floats) -> Floats:
        return np.where(number >= most, -1.0, np.where(share > fair_share, share * _SCALE, weighted))

    key = urgency(tokens / copies, weight / copies, copies, fair[:, None])
    for step in range(int(left.max())):
        expert = key.argmax(axis=1)
        number = copies[layer, expert] + (left > step)
        copies[layer, expert] = number
        key[layer, expert] = urgency(tokens[layer, expert] / number, weight[layer, expert] / number, number, fair)
    return copies


def place_copies(loads: ExpertLoads, limits: SlotLimits, *, num_copies: int | None = None) -> Copies:
    """Places copies from scratch; see the module.

    No slot has more copies than places, or an expert twice. Copies of one expert are in two fault domains at least,
    unless the only free places are in one. `nep.planning.warm_start.plan_copies` goes on from here where slots are
    so uneven that this leaves something to gain.

    Args:
        loads: router loads.
        limits: the slots.
        num_copies: copies of all experts of a layer together; None means as many as there are places. More than fit
            are cut to what fits.

    Raises:
        ValueError: if the slots cannot hold every expert once, or ``num_copies`` is less than one of each.
    """
    layers, experts = loads.mean.shape
    slots = limits.num_slots
    places = np.minimum(np.array(limits.places, dtype=np.int64), experts)
    number = limits.num_places(experts)
    if num_copies is not None:
        if num_copies < experts:
            raise ValueError(f"num_copies ({num_copies}) must be at least one of each of {experts} experts")
        number = min(number, num_copies)
    tokens = whole_tokens(loads)
    copies = count_copies(tokens, limits, number)
    speeds = np.array(limits.speeds_ppm, dtype=np.float64)
    usable = int(np.array(limits.speeds_ppm, dtype=np.int64)[places > 0].sum())
    # Level 1 is the average: what all slots would have if everything could be shared out.
    weight = tokens / tokens.sum(axis=1, keepdims=True) * usable
    board = _Board(weight / copies, copies, speeds, places, np.array(limits.domains))
    placed = board.place_shared()
    board.place_single()
    board.exchange()
    result = board.copies()
    if not placed:
        _fill_up(result, tokens, places, number)
    assert result.shape == (layers, experts, slots)
    return result


class _Board:
    """Places of all layers while they fill up.

    ``sequence`` lists for each layer the expert of every copy: experts with several copies first.
    """

    def __init__(self, share: Floats, copies: Ints, speeds: Floats, places: Ints, domains: Ints) -> None:
        layers, experts = share.shape
        self.shape = (layers, experts, len(places))
        self.layer = np.arange(layers)
        self.share, self.speeds, self.places, self.domains = share, speeds, places, domains
        shared = copies > 1
        order = np.lexsort((-share, ~shared), axis=-1)
        repeats = np.take_along_axis(copies, order, axis=1)
        self.sequence = np.repeat(order.ravel(), repeats.ravel()).reshape(layers, -1)
        self.of_copy = np.take_along_axis(share, self.sequence, axis=1)
        self.is_shared = np.take_along_axis(shared, self.sequence, axis=1)
        self.num_shared = self.is_shared.sum(axis=1)
        self.level = np.zeros((layers, len(places)))
        self.free = np.tile(places, (layers, 1))
        self.slot_of = np.full(self.sequence.shape, -1)

    def place_shared(self) -> bool:
        """Places experts with several copies, and singles that stand beside them in the sequence.

        Returns:
            False if some copy had no place left on a slot without one of the same expert.
        """
        layers, _, slots = self.shape
        layer, share, sequence = self.layer, self.of_copy, self.sequence
        first = np.ones(sequence.shape, dtype=bool)
        first[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
        several_domains = len(set(self.domains[self.places > 0].tolist())) > 1
        component = np.tile(np.arange(slots), (layers, 1))
        own = np.full(layers, -1)  # component of the expert at hand
        domain = np.full(layers, -1)  # its only domain; -1 before the first copy, -2 if it is in several
        used = np.zeros((layers, slots), dtype=bool)
        complete = True
        for index in range(int(self.num_shared.max())):
            starts = first[:, index]
            used[starts] = False
            own[starts] = -1
            key = self.level + share[:, index, None] / self.speeds
            key += _IMPOSSIBLE * (used | (self.free <= 0))
            key += _CONNECTED * (component == own[:, None])
            if several_domains:
                domain[starts] = -1
                key += _SAME_DOMAIN * (self.domains == domain[:, None])
            slot = key.argmin(axis=1)
            fits = key[layer, slot] < _IMPOSSIBLE
            complete = complete and bool(fits.all())
            self._put(index, np.where(fits, slot, -1))
            used[layer, slot] = True
            joined = component[layer, slot]
            own = np.where((own < 0) | ~fits, np.where(fits, joined, own), own)
            merge = (component == joined[:, None]) & (fits & self.is_shared[:, index])[:, None]
            component = np.where(merge, own[:, None], component)
            here = self.domains[slot]
            domain = np.where(fits, np.where((domain == -1) | (domain == here), here, -2), domain)
        return complete

    def _put(self, index: int, slot: Ints) -> None:
        fits = slot >= 0
        self.slot_of[:, index] = slot
        layer, slot = self.layer[fits], slot[fits]
        self.level[layer, slot] += self.of_copy[fits, index] / self.speeds[slot]
        self.free[layer, slot] -= 1

    def place_single(self) -> None:
        """Places what is left, heaviest first: each goes where the level is then lowest."""
        slots = self.shape[2]
        start = int(self.num_shared.max())
        self.level += np.where(self.free <= 0, _IMPOSSIBLE, 0.0)
        rows = self.layer * slots
        level, free = self.level.ravel(), self.free.ravel()
        for index in range(start, self.sequence.shape[1]):
            added = self.of_copy[:, index, None] / self.speeds
            slot = (self.level + added).argmin(axis=1)
            self.slot_of[:, index] = slot
            at = rows + slot
            level[at] += added[self.layer, slot]
            free[at] -= 1
            level[at] += (free[at] <= 0) * _IMPOSSIBLE

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
        self.level = np.where(self.level >= _IMPOSSIBLE, self.level - _IMPOSSIBLE, self.level)
        chunk = max(1, _CHUNK // (half * width * width))
        usable = self.places > 0
        average = (self.level * self.speeds).sum(axis=1) / self.speeds[usable].sum()
        for begin in range(0, self.shape[0], chunk):
            rows = self.layer[begin : begin + chunk]
            idle = 0
            for turn in range(_SWAP_ROUNDS):
                rows = rows[self.level[rows].max(axis=1) > _GOOD_ENOUGH * average[rows]]
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

    def copies(self) -> Copies:
        """The placement."""
        result = np.zeros(self.shape, dtype=np.int8)
        layer, index = np.nonzero(self.slot_of >= 0)
        result[layer, self.sequence[layer, index], self.slot_of[layer, index]] = 1
        return result


def _fill_up(copies: Copies, tokens: Ints, places: Ints, num_copies: int) -> None:
    """Gives copies that found no slot without their expert to other experts, in place; rare, so one by one."""
    for layer in range(len(copies)):
        here = copies[layer]
        free = places - here.sum(axis=0)
        for _ in range(num_copies - int(here.sum())):
            share = tokens[layer] / here.sum(axis=1)
            # The heaviest copy that some free place can relieve, on the slot with most of those.
            possible = (here == 0) & (free > 0)
            expert = int(np.where(possible.any(axis=1), share, -1.0).argmax())
            slot = int(np.where(possible[expert], free, -1).argmax())
            if not possible[expert, slot]:
                break
            here[expert, slot] = 1
            free[slot] -= 1
