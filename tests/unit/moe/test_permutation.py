"""Sorting assignments by expert, there and back."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nep.moe.permutation import num_tokens_per_expert, permute_tokens, sort_assignments, unpermute_tokens

NUM_EXPERTS = 5


@given(
    st.integers(0, 12),
    st.integers(1, 3),
    st.lists(st.integers(0, NUM_EXPERTS - 1), unique=True),
    st.integers(0, 99),
)
def test_sorted_assignments_are_those_of_a_loop(num_rows: int, top_k: int, experts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids_rk = torch.randint(-1, NUM_EXPERTS, (num_rows, top_k), generator=generator)
    expected = [
        (row * top_k + choice, row, position)
        for position, expert in enumerate(experts)
        for row in range(num_rows)
        for choice in range(top_k)
        if ids_rk[row, choice] == expert
    ]
    permutation = sort_assignments(ids_rk, experts, NUM_EXPERTS)
    assert permutation.assignment_ids_a.tolist() == [assignment for assignment, _, _ in expected]
    assert permutation.row_ids_a.tolist() == [row for _, row, _ in expected]
    counts = [sum(position == index for *_, position in expected) for index in range(len(experts))]
    assert [stop - start for start, stop in zip(permutation.offsets, permutation.offsets[1:], strict=False)] == counts


def test_unpermute_adds_what_permute_copied() -> None:
    rows_rd = torch.arange(6.0).view(3, 2)
    row_ids_a = torch.tensor([2, 0, 2])
    rows_ad = permute_tokens(rows_rd, row_ids_a)
    assert rows_ad.tolist() == [[4, 5], [0, 1], [4, 5]]
    out_rd = unpermute_tokens(torch.ones(3, 2), rows_ad, row_ids_a)
    assert out_rd.tolist() == [[1, 2], [1, 1], [9, 11]]


def test_tokens_are_counted_per_expert() -> None:
    assert num_tokens_per_expert(torch.tensor([[0, 3], [3, 1]]), 5).tolist() == [1, 1, 0, 2, 0]
    assert num_tokens_per_expert(torch.empty(0, 2, dtype=torch.int64), 3).tolist() == [0, 0, 0]
