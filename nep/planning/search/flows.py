"""Sums of transfers: how much goes from which slot to which.

A large job moves millions of pieces, most of a single unit from an owner of its own. What a plan's report needs of
them are sums, and these come from arrays without a list of pieces.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.traffic import NETWORK, SCALE_UP, Traffic
from nep.planning.intervals import Interval, Intervals, subtract
from nep.planning.layout import Layout
from nep.planning.transfer import Transfer, fetch

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Flow:
    """What travels in one transfer, summed up by pairs of slots.

    Attributes:
        pieces: messages between two slots.
        src: ``[pairs]``, the slot that gives; pairs ascend by source and then destination.
        dst: ``[pairs]``, the slot that gets, always another one.
        numel: ``[pairs]``, elements.
    """

    pieces: int
    src: Integers
    dst: Integers
    numel: Integers

    @classmethod
    def of(cls, transfer: Transfer, unit_numel: Mapping[str, int]) -> "Flow":
        """The sums of a transfer, local pieces left out.

        Args:
            transfer: pieces.
            unit_numel: elements of a unit of each axis.
        """
        rows = [(src, dst, (hi - lo) * unit_numel[axis]) for axis, lo, hi, src, dst in transfer if src != dst]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return _summed(len(rows), [(table[:, 0], table[:, 1], table[:, 2])])

    @property
    def total_numel(self) -> int:
        """Elements of all pairs."""
        return int(self.numel.sum())

    def seconds(self, hardware: HardwareProfile, bytes_per_element: int, domains: Mapping[int, int]) -> float:
        """Until the last slot has sent and got its pieces; 0 if nothing travels.

        Args:
            hardware: for the links.
            bytes_per_element: of what travels.
            domains: slot -> scale-up domain.
        """
        if not self.src.size:
            return 0.0
        slots, place = np.unique(np.concatenate([self.src, self.dst]), return_inverse=True)
        giver, taker = place[: self.src.size], place[self.src.size :]
        domain = np.array([domains[slot] for slot in slots.tolist()])
        far = domain[giver] != domain[taker]
        traffic = Traffic.none(slots.tolist())
        for link, where in ((SCALE_UP, ~far), (NETWORK, far)):
            for rows, end in ((traffic.sent, giver), (traffic.received, taker)):
                rows[link] = np.bincount(end[where], weights=self.numel[where], minlength=slots.size)
        return float(traffic.seconds(hardware, bytes_per_element).max())


def fetch_flow(
    sources: Sequence[Layout],
    wanted: Layout,
    axis_order: Sequence[str],
    have: Layout,
    unit_numel: Mapping[str, int],
) -> Flow:
    """The sums of `nep.planning.transfer.fetch`, without its pieces.

    Args:
        sources: as for `fetch`; in the first two every unit is in one slot at most, as with owners and mirrors.
        wanted: what each slot shall have.
        axis_order: axes, in canonical order.
        have: what each slot has in place.
        unit_numel: elements of a unit of each axis.

    Raises:
        RuntimeError: if no source has some interval.
    """
    count, found = 0, []
    known: dict[tuple[int, int], Integers] = {}
    rest: dict[str, dict[int, list[Interval]]] = {}
    for axis in axis_order:
        by_slot, in_place = wanted.by_slot(axis), have.by_slot(axis)
        if not by_slot:
            continue
        key = (id(by_slot), id(in_place))
        if key not in known:
            known[key] = _rows(by_slot, in_place)
        todo = known[key]
        for source in sources[:2]:
            src, dst, units, todo = _meet(_owned(source.by_slot(axis)), todo)
            away = src != dst
            count += int(away.sum())
            found.append((src[away], dst[away], units[away] * unit_numel[axis]))
        for slot, lo, hi in todo.tolist():
            rest.setdefault(axis, {}).setdefault(slot, []).append((lo, hi))
    # What neither owners nor mirrors have is little, and several slots may have it: whoever has sent least gives it.
    left = Layout(
        {axis: {slot: tuple(intervals) for slot, intervals in by_slot.items()} for axis, by_slot in rest.items()}
    )
    flow = Flow.of(fetch(sources[2:], left, axis_order, unit_numel=unit_numel), unit_numel)
    return _summed(count + flow.pieces, [*found, (flow.src, flow.dst, flow.numel)])


def _rows(wanted: Mapping[int, Intervals], have: Mapping[int, Intervals]) -> Integers:
    """``[n, 3]``: slot, lo, hi of what slots want and do not have, one row for each interval of storage."""
    rows = [
        (slot, lo, hi)
        for slot, intervals in wanted.items()
        for interval in intervals
        for lo, hi in (subtract((interval,), have[slot]) if slot in have else (interval,))
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _owned(by_slot: Mapping[int, Intervals]) -> Integers:
    """``[n, 3]``: lo, hi, slot, ascending."""
    rows = sorted((lo, hi, slot) for slot, intervals in by_slot.items() for lo, hi in intervals)
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _meet(source: Integers, todo: Integers) -> tuple[Integers, Integers, Integers, Integers]:
    """What a source gives.

    Args:
        source: ``[m, 3]``, see `_owned`; no unit is in two rows.
        todo: ``[n, 3]``, see `_rows`.

    Returns:
        Giver, taker and units of each piece, and the rows that are left.
    """
    first = np.searchsorted(source[:, 1], todo[:, 1], side="right")
    last = np.searchsorted(source[:, 0], todo[:, 2], side="left")
    counts = np.maximum(last - first, 0)
    row = np.repeat(np.arange(len(todo)), counts)
    piece = first[row] + np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
    lo = np.maximum(source[piece, 0], todo[row, 1])
    hi = np.minimum(source[piece, 1], todo[row, 2])
    short = np.flatnonzero(np.bincount(row, weights=hi - lo, minlength=len(todo)) < todo[:, 2] - todo[:, 1])
    left: list[tuple[int, int, int]] = []
    for index in short.tolist():
        slot, start, stop = todo[index].tolist()
        given = source[first[index] : last[index], :2].tolist()
        left += [(slot, a, b) for a, b in subtract([(start, stop)], [(a, b) for a, b in given])]
    return source[piece, 2], todo[row, 0], hi - lo, np.array(left, dtype=np.int64).reshape(-1, 3)


def _summed(pieces: int, parts: Iterable[tuple[Integers, Integers, Integers]]) -> Flow:
    """One flow of sources, destinations and elements."""
    columns = [np.concatenate([np.zeros(0, dtype=np.int64), *column]) for column in zip(*parts, strict=True)]
    if not columns:
        columns = [np.zeros(0, dtype=np.int64)] * 3
    src, dst, numel = columns
    width = int(dst.max(initial=0)) + 1
    pairs, where = np.unique(src * width + dst, return_inverse=True)
    sums = np.zeros(pairs.size, dtype=np.int64)
    np.add.at(sums, where, numel)
    return Flow(pieces=pieces, src=pairs // width, dst=pairs % width, numel=sums)
