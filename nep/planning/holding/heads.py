"""Tensor-parallel cuts for slots that need not be equal nor divide anything: heads, rows, tokens.

Query heads are cut one by one. A KV head goes wherever one of its query heads is, so a cut inside a group costs
one more copy of a KV head. Everything is exact in integers: each slot computes the same cut.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from nep.planning.intervals import Interval, Intervals, count_units, normalize


def apportion(total: int, speeds_ppm: Sequence[int]) -> tuple[int, ...]:
    """Shares out equal things so that whoever takes longest takes as little time as possible.

    Largest-remainder rounding does not do that: of 3 things for speeds 4 and 1 it gives one to the slow slot,
    whose remainder is the larger one, and everybody waits for it.

    Args:
        total: how many things.
        speeds_ppm: of each slot, at least 1 each; at least one.

    Returns:
        The share of each slot, 0 allowed. Among equal slots the earlier has the larger one.

    Raises:
        ValueError: if an argument is out of range.
    """
    _require(total=total, speeds_ppm=speeds_ppm)
    speeds = list(speeds_ppm)
    everything = sum(speeds)
    # A slot that takes its fair share, rounded down, is within the best possible time.
    shares = [total * speed // everything for speed in speeds]
    for _ in range(total - sum(shares)):  # fewer than slots
        chosen = 0
        for slot in range(1, len(speeds)):
            if (shares[slot] + 1) * speeds[chosen] < (shares[chosen] + 1) * speeds[slot]:
                chosen = slot
        shares[chosen] += 1
    return tuple(shares)


def cut_line(num_units: int, speeds_ppm: Sequence[int], *, block: int = 1) -> tuple[Interval, ...]:
    """Cuts a line of equal units into one interval for each slot: vocabulary rows, or the tokens of a sequence.

    The slowest slot is as fast as it can be with cuts at multiples of a block only; matrix products like whole
    tiles. The last block may be short.

    Args:
        num_units: length of the line.
        speeds_ppm: of each slot.
        block: where cuts may be.

    Returns:
        The interval of each slot, ascending and without gaps; ``lo == hi`` for a slot that gets nothing.

    Raises:
        ValueError: if an argument is out of range.
    """
    _require(total=num_units, speeds_ppm=speeds_ppm, block=block)
    ends = [0]
    for share in apportion(-(-num_units // block), speeds_ppm):
        ends.append(min(num_units, ends[-1] + share * block))
    return tuple(pairwise(ends))


@dataclass(frozen=True, kw_only=True)
class HeadCosts:
    """What heads cost a slot, in any one unit of work, for instance floating-point operations per token.

    Attributes:
        query: one query head: its rows of wq and wo, and its attention.
        kv: one KV head that is held, computed by every slot that holds it: its rows of wk and wv.
    """

    query: int = 1
    kv: int = 0

    def __post_init__(self) -> None:
        if self.query < 1 or self.kv < 0:
            raise ValueError(f"query ({self.query}) must be at least 1 and kv ({self.kv}) at least 0; use costs")


@dataclass(frozen=True, kw_only=True)
class HeadCut:
    """Query heads shared out over the slots of a tensor-parallel group, and the KV heads that they need.

    Attributes:
        num_heads: query heads.
        num_kv_heads: KV heads; each serves ``num_heads / num_kv_heads`` query heads.
        query: for each slot its query heads, ascending; ``()`` for a slot without attention.
        speeds_ppm: of each slot.
        costs: what heads cost.
    """

    num_heads: int
    num_kv_heads: int
    query: tuple[Intervals, ...]
    speeds_ppm: tuple[int, ...]
    costs: HeadCosts = HeadCosts()

    def __post_init__(self) -> None:
        _require(total=self.num_heads, speeds_ppm=self.speeds_ppm, num_kv_heads=self.num_kv_heads)
        everything = sorted(interval for intervals in self.query for interval in intervals)
        units = count_units(everything)
        if normalize(everything) != ((0, self.num_heads),) or units != self.num_heads:
            raise ValueError(f"query {self.query} must share out the heads [0, {self.num_heads}), each head once")
        if len(self.query) != len(self.speeds_ppm):
            raise ValueError(f"query ({len(self.query)}) and speeds_ppm ({len(self.speeds_ppm)}) must be as many")

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv(self) -> tuple[Intervals, ...]:
        """For each slot the KV heads that it holds, ascending: those of all its query heads."""
        size = self.group_size
        return tuple(normalize((lo // size, -(-hi // size)) for lo, hi in intervals) for intervals in self.query)

    @property
    def num_extra_kv_heads(self) -> int:
        """Copies of KV heads beyond one of each."""
        return sum(map(count_units, self.kv)) - self.num_kv_heads

    @property
    def work(self) -> tuple[int, ...]:
        """What each slot's heads cost."""
        return tuple(
            count_units(query) * self.costs.query + count_units(kv) * self.costs.kv
            for query, kv in zip(self.query, self.kv, strict=True)
        )

    @property
    def efficiency(self) -> float:
        """The time of an ideal cut, without granularity and extra copies, over this one's; 1 is ideal."""
        slowest = max(work / speed for work, speed in zip(self.work, self.speeds_ppm, strict=True))
        ideal = self.num_heads * self.costs.query + self.num_kv_heads * self.costs.kv
        return ideal / sum(self.speeds_ppm) / slowest


def cut_heads(
    num_heads: int, num_kv_heads: int, speeds_ppm: Sequence[int], *, costs: HeadCosts | None = None
) -> HeadCut:
    """Cuts query heads over the slots of a tensor-parallel group, one run of heads for each slot in order.

    Of all such cuts: the slowest slot as fast as possible, then as few copies of KV heads as possible, then as
    even as possible. 32 heads with 8 KV heads over 7 slots: at most 5 heads and 3 extra copies, since runs of 4
    end where a group does.

    Args:
        num_heads: query heads.
        num_kv_heads: KV heads; a divisor of them.
        speeds_ppm: of each slot. There may be more slots than heads; some then get none.
        costs: what heads cost; by default KV heads cost no time.

    Raises:
        ValueError: if an argument is out of range.
    """
    _require(total=num_heads, speeds_ppm=speeds_ppm, num_kv_heads=num_kv_heads)
    costs = costs or HeadCosts()
    most = num_heads * costs.query + num_kv_heads * costs.kv
    if most > _MAX_WORK:
        raise ValueError(f"costs ({costs}) of all heads must be at most {_MAX_WORK}; only their ratio counts")
    heads, kv_heads = _runs(num_heads, num_heads // num_kv_heads)
    # Integers, so that ties are ties everywhere; the scale leaves no two times alike that differ by a millionth.
    scaled = (heads * costs.query + kv_heads * costs.kv) * (_NEVER // (2 * most))
    times = {speed: -(-scaled // speed) for speed in set(speeds_ppm)}
    slowest = np.zeros(num_heads + 1, dtype=np.int64)
    slowest[1:] = _NEVER
    for speed in speeds_ppm:
        slowest = _extend(np.maximum(slowest[:, None], times[speed]), heads)[0]
    limit = slowest[num_heads]
    # Squares of the runs add up to less than num_heads ** 2 + 1.
    price = kv_heads * (num_heads**2 + 1) + heads**2
    total = np.zeros(num_heads + 1, dtype=np.int64)
    total[1:] = _NEVER
    steps: list[NDArray[np.int64]] = []
    for speed in speeds_ppm:
        total, step = _extend(total[:, None] + np.where(times[speed] <= limit, price, _NEVER), heads)
        steps.append(step)
    ends = [num_heads]
    for step in reversed(steps):
        ends.append(int(step[ends[-1]]))
    query = tuple(((lo, hi),) if lo < hi else () for lo, hi in pairwise(reversed(ends)))
    return HeadCut(
        num_heads=num_heads, num_kv_heads=num_kv_heads, query=query, speeds_ppm=tuple(speeds_ppm), costs=costs
    )


_NEVER = 1 << 60
"""More than any time or price; twice it still fits into an int64."""

_MAX_WORK = 1 << 40


def _runs(num_heads: int, group_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each run [lo, hi), in row lo and column hi: its query heads (negative if hi < lo) and KV heads."""
    lo, hi = np.arange(num_heads + 1)[:, None], np.arange(num_heads + 1)[None, :]
    heads = hi - lo
    return heads, np.where(heads > 0, -(-hi // group_size) - lo // group_size, 0)


def _extend(reached: NDArray[np.int64], heads: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The best value with which one slot more reaches each end, and where its run begins then."""
    values = np.where(heads >= 0, reached, _NEVER)
    begins = np.argmin(values, axis=0)
    return np.minimum(np.take_along_axis(values, begins[None, :], axis=0)[0], _NEVER), begins


def recut_heads(cut: HeadCut, speeds_ppm: Sequence[int | None]) -> HeadCut:
    """The cut after slots left the group: survivors keep their heads, and only those of the others move.

    They go one by one to the slot that is done earliest with one more, among equals to one that holds the KV
    head already. With free KV heads no cut that leaves the survivors theirs has a faster slowest slot.

    Args:
        cut: the cut before.
        speeds_ppm: of each of its slots now; None for one that left.

    Returns:
        A cut over the slots left, in their order.

    Raises:
        ValueError: if no slot is left, or an argument is out of range.
    """
    if len(speeds_ppm) != len(cut.query):
        raise ValueError(f"speeds_ppm ({len(speeds_ppm)}) must be as many as the cut's slots ({len(cut.query)})")
    speeds = [speed for speed in speeds_ppm if speed is not None]
    _require(total=cut.num_heads, speeds_ppm=speeds)
    mine = [set(_heads(query)) for query, speed in zip(cut.query, speeds_ppm, strict=True) if speed is not None]
    kv = [{head // cut.group_size for head in heads} for heads in mine]
    lost = [_heads(query) for query, speed in zip(cut.query, speeds_ppm, strict=True) if speed is None]
    for head in sorted(head for heads in lost for head in heads):
        group = head // cut.group_size

        def price(slot: int, group: int = group) -> tuple[Fraction, bool, int]:
            fresh = group not in kv[slot]
            work = (len(mine[slot]) + 1) * cut.costs.query + (len(kv[slot]) + fresh) * cut.costs.kv
            return Fraction(work, speeds[slot]), fresh, slot

        chosen = min(range(len(speeds)), key=price)
        mine[chosen].add(head)
        kv[chosen].add(group)
    return HeadCut(
        num_heads=cut.num_heads,
        num_kv_heads=cut.num_kv_heads,
        query=tuple(normalize((head, head + 1) for head in heads) for heads in mine),
        speeds_ppm=tuple(speeds),
        costs=cut.costs,
    )


@dataclass(frozen=True)
class AttentionCall:
    """KV heads of one slot with equally many of its query heads each: one call of grouped-query attention.

    Attributes:
        kv_heads: global indices, ascending.
        query_heads: global indices; those of the first KV head first.
        group_size: query heads of each KV head here.
    """

    kv_heads: tuple[int, ...]
    query_heads: tuple[int, ...]
    group_size: int


def attention_calls(query: Intervals, group_size: int) -> tuple[AttentionCall, ...]:
    """The calls that compute a slot's attention without copies of keys and values.

    Grouped-query attention wants equally many query heads for each KV head. A run of heads has a group cut at
    its begin, whole ones, and one cut at its end: at most three calls. If heads and KV heads are stored call by
    call, each call is a view.

    Args:
        query: the slot's query heads.
        group_size: query heads of a KV head in the model.
    """
    if group_size < 1:
        raise ValueError(f"group_size ({group_size}) must be at least 1; it is num_heads / num_kv_heads")
    by_kv = {kv: tuple(heads) for kv, heads in groupby(sorted(_heads(query)), key=lambda head: head // group_size)}
    by_size: dict[int, list[int]] = {}
    for kv, heads in by_kv.items():
        by_size.setdefault(len(heads), []).append(kv)
    return tuple(
        AttentionCall(tuple(kvs), tuple(head for kv in kvs for head in by_kv[kv]), size)
        for size, kvs in sorted(by_size.items(), reverse=True)
    )


def _heads(intervals: Iterable[Interval]) -> list[int]:
    return [head for lo, hi in intervals for head in range(lo, hi)]


def _require(*, total: int, speeds_ppm: Sequence[int], **others: int) -> None:
    errors: list[str] = []
    if total < 0:
        errors.append(f"units to cut ({total}) must be at least 0")
    if not speeds_ppm:
        errors.append("speeds_ppm (none) must have a slot; a cut needs somebody to hold it")
    if any(speed < 1 for speed in speeds_ppm):
        errors.append(f"speeds_ppm {list(speeds_ppm)} must be at least 1; leave out a slot that stands still")
    limits: Mapping[str, int] = others
    errors += [f"{name} ({value}) must be at least 1" for name, value in limits.items() if value < 1]
    num_kv_heads = limits.get("num_kv_heads", 0)
    if num_kv_heads >= 1 and (total % num_kv_heads or total < num_kv_heads):
        errors.append(f"num_kv_heads ({num_kv_heads}) must divide num_heads ({total}); choose a divisor")
    if errors:
        raise ValueError("; ".join(errors))
