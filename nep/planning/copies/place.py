"""Where the copies of experts lie: how many each expert gets, and on which slots.

Copies have two uses. Tokens of an expert with several can go to any of them, so hot experts get more; and because
quotas shift tokens from slot to slot along such experts, the graph of slots and experts should be connected, which
takes experts + slots - 1 copies. Experts with several copies are therefore placed first, each next to what is not
connected yet, then all others, heaviest first, each on the slot that is fullest least; exchanges of the latter
polish. All layers are planned at once. Sums are of integers and everything else is elementwise, so the result
depends on nothing but the arguments.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nep.planning.copies.board import Board
from nep.planning.loads import ExpertLoads

Copies = NDArray[np.int8]
"""``[layers, experts, slots]``: 1 where a slot has a copy of an expert."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_SCALE = 2**30  # the hottest expert of a layer, in the integers that planning counts tokens in

_DEVIATIONS = 2
_SLOW = 2  # times slower than the average: when a slot may have more places than are of use


@dataclass(frozen=True, kw_only=True)
class SlotLimits:
    """The slots of a replica as the placement of copies sees them, in the order of the slot dimension.

    Attributes:
        places: copies, of one layer, that each slot has memory for; 0 for a slot that must stay empty.
        speeds_ppm: relative speed of each slot.
        domains: fault domain of each slot.
        scale_up: scale-up domain of each slot; None: one for all.
        far: what the sum of an expert's gradients costs more between two scale-up domains than inside one, in
            shares of the time that a layer's experts take at perfect balance.
        apart: copies of an expert lie in two fault domains also where these are different scale-up domains and the
            sums therefore cost more.
    """

    places: tuple[int, ...]
    speeds_ppm: tuple[int, ...]
    domains: tuple[int, ...]
    scale_up: tuple[int, ...] | None = None
    far: float = 0.0
    apart: bool = False

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
        if any(domain < 0 for domain in self.domains):
            errors.append(f"domains {list(self.domains)} must be at least 0")
        if self.scale_up is not None and (
            len(self.scale_up) != len(self.places) or any(domain < 0 for domain in self.scale_up)
        ):
            errors.append(f"scale_up {list(self.scale_up)} must have one entry per slot, at least 0")
        if not 0 <= self.far < math.inf:
            errors.append(f"far ({self.far}) must be finite and at least 0")
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
        return replace(self, places=places)

    @property
    def used(self) -> tuple[int, ...]:
        """Slots with a place."""
        return tuple(slot for slot, places in enumerate(self.places) if places)

    @property
    def links(self) -> tuple[int, ...]:
        """Scale-up domain of each slot, numbered from 0."""
        if self.scale_up is None:
            return (0,) * self.num_slots
        order = sorted(set(self.scale_up))
        return tuple(order.index(domain) for domain in self.scale_up)

    @property
    def far_price(self) -> float:
        """`far`, or 0 where all slots with a place are in one scale-up domain."""
        links = self.links
        return self.far if len({links[slot] for slot in self.used}) > 1 else 0.0

    @property
    def apart_in(self) -> tuple[int, ...]:
        """For each slot what the copies of an expert should lie in two of, numbered from 0.

        Fault domains, as long as that costs nothing. A scale-up domain that is all in one fault domain has no two
        to offer: unless `apart`, two slots have to do in it.
        """
        links = self.links
        several = {link for link in links if len({self.domains[slot] for slot in self.used if links[slot] == link}) > 1}
        if self.apart or len({links[slot] for slot in self.used}) < 2:
            several = set(links)
        keys = [
            (0, domain) if link in several else (1, slot)
            for slot, (domain, link) in enumerate(zip(self.domains, links, strict=True))
        ]
        order = {key: index for index, key in enumerate(sorted(set(keys)))}
        return tuple(order[key] for key in keys)

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
        """Copies that an expert must have at least: 2, as far apart as `apart_in` says, where memory allows, else 1."""
        by_domain: dict[int, int] = {}
        for places, domain in zip(self.places, self.apart_in, strict=True):
            by_domain[domain] = by_domain.get(domain, 0) + min(places, num_experts)
        # A domain can have no more than one of the two copies of each expert.
        return 2 if sum(min(places, num_experts) for places in by_domain.values()) >= 2 * num_experts else 1


def whole_tokens(loads: ExpertLoads) -> Ints:
    """Loads ``[layers, experts]`` as integers, in proportion within a layer, at least 1 each.

    At least 1, since an expert that nobody asked for yet may still be asked for. Of a layer without any load nothing
    is known: its experts count as equal.
    """
    largest = loads.mean.max(axis=1, keepdims=True)
    shares = np.where(largest > 0, loads.mean / np.where(largest > 0, largest, 1.0), 1.0)
    tokens: Ints = np.maximum(np.rint(shares * _SCALE), 1.0).astype(np.int64)
    return tokens


def likely_tokens(loads: ExpertLoads, tokens: Ints) -> Ints:
    """Tokens ``[layers, experts]``, on the scale of `whole_tokens`, that an expert rarely gets more of in a step.

    Two standard deviations above the mean, at most all that the layer has; the mean where nothing else is known.
    """
    if loads.variance is None:
        return tokens
    largest = loads.mean.max(axis=1, keepdims=True)
    scale = np.where(largest > 0, _SCALE / np.where(largest > 0, largest, 1.0), 0.0)
    more = np.minimum(_DEVIATIONS * np.sqrt(loads.variance) * scale, tokens.sum(axis=1, keepdims=True))
    return np.asarray(tokens + np.rint(more).astype(np.int64))


def count_copies(tokens: Ints, limits: SlotLimits, num_copies: int, likely: Ints | None = None) -> Ints:
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
        likely: ``[layers, experts]``, see `likely_tokens`: what copies beyond the first purpose go by, since it is
            tokens of experts that vary which have to be moved. None: ``tokens``.

    Returns:
        ``[layers, experts]``, at least 1, which sum to ``num_copies`` in each layer.
    """
    layers, experts = tokens.shape
    most = sum(places > 0 for places in limits.places)
    layer = np.arange(layers)
    fair = tokens.sum(axis=1) / most
    fewest = _fewest(limits, experts, num_copies)
    root = np.sqrt(tokens if likely is None else likely)
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


def _fewest(limits: SlotLimits, experts: int, num_copies: int) -> int:
    """Copies that every expert gets at least."""
    return limits.needed_copies(experts) if num_copies >= 2 * experts else 1


def place_copies(
    loads: ExpertLoads, limits: SlotLimits, *, num_copies: int | None = None, bridged: bool = True
) -> Copies:
    """Places copies from scratch; see the module.

    No slot has more copies than places, or an expert twice. Copies of one expert are in two fault domains at least,
    unless the only free places are in one. `nep.planning.copies.warm.plan_copies` goes on from here where slots are
    so uneven that this leaves something to gain.

    Args:
        loads: router loads.
        limits: the slots.
        num_copies: copies of all experts of a layer together; None means as many as there are places. More than fit
            are cut to what fits.
        bridged: tokens can move between scale-up domains over a few experts.

    Raises:
        ValueError: if the slots cannot hold every expert once, or ``num_copies`` is less than one of each.
    """
    experts = loads.num_experts
    places = np.minimum(np.array(limits.places, dtype=np.int64), experts)
    number = limits.num_places(experts)
    if num_copies is not None:
        if num_copies < experts:
            raise ValueError(f"num_copies ({num_copies}) must be at least one of each of {experts} experts")
        number = min(number, num_copies)
    tokens = whole_tokens(loads)
    used = _useful_places(tokens, limits, places)
    wanted = min(number, int(used.sum()))
    copies = count_copies(tokens, limits, wanted, likely_tokens(loads, tokens))
    speeds = np.array(limits.speeds_ppm, dtype=np.float64)
    usable = int(np.array(limits.speeds_ppm, dtype=np.int64)[places > 0].sum())
    # Level 1 is the average: what all slots would have if everything could be shared out.
    weight = tokens / tokens.sum(axis=1, keepdims=True) * usable
    fewest = _fewest(limits, experts, wanted)
    domains, links = np.array(limits.apart_in), np.array(limits.links)
    bridges = len(set(links[used > 0].tolist())) - 1 if bridged else 0
    board = Board(weight / copies, copies, speeds, used, domains, fewest, links, bridges)
    board.place_shared()
    board.place_single()
    board.exchange()
    result = board.copies()
    if board.dropped or wanted < number:
        for layer, here in enumerate(result):
            fill_up(here, tokens[layer], limits, number, fewest)
    if board.dropped or board.confined or wanted < number:
        _spread(result, tokens, limits)
    return result


def _useful_places(tokens: Ints, limits: SlotLimits, places: Ints) -> Ints:
    """Places without those that a slow slot could not even fill with the lightest experts of a usual layer.

    Whatever else had its only copy there would make the slot the last to finish. In the end those places get copies
    of what other slots have as well: they need not take any tokens.
    """
    speeds = np.array(limits.speeds_ppm, dtype=np.int64)
    total = int(speeds[places > 0].sum())
    lightest = np.sort(tokens, axis=1).cumsum(axis=1)
    fair = tokens.sum(axis=1, keepdims=True) / total
    useful = places.copy()
    for slot in np.flatnonzero(_SLOW * speeds * (places > 0).sum() < total).tolist():
        number = (lightest <= fair * speeds[slot]).sum(axis=1)
        useful[slot] = min(places[slot], int(np.median(number)))
    experts = tokens.shape[1]
    return useful if useful.sum() >= limits.needed_copies(experts) * experts else places


def fill_up(copies: Copies, tokens: Ints, limits: SlotLimits, num_copies: int, fewest: int = 1) -> None:
    """Fills places of one layer up to so many copies, in place: they need not take any tokens, but may.

    Rare, so one by one.

    Args:
        copies: ``[experts, slots]``.
        tokens: ``[experts]``.
        limits: the slots.
        num_copies: of all experts together.
        fewest: copies that every expert should have.
    """
    links = np.array(limits.links)
    same_link = (links[:, None] == links).astype(np.int8)
    places = np.minimum(np.array(limits.places), len(copies))
    free = places - copies.sum(axis=0)
    for _ in range(num_copies - int(copies.sum())):
        number = copies.sum(axis=1)
        # The heaviest copy that some free place can relieve, best in the same scale-up domain, on the slot with most.
        urgency = tokens / np.maximum(number, 1) + np.where(number < fewest, _SCALE, 0)
        possible = (copies == 0) & (free > 0)
        near = possible & (copies @ same_link > 0)
        possible = near if near.any() else possible
        expert = int(np.where(possible.any(axis=1), urgency, -1.0).argmax())
        slot = int(np.where(possible[expert], free, -1).argmax())
        if not possible[expert, slot]:
            break
        copies[expert, slot] = 1
        free[slot] -= 1


def _spread(copies: Copies, tokens: Ints, limits: SlotLimits) -> None:
    """Brings experts whose copies are all in one fault domain into a second by an exchange, in place; rare as well."""
    domains = np.array(limits.apart_in)
    places = np.minimum(np.array(limits.places), copies.shape[1])
    for layer, here in enumerate(copies):
        for expert in np.flatnonzero(here.sum(axis=1) > 1).tolist():
            own = np.flatnonzero(here[expert])
            if (domains[own] != domains[own[0]]).any():
                continue
            share = tokens[layer] / here.sum(axis=1)
            best: tuple[float, int, int, int] | None = None
            for slot in np.flatnonzero((domains != domains[own[0]]) & (places > 0)).tolist():
                if here[:, slot].sum() < places[slot]:
                    best = min(best or (math.inf, 0, 0, 0), (share[expert], int(own[-1]), slot, -1))
                for other in np.flatnonzero(here[:, slot]).tolist():
                    for back in own.tolist():
                        rest = domains[np.flatnonzero(here[other]).tolist()].tolist()
                        rest.remove(domains[slot])
                        if here[other, back] or (rest and set(rest) == {domains[back]}):
                            continue
                        difference = abs(share[other] - share[expert])
                        best = min(best or (math.inf, 0, 0, 0), (difference, back, slot, other))
            if best is None:
                continue
            _, back, slot, other = best
            here[expert, back], here[expert, slot] = 0, 1
            if other >= 0:
                here[other, slot], here[other, back] = 0, 1
