"""Rows of a dispatch against enumeration of all choices of experts."""

from itertools import combinations
from math import comb, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cost.dispatch_rows import hit_chance, inclusion


def _held(slots_of_expert: list[set[int]], num_slots: int) -> np.ndarray:
    shares = np.zeros((1, len(slots_of_expert), num_slots))
    for expert, slots in enumerate(slots_of_expert):
        shares[0, expert, sorted(slots)] = 1.0
    return shares


def _uniform(num_experts: int, top_k: int) -> np.ndarray:
    return inclusion(np.full((1, num_experts), 1 / num_experts), top_k)


@given(st.data(), st.integers(1, 7), st.integers(1, 5))
def test_equal_loads_are_exact(data: st.DataObject, num_experts: int, num_slots: int) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    held = [data.draw(st.sets(st.integers(0, num_slots - 1), min_size=1)) for _ in range(num_experts)]
    choices = list(combinations(range(num_experts), top_k))
    expected = [
        sum(any(slot in held[expert] for expert in choice) for choice in choices) / len(choices)
        for slot in range(num_slots)
    ]
    found = hit_chance(_uniform(num_experts, top_k), _held(held, num_slots), top_k)
    np.testing.assert_allclose(found[0], expected, atol=1e-9)


def test_known_numbers() -> None:
    # Top-2 of 8 with the eighth expert in slices on seven slots: 3.25 rows a token instead of 2.
    seven = _held([{expert} for expert in range(7)] + [set(range(7))], 7)
    assert hit_chance(_uniform(8, 2), seven, 2).sum() == pytest.approx(3.25)
    # Whole experts, 8 of 256 on each of 32 slots: the hypergeometric distribution.
    spread = _held([{expert // 8} for expert in range(256)], 32)
    missed = comb(248, 8) / comb(256, 8)
    np.testing.assert_allclose(hit_chance(_uniform(256, 8), spread, 8), 1 - missed, rtol=1e-9)


@given(st.lists(st.floats(0.05, 1), min_size=4, max_size=7), st.integers(1, 3))
def test_loads_are_kept_and_choices_are_as_random_as_possible(weights: list[float], top_k: int) -> None:
    """Independent reference: chances from known weights by enumeration, then rows from the chances alone."""
    choices = list(combinations(range(len(weights)), top_k))
    chance_of = np.array([prod(weights[expert] for expert in choice) for choice in choices])
    chance_of /= chance_of.sum()
    chance = np.array(
        [[sum(chance_of[i] for i, choice in enumerate(choices) if e in choice) for e in range(len(weights))]]
    )
    held = [{expert % 3, (expert + 1) % 3} if expert % 2 else {expert % 3} for expert in range(len(weights))]
    expected = [
        sum(p for p, choice in zip(chance_of, choices, strict=True) if any(slot in held[e] for e in choice))
        for slot in range(3)
    ]
    found = hit_chance(inclusion(chance / top_k, top_k), _held(held, 3), top_k)
    np.testing.assert_allclose(found[0], expected, atol=1e-6)


@given(st.lists(st.floats(0, 1), min_size=3, max_size=9), st.integers(1, 3))
def test_a_slot_with_one_expert_gets_its_tokens_and_nothing_else(loads: list[float], top_k: int) -> None:
    if sum(loads) == 0:
        loads[0] = 1.0
    chance = inclusion(np.array([loads]) / sum(loads), top_k)
    assert chance.sum() == pytest.approx(top_k)
    assert (chance <= 1).all()
    alone = np.eye(len(loads))[None]
    np.testing.assert_allclose(hit_chance(chance, alone, top_k), chance, atol=1e-6)


def test_an_expert_that_everybody_wants_is_chosen_once_per_token() -> None:
    chance = inclusion(np.array([[0.9, 0.1, 0.0, 0.0]]), 2)
    np.testing.assert_allclose(chance, [[1.0, 1.0, 0.0, 0.0]])
    only = inclusion(np.array([[1.0, 0.0, 0.0]]), 2)
    np.testing.assert_allclose(only, [[1.0, 0.5, 0.5]])


def test_copies_share_the_tokens_of_an_expert() -> None:
    # Expert 0 has copies on both slots that take a quarter and three quarters; top-1, so rows add up.
    shares = np.array([[[0.25, 0.75], [1.0, 0.0]]])
    chance = inclusion(np.array([[0.6, 0.4]]), 1)
    np.testing.assert_allclose(hit_chance(chance, shares, 1), [[0.55, 0.45]])
    # Every token chooses both experts: it misses slot 1 unless its copy of expert 0 is there.
    np.testing.assert_allclose(hit_chance(np.ones((1, 2)), shares, 2), [[1.0, 0.75]])
