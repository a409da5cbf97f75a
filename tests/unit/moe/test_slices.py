"""Slices of a cut, in storage order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.moe.slices import ExpertSlice, check_slices, expert_slices, merge_slices


def test_full_experts_and_slices_follow_storage() -> None:
    # experts 1 and 2, then the second half of expert 0 and the first unit of expert 5; four units each
    slices = expert_slices([(4, 12), (2, 4), (20, 21)], 4)
    assert slices == (
        ExpertSlice(1, 0, 4),
        ExpertSlice(2, 4, 8),
        ExpertSlice(0, 8, 10),
        ExpertSlice(5, 10, 11),
    )


@given(st.sets(st.integers(0, 39)), st.integers(1, 10))
def test_each_unit_is_in_the_slice_of_its_expert(units: set[int], units_per_expert: int) -> None:
    stored = sorted(units)
    slices = expert_slices([(unit, unit + 1) for unit in stored], units_per_expert)
    check_slices(slices, num_experts=40, num_units=len(stored))
    owners = [piece.expert for piece in slices for _ in range(piece.lo, piece.hi)]
    assert owners == [unit // units_per_expert for unit in stored]
    merged = merge_slices(slices)
    assert [piece.expert for piece in merged for _ in range(piece.lo, piece.hi)] == owners
    assert len(merged) == len(set(owners))


def test_slices_apart_in_storage_stay_apart() -> None:
    apart = (ExpertSlice(0, 0, 1), ExpertSlice(1, 1, 2), ExpertSlice(0, 2, 3))
    assert merge_slices(apart) == apart


@pytest.mark.parametrize(
    "slices",
    [
        (ExpertSlice(0, 1, 3),),  # starts late
        (ExpertSlice(0, 0, 2), ExpertSlice(1, 1, 3)),  # overlap
        (ExpertSlice(0, 0, 1), ExpertSlice(1, 2, 3)),  # gap
        (ExpertSlice(0, 0, 2),),  # too short
        (ExpertSlice(0, 0, 0), ExpertSlice(1, 0, 3)),  # empty
        (ExpertSlice(4, 0, 3),),  # unknown expert
    ],
)
def test_slices_that_do_not_partition_storage_are_refused(slices: tuple[ExpertSlice, ...]) -> None:
    with pytest.raises(ValueError):
        check_slices(slices, num_experts=4, num_units=3)
