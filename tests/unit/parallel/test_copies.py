"""Copies of experts: every token is computed once, by the copy that its quota names."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from nep.parallel.copies import CopyChooser, Integers, held_units
from nep.planning.copies.quotas import split_quotas

UNITS = 3


@st.composite
def boards(draw: DrawFn) -> tuple[Integers, list[int]]:
    """Units of each expert on each slot: one whole copy, several, or slices; and speeds."""
    slots = draw(st.integers(2, 5))
    board = np.zeros((draw(st.integers(1, 6)), slots), dtype=np.int64)
    for expert in range(len(board)):
        if draw(st.booleans()):
            board[expert, sorted(draw(st.sets(st.integers(0, slots - 1), min_size=1)))] = UNITS
        else:
            for _ in range(UNITS):
                board[expert, draw(st.integers(0, slots - 1))] += 1
    return board, draw(st.lists(st.integers(1, 3), min_size=slots, max_size=slots))


@st.composite
def cases(draw: DrawFn) -> tuple[Integers, list[int], list[torch.Tensor]]:
    """A board, speeds, and the choices of each slot's tokens: distinct experts, [t, k]."""
    board, speeds = draw(boards())
    k = draw(st.integers(1, len(board)))
    seed = draw(st.integers(0, 10_000))
    generator = np.random.default_rng(seed)
    ids = [
        torch.from_numpy(np.array([generator.permutation(len(board))[:k] for _ in range(tokens)], dtype=np.int64))
        .view(-1, k)
        .long()
        for tokens in draw(st.lists(st.integers(0, 9), min_size=len(speeds), max_size=len(speeds)))
    ]
    return board, speeds, ids


@given(cases())
def test_each_choice_goes_to_one_copy_or_to_all_slices_and_quotas_are_kept(
    case: tuple[Integers, list[int], list[torch.Tensor]],
) -> None:
    board, speeds, ids = case
    chooser = CopyChooser(board, UNITS, speeds)
    counts = torch.stack([torch.bincount(own.flatten(), minlength=len(board)) for own in ids])
    computed = torch.zeros(board.shape, dtype=torch.int64)
    for rank, ids_tk in enumerate(ids):
        wanted = torch.from_numpy(board > 0)[ids_tk]
        if chooser.any:
            chooser.narrow(wanted, ids_tk, counts, rank)
        for token, experts in enumerate(ids_tk.tolist()):
            for choice, expert in enumerate(experts):
                slots = wanted[token, choice].nonzero().flatten().tolist()
                if board[expert].sum() > UNITS:
                    assert len(slots) == 1 and board[expert, slots[0]] == UNITS
                else:
                    assert slots == np.flatnonzero(board[expert]).tolist()
                computed[expert, slots] += 1
    if not (board % UNITS).any():
        whole = (board == UNITS).astype(np.int8)
        expected = split_quotas(counts.sum(0).numpy()[None], whole[None], speeds)[0]
        assert (computed.numpy() == expected).all()


@given(cases())
def test_tokens_stay_where_they_are_as_far_as_quotas_allow(
    case: tuple[Integers, list[int], list[torch.Tensor]],
) -> None:
    board, speeds, ids = case
    chooser = CopyChooser(board, UNITS, speeds)
    counts = torch.stack([torch.bincount(own.flatten(), minlength=len(board)) for own in ids]).numpy()
    flows = chooser.flows(counts)
    copied = board.sum(1) > UNITS
    assert (flows >= 0).all()
    assert (flows.sum(2) == counts[:, copied]).all()
    quotas = flows.sum(0)
    for rank in range(len(speeds)):
        assert (flows[rank, :, rank] == np.minimum(counts[rank, copied], quotas[:, rank])).all()


def test_slices_count_as_load() -> None:
    """Slot 0 is busy with its slice of expert 1, so expert 0's tokens go to the copy on slot 1."""
    board = np.array([[3, 3, 0], [2, 0, 1]])
    flows = CopyChooser(board, UNITS, [1, 1, 1]).flows(np.array([[0, 90], [60, 0], [0, 0]]))
    assert flows.sum(0).tolist() == [[0, 60, 0]]


def test_units_by_slot() -> None:
    cuts = {4: ((0, 3), (5, 7)), 2: ((3, 5),), 9: ((0, 3), (7, 9))}
    assert held_units(cuts, (2, 4, 9), 3, 3).tolist() == [[0, 3, 3], [2, 1, 0], [0, 1, 2]]
