import heapq

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from nep.planning.holding.assignment import deal, water_fill
from nep.planning.intervals import count_units

LOADS = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def _one_by_one(loads: list[int], num_units: int, unit_size: int) -> list[int]:
    """The meaning of water_fill: a unit at a time to the bin that is least loaded by then."""
    heap = [(load, index) for index, load in enumerate(loads)]
    heapq.heapify(heap)
    counts = [0] * len(loads)
    for _ in range(num_units):
        load, index = heap[0]
        counts[index] += 1
        heapq.heapreplace(heap, (load + unit_size, index))
    return counts


@given(LOADS, st.integers(0, 60), st.integers(1, 9))
def test_water_fill_is_a_unit_at_a_time(loads: list[int], num: int, size: int) -> None:
    counts = water_fill(np.array(loads), num, size).tolist()
    expected = _one_by_one(loads, num, size)
    assert sum(counts) == num
    # Of bins that end equally loaded either may have the last unit; the loads are the same ones.
    assert sorted(load + count * size for load, count in zip(loads, counts, strict=True)) == sorted(
        load + count * size for load, count in zip(loads, expected, strict=True)
    )


@given(st.lists(st.integers(0, 90), min_size=33, max_size=70), st.integers(0, 600), st.integers(1, 9))
def test_many_bins_are_filled_like_few(loads: list[int], num: int, size: int) -> None:
    """Many bins take another way through the code."""
    counts = water_fill(np.array(loads), num, size).tolist()
    expected = _one_by_one(loads, num, size)
    assert sum(counts) == num
    assert sorted(load + count * size for load, count in zip(loads, counts, strict=True)) == sorted(
        load + count * size for load, count in zip(loads, expected, strict=True)
    )


def test_water_fill_gives_the_earlier_of_equals_more() -> None:
    assert water_fill(np.array([0, 0, 0]), 4, 1).tolist() == [2, 1, 1]
    assert water_fill(np.array([10, 0]), 5, 1).tolist() == [0, 5]
    assert water_fill(np.array([3]), 0, 1).tolist() == [0]
    assert water_fill(np.zeros(40, dtype=np.int64), 41, 1).tolist() == [2] + [1] * 39


@given(st.lists(st.integers(1, 5), max_size=5), st.data())
def test_deal_keeps_order_and_counts_in_few_pieces(lengths: list[int], data: st.DataObject) -> None:
    intervals, start = [], 0
    for length in lengths:
        start += data.draw(st.integers(0, 2))
        intervals.append((start, start + length))
        start += length
    shares = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    left = sum(lengths) - sum(shares)
    assume(left >= 0)
    counts = [*enumerate(shares), (99, left)]
    dealt = deal(intervals, counts)
    assert [unit for _, (lo, hi) in dealt for unit in range(lo, hi)] == [
        unit for lo, hi in intervals for unit in range(lo, hi)
    ]
    for slot, count in counts:
        assert count_units(interval for taker, interval in dealt if taker == slot) == count
    assert len(dealt) <= max(0, len(intervals) + len([count for _, count in counts if count]) - 1)
