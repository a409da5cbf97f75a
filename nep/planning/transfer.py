"""Transfers: which units travel from which slot to which, computed alike by every slot.

Two kinds: `overlaps` is every pair of slots whose intervals meet (sums of gradients, the return of
parameters, the forward to mirrors); `fetch` brings each destination its units once (recovery, growing,
moving).
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from nep.planning.intervals import Intervals, Segment, normalize, segments, subtract
from nep.planning.layout import Interval, Layout, Lines, axis_unit_numel

_NAMED = 3
"""Intervals that an error names."""


class Piece(NamedTuple):
    """Units ``[lo, hi)`` of an axis that slot ``src`` gives and slot ``dst`` gets.

    They are contiguous in the storage of both. A tuple and no dataclass: there may be hundreds of thousands,
    and tuples are made three times as fast.
    """

    axis: str
    lo: int
    hi: int
    src: int
    dst: int


@dataclass(frozen=True)
class Transfer:
    """Pieces in canonical order: axis (in the order given to whoever built it), lo, hi, src, dst.

    Sender and receiver build the same transfer and walk it in the same order, so nothing about it is sent.
    Pieces with ``src == dst`` are local copies and belong to the transfer; `remote` leaves them out.
    """

    pieces: tuple[Piece, ...] = ()

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)

    def between(self, src: int, dst: int) -> "Transfer":
        """The pieces from one slot to another, in canonical order."""
        return self._by_pair.get((src, dst), Transfer())

    def touching(self, slot: int) -> "Transfer":
        """The pieces that the slot gives or gets, in canonical order."""
        return self._by_slot.get(slot, Transfer())

    def remote(self) -> "Transfer":
        """The pieces that travel between two different slots."""
        return Transfer(tuple(piece for piece in self.pieces if piece.src != piece.dst))

    @property
    def num_units(self) -> int:
        """Units over all pieces, local ones included; a unit that goes to two slots counts twice."""
        return sum(piece.hi - piece.lo for piece in self.pieces)

    def num_bytes(self, lines: Lines, bytes_per_element: int) -> int:
        """Bytes over all pieces, local ones included."""
        unit_numel = axis_unit_numel(lines)
        numel = sum((piece.hi - piece.lo) * unit_numel[piece.axis] for piece in self.pieces)
        return numel * bytes_per_element

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int], "Transfer"]:
        grouped: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            grouped[piece.src, piece.dst].append(piece)
        return {pair: Transfer(tuple(pieces)) for pair, pieces in grouped.items()}

    @cached_property
    def _by_slot(self) -> dict[int, "Transfer"]:
        grouped: dict[int, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            grouped[piece.src].append(piece)
            if piece.dst != piece.src:
                grouped[piece.dst].append(piece)
        return {slot: Transfer(tuple(pieces)) for slot, pieces in grouped.items()}


def overlaps(source: Layout, destination: Layout, axis_order: Sequence[str]) -> Transfer:
    """Every pair of slots whose intervals meet, with the units that both have; a slot meets itself too.

    No piece crosses a boundary of storage at either end. A slot that wants only what it sends or only what it
    gets may restrict that side to itself first: the pieces are the same ones in the same order.

    Args:
        source: who gives.
        destination: who gets.
        axis_order: the axes to look at, in canonical order; others are left out, so that a bucket can have a
            transfer of its own.
    """
    pieces: list[Piece] = []
    for axis in axis_order:
        met = _meetings(source.by_slot(axis), destination.by_slot(axis))
        met.sort()
        pieces += [Piece(axis, lo, hi, src, dst) for lo, hi, src, dst in met]
    return Transfer(tuple(pieces))


def _meetings(source: Mapping[int, Intervals], destination: Mapping[int, Intervals]) -> list[tuple[int, ...]]:
    """``(lo, hi, src, dst)`` for each pair of intervals that meet; a sweep, as cheap as its result."""
    starts: list[tuple[int, int, int, int]] = []  # lo, side, slot, hi
    for side, by_slot in enumerate((source, destination)):
        for slot, intervals in by_slot.items():
            starts += [(lo, side, slot, hi) for lo, hi in intervals]
    starts.sort()
    met: list[tuple[int, ...]] = []
    active: tuple[list[Interval], list[Interval]] = ([], [])  # per side: (hi, slot) of intervals begun
    for lo, side, slot, hi in starts:
        others = active[1 - side]
        ended = 0
        for other_hi, other in others:
            if other_hi <= lo:
                ended += 1
            elif side == 0:
                met.append((lo, min(hi, other_hi), slot, other))
            else:
                met.append((lo, min(hi, other_hi), other, slot))
        if ended:
            others[:] = [begun for begun in others if begun[0] > lo]
        active[side].append((hi, slot))
    return met


def fetch(
    sources: Sequence[Layout],
    destination: Layout,
    axis_order: Sequence[str],
    have: Layout | None = None,
    *,
    unit_numel: Mapping[str, int] | None = None,
) -> Transfer:
    """Brings every slot of ``destination`` each of its units exactly once.

    A unit comes from the first layout of ``sources`` that has it, so whoever carries out the transfer finds
    the storage of ``piece.src`` in the first of ``sources`` that has the piece there. Within a layout the
    destination itself comes first (a local copy), then whoever has sent least so far, then the lower slot.

    Args:
        sources: in order of trust; restrict them to live slots first.
        destination: what each slot shall have.
        axis_order: the axes to fetch, in canonical order.
        have: what each slot already has in place and need not get again.
        unit_numel: elements per unit of each axis, to balance what each source sends; None counts units.

    Raises:
        RuntimeError: if no source has some interval.
    """
    sent: dict[int, int] = defaultdict(int)
    pieces: list[Piece] = []
    missing: list[tuple[str, int, Intervals]] = []
    for axis in axis_order:
        weight = 1 if unit_numel is None else unit_numel[axis]
        # One entry per interval of storage, since no piece may cross from one into the next.
        todo: list[tuple[int, Intervals]] = []
        for slot, intervals in sorted(destination.by_slot(axis).items()):
            in_place = have.intervals(axis, slot) if have is not None else ()
            todo += [(slot, wanted) for interval in intervals if (wanted := subtract((interval,), in_place))]
        found: list[Piece] = []
        for source in sources:
            if todo:
                todo = _fetch_from(source.by_slot(axis), axis, todo, found, sent, weight)
        missing += [(axis, slot, wanted) for slot, wanted in todo]
        pieces += sorted(found, key=lambda piece: piece[1:])
    if missing:
        raise RuntimeError(f"no source has {_shown(missing)}; restore from a checkpoint")
    return Transfer(tuple(pieces))


def _shown(missing: Sequence[tuple[str, int, Intervals]]) -> str:
    """The first of what is missing, and how much more there is."""
    entries = [(axis, slot, interval) for axis, slot, intervals in missing for interval in intervals]
    first = "; ".join(f"{axis} [{lo}, {hi}) for slot {slot}" for axis, slot, (lo, hi) in entries[:_NAMED])
    units = sum(hi - lo for _, _, (lo, hi) in entries)
    more = len(entries) - _NAMED
    return first if more <= 0 else f"{first} and {more} more intervals ({units} units in all)"


def _fetch_from(
    cut: Mapping[int, Intervals],
    axis: str,
    todo: list[tuple[int, Intervals]],
    found: list[Piece],
    sent: dict[int, int],
    weight: int,
) -> list[tuple[int, Intervals]]:
    """Takes what one layout can give: appends to ``found``, counts in ``sent``, returns what is left."""
    have = segments(cut, normalize(interval for _, wanted in todo for interval in wanted))
    begins = [lo for lo, _, _ in have]
    boundaries: dict[int, list[int]] = {}
    rest: list[tuple[int, Intervals]] = []
    for dst, wanted in todo:
        left: list[Interval] = []
        first = len(found)
        for lo, hi in wanted:
            # ``have`` covers everything wanted, so a segment begins at or before lo.
            for index in range(bisect_right(begins, lo) - 1, bisect_left(begins, hi)):
                low, high = max(lo, have[index][0]), min(hi, have[index][1])
                src = _pick(have[index], dst, sent)
                if src is None:
                    left.append((low, high))
                    continue
                if src != dst:
                    sent[src] += (high - low) * weight
                if src not in boundaries:
                    boundaries[src] = sorted(start for start, _ in cut[src])
                _append(found, first, Piece(axis, low, high, src, dst), boundaries[src])
        if left:
            rest.append((dst, normalize(left)))
    return rest


def _pick(segment: Segment, dst: int, sent: Mapping[int, int]) -> int | None:
    slots = segment[2]
    if not slots:
        return None
    if dst in slots:
        return dst
    return min(slots, key=lambda slot: (sent.get(slot, 0), slot))


def _append(found: list[Piece], first: int, piece: Piece, begins: Sequence[int]) -> None:
    """Adds a piece: cut where the storage of its source is cut, else joined to the piece before it.

    Only pieces from index ``first`` on are of the same storage interval of the destination and the same
    source layout, and may be joined.
    """
    axis, lo, hi, src, dst = piece
    while lo < hi:
        index = bisect_right(begins, lo)
        stop = min(hi, begins[index]) if index < len(begins) else hi
        continues = len(found) > first and begins[index - 1] < lo
        if continues and found[-1] == (axis, found[-1].lo, lo, src, dst):
            found[-1] = Piece(axis, found[-1].lo, stop, src, dst)
        else:
            found.append(Piece(axis, lo, stop, src, dst))
        lo = stop
