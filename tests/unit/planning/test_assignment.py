import heapq

from hypothesis import assume, given
from hypothesis import strategies as st

from nep.planning.assignment import Assigned, Portion, balance, deal, water_fill
from nep.planning.intervals import count_units

LOADS = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def _one_by_one(loads: list[int], num_units: int, unit_size: int, ties: list[int]) -> list[int]:
    """The meaning of water_fill: a unit at a time to the bin that is least loaded by then."""
    heap = [(load, tie, index) for index, (load, tie) in enumerate(zip(loads, ties, strict=True))]
    heapq.heapify(heap)
    counts = [0] * len(loads)
    for _ in range(num_units):
        load, tie, index = heap[0]
        counts[index] += 1
        heapq.heapreplace(heap, (load + unit_size, tie, index))
    return counts


@given(LOADS, st.integers(0, 60), st.integers(1, 9), st.data())
def test_water_fill_is_a_unit_at_a_time(loads: list[int], num: int, size: int, data: st.DataObject) -> None:
    ties = data.draw(st.lists(st.integers(0, 3), min_size=len(loads), max_size=len(loads)))
    counts = water_fill(loads, num, size, ties)
    expected = _one_by_one(loads, num, size, ties)
    assert sum(counts) == num
    # Of bins that end equally loaded either may have the last unit; the loads are the same ones.
    assert sorted(load + count * size for load, count in zip(loads, counts, strict=True)) == sorted(
        load + count * size for load, count in zip(loads, expected, strict=True)
    )


def test_water_fill_breaks_ties_as_told() -> None:
    assert water_fill([0, 0, 0], 4) == [2, 1, 1]
    assert water_fill([0, 0, 0], 4, ties=[5, 1, 3]) == [1, 2, 1]
    assert water_fill([10, 0], 5) == [0, 5]
    assert water_fill([3], 0) == [0]


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


@st.composite
def _portions(draw: st.DrawFn) -> list[Portion]:
    portions = []
    for position in range(draw(st.integers(1, 3))):
        lo = 0
        unit_size = draw(st.integers(1, 6))
        for _ in range(draw(st.integers(0, 4))):
            lo += draw(st.integers(0, 2))
            hi = lo + draw(st.integers(1, 6))
            candidates = draw(st.frozensets(st.integers(0, 4), min_size=1))
            portions.append(
                Portion(
                    axis=f"x{position}",
                    axis_position=position,
                    lo=lo,
                    hi=hi,
                    unit_size=unit_size,
                    candidates=candidates,
                )
            )
            lo = hi
    return portions


def _units(assigned: Assigned) -> dict[tuple[str, int], list[int]]:
    units: dict[tuple[str, int], list[int]] = {}
    for axis, by_slot in assigned.items():
        for slot, intervals in by_slot.items():
            for lo, hi in intervals:
                for unit in range(lo, hi):
                    units.setdefault((axis, unit), []).append(slot)
    return units


@given(_portions(), st.lists(st.integers(0, 30), min_size=5, max_size=5), st.randoms())
def test_every_unit_goes_to_one_candidate_whatever_the_order(
    portions: list[Portion], loads: list[int], random: st.random_module
) -> None:
    before = dict(enumerate(loads))
    assigned = balance(portions, before)
    expected = {(one.axis, unit): one.candidates for one in portions for unit in range(one.lo, one.hi)}
    found = _units(assigned)
    assert found.keys() == expected.keys()
    assert all(len(slots) == 1 and slots[0] in expected[where] for where, slots in found.items())
    shuffled = list(portions)
    random.shuffle(shuffled)
    assert balance(shuffled, dict(reversed(before.items()))) == assigned
    assert before == dict(enumerate(loads)), "the caller's loads were changed"


def _everyone_may(sizes: list[tuple[int, int]], slots: int) -> list[Portion]:
    return [
        Portion(
            axis=f"x{index}",
            axis_position=index,
            lo=0,
            hi=units,
            unit_size=unit_size,
            candidates=frozenset(range(slots)),
        )
        for index, (units, unit_size) in enumerate(sizes)
    ]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=8), st.integers(1, 6))
def test_free_choice_ends_within_one_unit_of_the_mean(sizes: list[tuple[int, int]], slots: int) -> None:
    """The bound of list scheduling: who got the last unit was at or below the mean before it."""
    portions = _everyone_may(sizes, slots)
    largest = max(unit_size for _, unit_size in sizes)
    mean = sum(one.size for one in portions) / slots
    loads = dict.fromkeys(range(slots), 0)
    for axis, by_slot in balance(portions, loads).items():
        for slot, intervals in by_slot.items():
            loads[slot] += count_units(intervals) * portions[int(axis[1:])].unit_size
    assert max(loads.values()) <= mean + largest + 1


def test_balance_lets_the_free_and_the_small_fill_the_gaps() -> None:
    def only(slots: set[int], units: int, unit_size: int, position: int) -> Portion:
        return Portion(
            axis=f"x{position}",
            axis_position=position,
            lo=0,
            hi=units,
            unit_size=unit_size,
            candidates=frozenset(slots),
        )

    bound_last = balance([only({0, 1}, 4, 1, 0), only({0}, 4, 1, 1)], {0: 0, 1: 0})
    assert bound_last == {"x0": {1: [(0, 4)]}, "x1": {0: [(0, 4)]}}
    large_last = balance([only({0, 1}, 3, 1, 0), only({0, 1}, 1, 3, 1)], {0: 0, 1: 0})
    assert large_last == {"x0": {1: [(0, 3)]}, "x1": {0: [(0, 1)]}}
