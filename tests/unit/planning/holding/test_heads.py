"""Cuts of heads, rows and tokens against all cuts there are, on sizes that allow it."""

from fractions import Fraction
from itertools import combinations_with_replacement, pairwise, product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nep.planning.holding.heads import HeadCosts, HeadCut, apportion, attention_calls, cut_heads, cut_line, recut_heads
from nep.planning.intervals import count_units

FULL = 1_000_000
SPEEDS = st.lists(st.one_of(st.integers(1, 5), st.integers(400_000, FULL)), min_size=1, max_size=4)


@st.composite
def _groups(draw: st.DrawFn, most: int = 9) -> tuple[int, int]:
    num_heads = draw(st.integers(1, most))
    return num_heads, draw(st.sampled_from([count for count in range(1, most + 1) if num_heads % count == 0]))


def _contiguous(num_units: int, slots: int) -> list[list[range]]:
    """Every way to cut a line into one run for each slot."""
    inner = combinations_with_replacement(range(num_units + 1), slots - 1)
    return [[range(lo, hi) for lo, hi in pairwise((0, *ends, num_units))] for ends in inner]


def _kv(heads: range | list[int], group_size: int) -> int:
    return len({head // group_size for head in heads})


def _slowest(work: list[int], speeds: list[int]) -> Fraction:
    return max(Fraction(one, speed) for one, speed in zip(work, speeds, strict=True))


@given(st.integers(0, 12), SPEEDS)
def test_no_other_shares_are_faster(total: int, speeds: list[int]) -> None:
    shares = apportion(total, speeds)
    assert sum(shares) == total and min(shares) >= 0
    best = min(_slowest([len(run) for run in cut], speeds) for cut in _contiguous(total, len(speeds)))
    assert _slowest(list(shares), speeds) == best


def test_equal_slots_differ_by_one_and_the_earlier_has_more() -> None:
    assert apportion(32, [FULL] * 7) == (5, 5, 5, 5, 4, 4, 4)
    assert apportion(3, [4, 1]) == (3, 0), "the slow slot would keep everybody waiting"
    assert apportion(2, [FULL] * 3) == (1, 1, 0)
    assert apportion(0, [1, 2]) == (0, 0)


@given(st.integers(0, 30), SPEEDS, st.integers(1, 7))
def test_a_line_is_cut_at_blocks_without_gaps(num_units: int, speeds: list[int], block: int) -> None:
    cut = cut_line(num_units, speeds, block=block)
    assert cut[0][0] == 0 and cut[-1][1] == num_units and len(cut) == len(speeds)
    assert all(before[1] == after[0] for before, after in pairwise(cut))
    assert all(hi % block == 0 or hi == num_units for _, hi in cut)
    blocks = [-(-hi // block) - -(-lo // block) for lo, hi in cut]
    assert tuple(blocks) == apportion(-(-num_units // block), speeds)


def test_vocabulary_rows_and_tokens_of_a_lane() -> None:
    rows = cut_line(32_000, [FULL] * 7, block=128)
    assert [hi - lo for lo, hi in rows] == [4608] * 5 + [4480] * 2
    tokens = cut_line(4096, [FULL, FULL, 700_000])
    assert [hi - lo for lo, hi in tokens] == [1517, 1517, 1062]


@given(_groups(), SPEEDS, st.sampled_from([(1, 0), (1, 1), (3, 1), (7, 2), (2, 5)]))
def test_no_other_runs_of_heads_are_better(sizes: tuple[int, int], speeds: list[int], costs: tuple[int, int]) -> None:
    """Slowest slot, then copies of KV heads, then squares of the runs."""
    (num_heads, num_kv_heads), (query, kv) = sizes, costs
    group_size = num_heads // num_kv_heads

    def rank(cut: list[range]) -> tuple[Fraction, int, int]:
        copies = [_kv(run, group_size) for run in cut]
        work = [len(run) * query + held * kv for run, held in zip(cut, copies, strict=True)]
        return _slowest(work, speeds), sum(copies), sum(len(run) ** 2 for run in cut)

    cut = cut_heads(num_heads, num_kv_heads, speeds, costs=HeadCosts(query=query, kv=kv))
    runs = [range(*query[0]) if query else range(0) for query in cut.query]
    assert [head for run in runs for head in run] == list(range(num_heads))
    assert rank(runs) == min(rank(other) for other in _contiguous(num_heads, len(speeds)))


@given(_groups(), SPEEDS)
def test_a_slot_holds_the_kv_heads_of_its_query_heads_and_no_others(sizes: tuple[int, int], speeds: list[int]) -> None:
    cut = cut_heads(*sizes, speeds)
    extra = -cut.num_kv_heads
    for query, kv in zip(cut.query, cut.kv, strict=True):
        needed = {head // cut.group_size for lo, hi in query for head in range(lo, hi)}
        assert [head for lo, hi in kv for head in range(lo, hi)] == sorted(needed)
        extra += len(needed)
    assert cut.num_extra_kv_heads == extra
    assert 0 < cut.efficiency <= 1 + 1e-12


@pytest.mark.parametrize(
    ("slots", "most_heads", "extra", "efficiency"),
    [(8, 4, 0, 1), (7, 5, 3, 32 / 35), (6, 6, 2, 32 / 36), (5, 7, 3, 32 / 35), (4, 8, 0, 1), (3, 11, 2, 32 / 33)],
)
def test_32_heads_with_8_kv_heads(slots: int, most_heads: int, extra: int, efficiency: float) -> None:
    cut = cut_heads(32, 8, [FULL] * slots)
    heads = [count_units(query) for query in cut.query]
    assert max(heads) == most_heads == -(-32 // slots)
    assert cut.num_extra_kv_heads == extra
    assert cut.efficiency == pytest.approx(efficiency)


def test_more_slots_than_kv_heads_or_even_query_heads() -> None:
    cut = cut_heads(32, 8, [FULL] * 16)
    assert [count_units(query) for query in cut.query] == [2] * 16
    assert cut.num_extra_kv_heads == 8
    cut = cut_heads(4, 2, [FULL] * 6)
    assert sorted(count_units(query) for query in cut.query) == [0, 0, 1, 1, 1, 1]
    assert [kv for kv, query in zip(cut.kv, cut.query, strict=True) if not query] == [(), ()]
    assert cut.efficiency == pytest.approx(4 / 6)


def test_slow_slots_get_fewer_heads() -> None:
    cut = cut_heads(32, 8, [FULL, FULL, FULL, 500_000])
    assert [count_units(query) for query in cut.query][3] in (4, 5)
    assert cut.efficiency > 32 / 35 - 1e-9
    assert cut_heads(8, 8, [FULL, 1]).query == (((0, 8),), ())


@st.composite
def _damaged(draw: st.DrawFn) -> tuple[HeadCut, list[int | None]]:
    cut = cut_heads(*draw(_groups(8)), draw(SPEEDS))
    now = [draw(st.one_of(st.none(), st.just(speed))) for speed in cut.speeds_ppm]
    assume(any(now))
    return cut, now


@given(_damaged())
def test_survivors_keep_their_heads_and_nobody_could_be_faster(damaged: tuple[HeadCut, list[int | None]]) -> None:
    cut, now = damaged
    after = recut_heads(cut, now)
    kept = [query for query, speed in zip(cut.query, now, strict=True) if speed is not None]
    before = [{head for lo, hi in query for head in range(lo, hi)} for query in kept]
    mine = [{head for lo, hi in query for head in range(lo, hi)} for query in after.query]
    assert all(old <= new for old, new in zip(before, mine, strict=True))
    assert sorted(head for heads in mine for head in heads) == list(range(cut.num_heads))
    speeds = [speed for speed in now if speed is not None]
    lost = cut.num_heads - sum(map(len, before))
    best = min(
        _slowest([len(old) + len(run) for old, run in zip(before, cut_, strict=True)], speeds)
        for cut_ in _contiguous(lost, len(speeds))
    )
    assert _slowest([len(heads) for heads in mine], speeds) == best


def test_eight_to_seven_moves_one_slots_heads_at_the_price_of_a_new_cut() -> None:
    cut = cut_heads(32, 8, [FULL] * 8)
    after = recut_heads(cut, [FULL, FULL, None, FULL, FULL, FULL, FULL, FULL])
    fresh = cut_heads(32, 8, [FULL] * 7)
    assert after.query[:3] == (((0, 4), (8, 9)), ((4, 8), (9, 10)), ((10, 11), (12, 16)))
    assert (after.efficiency, after.num_extra_kv_heads) == (fresh.efficiency, fresh.num_extra_kv_heads)
    again = recut_heads(after, [None, *[FULL] * 6])
    assert max(count_units(query) for query in again.query) == 6


def test_a_slot_that_has_the_kv_head_is_preferred() -> None:
    cut = HeadCut(num_heads=6, num_kv_heads=3, query=(((0, 2),), ((3, 5),), ((2, 3), (5, 6))), speeds_ppm=(1, 1, 1))
    assert recut_heads(cut, [1, 1, None]).query == (((0, 2), (5, 6)), ((2, 5),))


@given(st.sets(st.integers(0, 23)), st.sampled_from([1, 2, 3, 4, 6]))
def test_calls_have_each_head_once_and_equal_groups(heads: set[int], group_size: int) -> None:
    query = tuple((head, head + 1) for head in sorted(heads))
    calls = attention_calls(query, group_size)
    assert sorted(head for call in calls for head in call.query_heads) == sorted(heads)
    for call in calls:
        served = [head // group_size for head in call.query_heads]
        assert served == [kv for kv in call.kv_heads for _ in range(call.group_size)]
    assert len({call.group_size for call in calls}) == len(calls) <= group_size


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (48, 8), (64, 8), (12, 4), (7, 1)])
def test_a_run_of_heads_needs_at_most_three_calls(num_heads: int, num_kv_heads: int) -> None:
    size = num_heads // num_kv_heads
    for lo, hi in product(range(num_heads), range(1, num_heads + 1)):
        if lo < hi:
            assert len(attention_calls(((lo, hi),), size)) <= 3
    assert [call.group_size for call in attention_calls(((3, 14),), 4)] == [4, 2, 1]


def test_a_domain_of_72_slots() -> None:
    """As many as a rack of NVLink has, none of them equal."""
    cut = cut_heads(128, 8, [FULL - 1000 * slot for slot in range(72)])
    assert max(count_units(query) for query in cut.query) == 2


def test_bad_input_is_refused_with_all_reasons_at_once() -> None:
    with pytest.raises(ValueError, match=r"num_kv_heads \(5\) must divide num_heads \(32\)") as caught:
        cut_heads(32, 5, [FULL, 0])
    assert "speeds_ppm [1000000, 0] must be at least 1" in str(caught.value)
    with pytest.raises(ValueError, match=r"speeds_ppm \(none\)"):
        apportion(3, [])
    with pytest.raises(ValueError, match=r"units to cut \(-1\) must be at least 0.*block \(0\)"):
        cut_line(-1, [1], block=0)
    with pytest.raises(ValueError, match="only their ratio counts"):
        cut_heads(32, 8, [1], costs=HeadCosts(query=1 << 40))
    with pytest.raises(ValueError, match=r"query \(0\)"):
        HeadCosts(query=0)
    cut = cut_heads(4, 2, [1, 1])
    with pytest.raises(ValueError, match=r"speeds_ppm \(1\) must be as many as the cut's slots \(2\)"):
        recut_heads(cut, [1])
    with pytest.raises(ValueError, match=r"speeds_ppm \(none\)"):
        recut_heads(cut, [None, None])
    with pytest.raises(ValueError, match="each head once"):
        HeadCut(num_heads=4, num_kv_heads=2, query=(((0, 3),), ((2, 4),)), speeds_ppm=(1, 1))
    with pytest.raises(ValueError, match=r"group_size \(0\)"):
        attention_calls(((0, 1),), 0)
