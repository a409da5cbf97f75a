from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.batch import split_sequences

WEIGHTS = st.lists(st.integers(0, 2_000_000), min_size=1, max_size=20).filter(any)


def _best_time(size: int, weights: list[int]) -> Fraction:
    """The earliest time by which all lanes together can have done so many sequences, by trying them."""
    times = sorted({Fraction(count, weight) for weight in weights if weight for count in range(size + 1)})
    return next(time for time in times if sum(int(time * weight) for weight in weights) >= size)


@given(st.integers(0, 30), st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_the_last_lane_is_done_as_early_as_possible(size: int, weights: list[int]) -> None:
    shares = split_sequences(size, weights)
    assert sum(shares) == size
    assert all(weight or not share for share, weight in zip(shares, weights, strict=True))
    done = [Fraction(share, weight) for share, weight in zip(shares, weights, strict=True) if weight]
    assert max(done) == _best_time(size, weights)


@given(st.integers(0, 10_000), WEIGHTS)
def test_nobody_gets_less_than_the_fair_share_rounded_down(size: int, weights: list[int]) -> None:
    shares = split_sequences(size, weights)
    assert sum(shares) == size
    for share, weight in zip(shares, weights, strict=True):
        assert share >= size * weight // sum(weights)
        assert weight or not share


@given(st.integers(0, 10_000), st.integers(1, 64), st.integers(1, 2_000_000))
def test_equal_weights_give_shares_that_differ_by_one(size: int, lanes: int, weight: int) -> None:
    shares = split_sequences(size, [weight] * lanes)
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


@given(st.integers(0, 1000), WEIGHTS, st.integers(2, 9))
def test_only_the_proportion_of_weights_counts(size: int, weights: list[int], factor: int) -> None:
    assert split_sequences(size, weights) == split_sequences(size, [weight * factor for weight in weights])


def test_a_batch_smaller_than_the_lanes_leaves_some_without() -> None:
    assert split_sequences(2, [1] * 5) == (1, 1, 0, 0, 0)
    assert split_sequences(0, [1, 1]) == (0, 0)
    assert split_sequences(10, [1_000_000, 500_000]) == (7, 3)
    assert split_sequences(3, [4, 1]) == (3, 0)


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"global_batch_size \(-1\).*weights \[-2\]"):
        split_sequences(-1, [-2])
    with pytest.raises(ValueError, match=r"weights \[0, 0\] must not all be 0"):
        split_sequences(4, [0, 0])
    with pytest.raises(ValueError, match=r"weights \[\] must not all be 0"):
        split_sequences(4, [])
