"""Lost units shared out evenly: against trying every unit, and unit by unit."""

import heapq
from fractions import Fraction
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nep.planning.holding.even_shares import EvenShares, fill_level
from nep.planning.intervals import Intervals, arrange, normalize


def _one_by_one(units: list[int], speeds: list[int], count: int) -> list[Fraction]:
    """When each slot is done if every unit goes to the slot that is done first with it."""
    heap = [(Fraction(have + 1, speed), place) for place, (have, speed) in enumerate(zip(units, speeds, strict=True))]
    heapq.heapify(heap)
    total = list(units)
    for _ in range(count):
        _, place = heap[0]
        total[place] += 1
        heapq.heapreplace(heap, (Fraction(total[place] + 1, speeds[place]), place))
    return [Fraction(have, speed) for have, speed in zip(total, speeds, strict=True)]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from((1000, 700, 500, 333))), min_size=1, max_size=7),
    st.integers(0, 60),
)
def test_the_slowest_slot_is_done_as_early_as_unit_by_unit(slots: list[tuple[int, int]], count: int) -> None:
    units, speeds = [have for have, _ in slots], [speed for _, speed in slots]
    shares = fill_level(units, speeds, count)
    assert sum(shares) == count and min(shares) >= 0
    done = [Fraction(have + share, speed) for have, share, speed in zip(units, shares, speeds, strict=True)]
    assert max(done) == max(_one_by_one(units, speeds, count))


def _held(counts: list[int], num_units: int, size: int) -> list[Intervals]:
    """Runs of the line with gaps: what is left of a replica that lost slots."""
    ends = [0]
    for count in counts:
        ends.append(min(num_units, ends[-1] + count))
    runs = [arrange([(lo, hi)], size) if lo < hi else () for lo, hi in pairwise(ends)]
    return runs[::2]  # the others are lost


@given(st.lists(st.integers(0, 9), min_size=2, max_size=20), st.integers(1, 5), st.data())
def test_survivors_keep_what_they_hold_and_get_the_rest_once(counts: list[int], size: int, data: st.DataObject) -> None:
    num_units = size * data.draw(st.integers(1, 12))
    held = _held(counts, num_units, size)
    slots = range(100, 100 + len(held))
    speeds = {slot: data.draw(st.sampled_from((1000, 600))) for slot in slots}
    turn = data.draw(st.integers(0, 7))
    now = EvenShares(num_units, size, speeds).complete(slots, held, turn)
    assert normalize(interval for intervals in now for interval in intervals) == ((0, num_units),)
    assert sum(hi - lo for intervals in now for lo, hi in intervals) == num_units
    for before, after in zip(held, now, strict=True):
        assert after is before or after == arrange(after, size)
        assert {u for lo, hi in before for u in range(lo, hi)} <= {u for lo, hi in after for u in range(lo, hi)}


def test_layers_take_turns_with_what_does_not_divide() -> None:
    held: list[Intervals] = [((8 * slot, 8 * slot + 8),) for slot in range(7)]
    shares = EvenShares(64, 8, dict.fromkeys(range(7), 1))
    sizes = [
        [sum(hi - lo for lo, hi in intervals) for intervals in shares.complete(range(7), held, shares.turn(layer))]
        for layer in range(7)
    ]
    assert [sum(column) for column in zip(*sizes, strict=True)] == [64] * 7


def test_alike_replicas_share_their_answer() -> None:
    shares = EvenShares(8, 4, dict.fromkeys(range(4), 1))
    held: list[Intervals] = [((0, 4),), ((4, 6),)]
    assert shares.complete((0, 1), held, 0) is shares.complete((2, 3), list(held), 0)
