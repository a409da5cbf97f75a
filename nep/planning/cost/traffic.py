"""How much each slot sends and gets over each kind of link, for the transfers of a plan.

Counts follow from layouts by arithmetic on classes (the slots that hold exactly the same), never from lists
of pieces: between 16,384 slots that all hold the embedding there would be 268 million.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nep.planning.cost.hardware import HardwareProfile, Link
from nep.planning.cost.workload import GradSyncMethod
from nep.planning.intervals import Intervals, count_units, normalize, segments
from nep.planning.layout import Lines, axis_lines, axis_unit_numel
from nep.planning.plan import Plan
from nep.planning.transfer import Transfer

Floats = NDArray[np.float64]

# Rows of `Traffic` arrays.
SCALE_UP, NETWORK = 0, 1
LINKS = ("scale_up", "network")


@dataclass(frozen=True)
class Traffic:
    """Elements over links; s slots in the order of `slots`.

    Attributes:
        slots: the slots.
        sent: [2, s], by link (`SCALE_UP`, `NETWORK`).
        received: [2, s].
        hops: exchanges after each other that every message waits for, at least 1.
    """

    slots: tuple[int, ...]
    sent: Floats
    received: Floats
    hops: int = 1

    @classmethod
    def none(cls, slots: Sequence[int]) -> "Traffic":
        """Nothing, to be added to."""
        return cls(tuple(slots), np.zeros((2, len(slots))), np.zeros((2, len(slots))))

    def __add__(self, other: "Traffic") -> "Traffic":
        """Both at the same time: each slot's links carry the one and the other."""
        waited_for = [part.hops for part in (self, other) if part.busiest.any()]
        return Traffic(self.slots, self.sent + other.sent, self.received + other.received, sum(waited_for) or 1)

    @property
    def busiest(self) -> Floats:
        """[2, s]: the larger direction of each link, since both run at once."""
        return np.maximum(self.sent, self.received)

    def seconds(self, hardware: HardwareProfile, bytes_per_element: int, messages: int = 1) -> Floats:
        """[s]: links work side by side, so the slower one counts; latencies of the widest link in use.

        Args:
            hardware: for the links.
            bytes_per_element: of what travels.
            messages: into how many exchanges it is cut.
        """
        return link_seconds(self.busiest * bytes_per_element, hardware, self.hops * messages)

    def limiting_link(self, hardware: HardwareProfile, slot: int) -> str:
        """Name of the link that takes the slot (by position) longest, with the direction."""
        price = np.array([link.seconds_per_byte for link in links(hardware)])
        link = int(np.argmax(self.busiest[:, slot] * price))
        direction = "sending" if self.sent[link, slot] >= self.received[link, slot] else "receiving"
        return f"{LINKS[link]} link, {direction}"


def links(hardware: HardwareProfile) -> tuple[Link, Link]:
    """The profile's links in the order of `LINKS`."""
    return hardware.scale_up, hardware.network


def link_seconds(num_bytes: Floats, hardware: HardwareProfile, hops: int = 1) -> Floats:
    """Seconds of bytes [2, ...] over the two links side by side, latency included where there are any."""
    prices = [link.seconds_per_byte for link in links(hardware)]
    seconds = np.maximum(num_bytes[SCALE_UP] * prices[SCALE_UP], num_bytes[NETWORK] * prices[NETWORK])
    latency = np.where(
        num_bytes[NETWORK] > 0,
        hardware.network.latency_s,
        np.where(num_bytes[SCALE_UP] > 0, hardware.scale_up.latency_s, 0.0),
    )
    return np.asarray(seconds + hops * latency)


def grad_traffic(
    plan: Plan, lines: Lines, domains: Mapping[int, int], method: GradSyncMethod
) -> tuple[Traffic, Traffic]:
    """Gradient sums from holders to owners.

    The return of parameters is the transpose: as many elements the other way.

    Args:
        plan: the plan.
        lines: the model's.
        domains: slot -> scale-up domain.
        method: see `Workload.grad_sync`.

    Returns:
        What collectives inside classes move, and what goes straight to owners.
    """
    collective: dict[tuple[int, ...], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    direct: dict[tuple[int, ...], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    interned: dict[tuple[int, ...], tuple[int, ...]] = {}
    unit_numel = axis_unit_numel(lines)
    for axis, line in axis_lines(lines).items():
        holders, owners = plan.holders.by_slot(axis), plan.owners.by_slot(axis)
        classes = _classes(holders, interned)
        # Looked up once: a tuple of thousands of slots is hashed anew every time.
        inside = [collective[members] for members in classes]
        straight = [direct[members] for members in classes]
        if method == "reduce_scatter" and list(classes.values()) == [((0, line.num_units),)]:
            # Most axes: everybody holds all of it, so there is nothing to look for.
            for owner, owned in owners.items():
                into = inside if owner in holders else straight
                into[0][owner] += float(count_units(owned) * unit_numel[axis])
            continue
        # Owners are told from classes by their sign: class i is i, the owner in slot s is -2 - s.
        cut: dict[int, Intervals] = dict(enumerate(classes.values()))
        cut |= {-2 - slot: owned for slot, owned in owners.items()}
        class_of = {slot: index for index, members in enumerate(classes) for slot in members}
        for lo, hi, who in segments(cut, [(0, line.num_units)]):
            size = float((hi - lo) * unit_numel[axis])
            for owner in (-2 - entry for entry in who if entry < 0):
                for index in (entry for entry in who if entry >= 0):
                    member = method == "reduce_scatter" and class_of.get(owner) == index
                    (inside if member else straight)[index][owner] += size
    return _collectives(plan.slots, collective, domains), _sums(plan.slots, direct, domains)


def mirror_traffic(plan: Plan, lines: Lines, domains: Mapping[int, int]) -> Traffic:
    """Finished sums from owners to mirrors."""
    found: dict[tuple[int, int], float] = defaultdict(float)
    unit_numel = axis_unit_numel(lines)
    for axis, line in axis_lines(lines).items():
        if not plan.mirrors.by_slot(axis):
            continue
        cut: dict[int, Intervals] = {2 * slot: cut for slot, cut in plan.owners.by_slot(axis).items()}
        cut |= {2 * slot + 1: mirrored for slot, mirrored in plan.mirrors.by_slot(axis).items()}
        for lo, hi, who in segments(cut, [(0, line.num_units)]):
            for owner in (entry // 2 for entry in who if entry % 2 == 0):
                for mirror in (entry // 2 for entry in who if entry % 2):
                    found[owner, mirror] += (hi - lo) * unit_numel[axis]
    return _pairs(plan.slots, found, domains)


def transfer_traffic(transfer: Transfer, lines: Lines, domains: Mapping[int, int]) -> Traffic:
    """The pieces of a transfer that travel."""
    found: dict[tuple[int, int], float] = defaultdict(float)
    unit_numel = axis_unit_numel(lines)
    for axis, lo, hi, src, dst in transfer.pieces:
        found[src, dst] += (hi - lo) * unit_numel[axis]
    slots = sorted({slot for pair in found for slot in pair})
    return _pairs(tuple(slots), found, domains)


def _classes(
    by_slot: Mapping[int, Intervals], interned: dict[tuple[int, ...], tuple[int, ...]]
) -> dict[tuple[int, ...], Intervals]:
    """Slots -> what all of them hold; ``interned`` makes equal classes of all axes one object."""
    slots = sorted(by_slot)
    if len(set(by_slot.values())) == 1:
        key = tuple(slots)
        return {interned.setdefault(key, key): normalize(by_slot[slots[0]])}
    grouped: dict[Intervals, list[int]] = defaultdict(list)
    for slot in slots:
        grouped[by_slot[slot]].append(slot)
    merged: dict[Intervals, list[int]] = defaultdict(list)
    for intervals, alike in grouped.items():  # the order of storage makes no other class
        merged[normalize(intervals)] += alike
    found: dict[tuple[int, ...], Intervals] = {}
    for intervals, alike in merged.items():
        key = tuple(sorted(alike))
        found[interned.setdefault(key, key)] = intervals
    return found


def _pairs(slots: Sequence[int], found: Mapping[tuple[int, int], float], domains: Mapping[int, int]) -> Traffic:
    traffic = Traffic.none(slots)
    position = {slot: index for index, slot in enumerate(slots)}
    for (src, dst), size in found.items():
        if src != dst:
            link = SCALE_UP if domains[src] == domains[dst] else NETWORK
            traffic.sent[link, position[src]] += size
            traffic.received[link, position[dst]] += size
    return traffic


def _sums(
    slots: Sequence[int],
    direct: Mapping[tuple[int, ...], Mapping[int, float]],
    domains: Mapping[int, int],
) -> Traffic:
    """Every member of a class sends what an owner owns straight to it."""
    traffic = Traffic.none(slots)
    position = {slot: index for index, slot in enumerate(slots)}
    for members, owned in direct.items():
        if not owned:
            continue
        places = np.array([position[slot] for slot in members])
        domain = np.array([domains[slot] for slot in members])
        here, counts = np.unique(domain, return_counts=True)
        in_domain: dict[int, float] = defaultdict(float)
        for owner, size in owned.items():
            in_domain[domains[owner]] += size
        total = sum(owned.values())
        inside = set(members)
        near = np.array([in_domain.get(int(entry), 0.0) for entry in domain])
        own = np.array([owned.get(slot, 0.0) for slot in members])
        traffic.sent[SCALE_UP, places] += near - own
        traffic.sent[NETWORK, places] += total - near
        count_of = dict(zip(here.tolist(), counts.tolist(), strict=True))
        for owner, size in owned.items():
            close = count_of.get(domains[owner], 0)
            traffic.received[SCALE_UP, position[owner]] += size * (close - (owner in inside))
            traffic.received[NETWORK, position[owner]] += size * (len(members) - close)
    return traffic


def _collectives(
    slots: Sequence[int],
    collective: Mapping[tuple[int, ...], Mapping[int, float]],
    domains: Mapping[int, int],
) -> Traffic:
    """Reduce-scatters inside classes, hierarchical: first in each domain, then between domains.

    With k members in a domain a member moves (k - 1) / k of the elements inside it, and what is left to it,
    1 / k of them, between D domains, (D - 1) / D of that. Every member works as long as the one with the
    largest share.
    """
    traffic = Traffic.none(slots)
    position = {slot: index for index, slot in enumerate(slots)}
    hops = 1
    for members, owned in collective.items():
        if len(members) == 1 or not owned:
            continue
        domain = np.array([domains[slot] for slot in members])
        _, which, counts = np.unique(domain, return_inverse=True, return_counts=True)
        size = max(owned.values()) * len(members)
        k, num_domains = counts[which], len(counts)
        places = np.array([position[slot] for slot in members])
        moved = (size * (k - 1) / k, size / k * (num_domains - 1) / num_domains)
        for link, elements in enumerate(moved):
            traffic.sent[link, places] += elements
            traffic.received[link, places] += elements
        hops = max(hops, math.ceil(math.log2(len(members))))
    return Traffic(traffic.slots, traffic.sent, traffic.received, hops)
