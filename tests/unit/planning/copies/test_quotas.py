import hashlib
import json
from fractions import Fraction
from itertools import pairwise
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from numpy.typing import NDArray
from scipy.optimize import linprog

from nep.planning.copies import quotas
from nep.planning.copies.place import SlotLimits, place_copies
from nep.planning.copies.quotas import QuotaSolver, split_quotas
from nep.planning.copies.tree import tree_limits
from nep.planning.loads import ExpertLoads
from tests.unit.planning.copies.expert_copies import deepseek_prefill

Ints = NDArray[np.int64]


def best_level(counts: Ints, copies: Ints, speeds: list[int]) -> Fraction:
    """Least possible tokens per speed of the fullest slot, tokens taken as divisible.

    Some set of slots is as full as the experts that are nowhere else make it (max-flow min-cut); this tries them all.
    """
    hosts = [sum(int(flag) << slot for slot, flag in enumerate(row)) for row in copies]
    best = Fraction(0)
    for chosen in range(1, 2 ** len(speeds)):
        inside = sum(int(count) for count, mask in zip(counts, hosts, strict=True) if not mask & ~chosen)
        speed = sum(speed for slot, speed in enumerate(speeds) if chosen >> slot & 1)
        best = max(best, Fraction(inside, speed))
    return best


def best_level_by_linear_program(counts: Ints, copies: Ints, speeds: list[int]) -> float:
    """The same, with nothing known about cuts."""
    expert, slot = np.nonzero(copies)
    columns = len(expert) + 1
    load = np.zeros((len(speeds), columns))
    load[slot, np.arange(len(expert))] = 1
    load[:, -1] = -np.array(speeds) / min(speeds)
    sums = np.zeros((len(counts), columns))
    sums[expert, np.arange(len(expert))] = 1
    result = linprog(
        [0] * len(expert) + [1],
        A_ub=load,
        b_ub=np.zeros(len(speeds)),
        A_eq=sums,
        b_eq=counts,
        method="highs",
    )
    assert result.status == 0, result.message
    return float(result.x[-1]) / min(speeds)


@st.composite
def placements(draw: DrawFn) -> tuple[Ints, Ints, list[int]]:
    """Counts, copies and speeds of one layer, of any shape and as uneven as can be."""
    experts, slots = draw(st.integers(1, 9)), draw(st.integers(1, 8))
    mask = st.integers(1, 2**slots - 1)
    copies = np.array([[hosts >> slot & 1 for slot in range(slots)] for hosts in draw(_lists(mask, experts))])
    largest = draw(st.sampled_from([1, 20, 10**4, 10**7]))
    counts = np.array(draw(_lists(st.one_of(st.just(0), st.integers(0, largest)), experts)))
    speed = draw(st.sampled_from([st.just(1_000_000), st.integers(1, 4), st.integers(700_000, 1_000_000)]))
    return counts, copies, draw(_lists(speed, slots))


def _lists(entries: st.SearchStrategy[int], length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(entries, min_size=length, max_size=length)


def check_optimal(counts: Ints, copies: Ints, speeds: list[int]) -> None:
    shares = split_quotas(counts[None], copies[None], speeds)[0]
    assert shares.dtype == np.int64
    assert (shares >= 0).all() and not shares[copies == 0].any()
    assert (shares.sum(axis=1) == counts).all()
    best = best_level(counts, copies, speeds)
    tokens = shares.sum(axis=0).tolist()
    assert all(have < best * speed + 1 for have, speed in zip(tokens, speeds, strict=True))
    if len(set(speeds)) == 1:
        assert max(tokens) == ceil(best * speeds[0])


@given(placements())
def test_two_references_agree(placement: tuple[Ints, Ints, list[int]]) -> None:
    counts, copies, speeds = placement
    by_program = best_level_by_linear_program(counts, copies, speeds)
    assert by_program == pytest.approx(float(best_level(counts, copies, speeds)), rel=1e-5, abs=1e-9)


@given(placements())
def test_no_slot_has_a_token_more_than_at_the_best_level(placement: tuple[Ints, Ints, list[int]]) -> None:
    check_optimal(*placement)


@pytest.mark.parametrize("flow_rounds", [quotas._FLOW_ROUNDS, 0])
@given(placements())
def test_flows_or_paths_alone_find_the_optimum_too(flow_rounds: int, placement: tuple[Ints, Ints, list[int]]) -> None:
    # Few placements need flows after two trees, and hardly any paths after flows.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quotas, "_TREE_ROUNDS", 0)
        patch.setattr(quotas, "_FLOW_ROUNDS", flow_rounds)
        check_optimal(*placement)


def test_flows_need_no_path_on_large_boards_with_many_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_path(*_: object) -> None:
        raise AssertionError("a flow left something to do")

    monkeypatch.setattr(quotas.TokenGraph, "_take_path", no_path)
    generator = np.random.default_rng(4)
    for density in (0.05, 0.1, 0.3):
        copies = (generator.random((6, 100, 24)) < density).astype(np.int8)
        copies[:, np.arange(100), np.arange(100) % 24] = 1
        counts = (generator.pareto(1.2, (6, 100)) * 1000).astype(np.int64)
        speeds = generator.integers(700_000, 1_000_001, 24).tolist()
        tokens = QuotaSolver(copies, speeds).split(counts).sum(axis=1)
        for layer in range(6):
            best = best_level_by_linear_program(counts[layer], copies[layer], speeds)
            assert (tokens[layer] < best * np.array(speeds) + 1 + 1e-3).all()


@st.composite
def trees(draw: DrawFn) -> tuple[list[tuple[int, int, list[int]]], dict[int, int], list[int], list[int]]:
    """Experts that join slots to a tree, leaves first, their tokens, and the tokens and speeds of the slots."""
    branches: list[tuple[int, int, list[int]]] = []
    slots = 1
    while slots < 8 and draw(st.booleans()):
        new = draw(st.integers(1, min(3, 8 - slots)))
        branches.append((len(branches), draw(st.integers(0, slots - 1)), list(range(slots, slots + new))))
        slots += new
    # Large numbers, so that rounding to a token does not show.
    tokens = st.one_of(st.just(0), st.integers(0, 100)).map(lambda hundreds: hundreds * 10**6)
    movable = dict(enumerate(draw(_lists(tokens, len(branches)))))
    speed = draw(st.sampled_from([st.just(1), st.integers(1, 4)]))
    return branches[::-1], movable, draw(_lists(tokens, slots)), draw(_lists(speed, slots))


@given(trees())
def test_levels_on_a_tree_are_as_equal_as_possible(
    tree: tuple[list[tuple[int, int, list[int]]], dict[int, int], list[int], list[int]],
) -> None:
    branches, movable, tokens, speeds = tree
    slots = list(range(len(tokens)))
    # The fullest set of slots, the largest of equals, is as full as its own experts make it. Then the next without it.
    experts = [({above, *below}, movable[expert]) for expert, above, below in branches]
    experts += [({slot}, have) for slot, have in enumerate(tokens)]
    expected = [0] * len(slots)
    rest = set(slots)
    while rest:
        best, fullest = Fraction(-1), set[int]()
        for chosen in range(1, 2 ** len(slots)):
            members = {slot for slot in rest if chosen >> slot & 1}
            if not members:
                continue
            inside = sum(count for hosts, count in experts if hosts <= members)
            level = Fraction(inside, sum(speeds[slot] for slot in members))
            if (level, len(members)) > (best, len(fullest)):
                best, fullest = level, members
        for slot in fullest:
            expected[slot] = ceil(best * speeds[slot])
        experts = [(hosts - fullest, count) for hosts, count in experts if not hosts <= fullest]
        rest -= fullest
    assert tree_limits(branches, slots, movable, tokens, speeds) == pytest.approx(expected, abs=40)


@given(placements(), st.integers(2, 1000))
def test_only_the_proportion_of_speeds_counts(placement: tuple[Ints, Ints, list[int]], factor: int) -> None:
    counts, copies, speeds = placement
    scaled = split_quotas(counts[None], copies[None], [speed * factor for speed in speeds])
    assert (scaled == split_quotas(counts[None], copies[None], speeds)).all()


@given(st.lists(placements(), min_size=1, max_size=3), st.integers(0, 2**32))
def test_layers_do_not_influence_each_other(placed: list[tuple[Ints, Ints, list[int]]], seed: int) -> None:
    counts, copies, speeds = placed[0]
    # Layers of one solver have equal shapes: the first, and the same with its experts in other orders.
    orders = [np.random.default_rng(seed + i).permutation(len(counts)) for i in range(len(placed))]
    solver = QuotaSolver(np.stack([copies[order] for order in orders]), speeds)
    together = solver.split(np.stack([counts[order] for order in orders]))
    tokens = solver.slot_tokens(np.stack([counts[order] for order in orders]))
    assert (tokens == together.sum(axis=1)).all()
    for index, order in enumerate(orders):
        assert (together[index] == split_quotas(counts[order][None], copies[order][None], speeds)[0]).all()
        assert (together[index] == solver.layers[index].split(counts[order])).all()


def test_tokens_move_over_a_chain_of_experts() -> None:
    # Slot 0 is over full and shares no expert with slot 3; all others are at the average before.
    copies = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 1]])
    shares = split_quotas([[100, 100, 100, 80, 20]], copies[None], [1, 1, 1, 1])[0]
    assert shares.sum(axis=0).tolist() == [100, 100, 100, 100]
    assert shares[:3].tolist() == [[20, 80, 0, 0], [0, 20, 80, 0], [0, 0, 20, 80]]


def test_one_expert_with_all_tokens_is_shared_in_proportion_to_speed() -> None:
    shares = split_quotas([[1000, 0]], [[[1, 1, 1], [0, 1, 0]]], [500_000, 1_000_000, 1_000_000])
    assert shares[0].tolist() == [[200, 400, 400], [0, 0, 0]]


def test_a_slot_without_a_copy_takes_nothing_and_does_not_lower_the_average() -> None:
    copies = [[[1, 1, 0], [1, 1, 0], [1, 1, 0]]]
    assert split_quotas([[5, 5, 2]], copies, [1, 1, 1]).sum(axis=1).tolist() == [[6, 6, 0]]


def test_no_copy_is_needed_without_tokens() -> None:
    solver = QuotaSolver([[[1, 0], [0, 0]]], [1, 1])
    assert solver.split([[3, 0]]).tolist() == [[[3, 0], [0, 0]]]
    with pytest.raises(ValueError, match="expert 1 has 2 tokens and no copy; place one"):
        solver.split([[3, 2]])


def test_input_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"copies have shape \(1, 2\) and 2 slots"):
        QuotaSolver([[1, 1]], [1, 1])
    with pytest.raises(ValueError, match=r"copies must be 0 or 1.*speeds_ppm \(0\) must be at least 1"):
        QuotaSolver([[[2, 1]]], [1, 0])
    solver = QuotaSolver([[[1, 1]]], [1, 1])
    with pytest.raises(ValueError, match=r"counts\[0, 0\] \(-1\) must be at least 0"):
        solver.split([[-1]])
    with pytest.raises(ValueError, match=r"counts have shape \(1, 1\) of float64; they must be integers"):
        solver.split([[1.5]])
    with pytest.raises(ValueError, match=r"\[layers, experts\] = \[1, 1\]"):
        solver.split([[1, 2]])


def _pseudorandom(length: int, modulus: int) -> list[int]:
    """The same numbers wherever this runs: a linear congruential generator."""
    state, numbers = 12345, []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        numbers.append((state >> 33) % modulus)
    return numbers


def test_quotas_are_the_same_on_every_machine() -> None:
    # Only a change of the algorithm may change this digest; machines and versions of numpy may not.
    layers, experts, slots = 4, 40, 13
    copies = (np.array(_pseudorandom(layers * experts * slots, 6)) == 0).reshape(layers, experts, slots)
    copies[:, np.arange(experts), np.arange(experts) % slots] = True
    counts = np.array(_pseudorandom(layers * experts, 100_000)).reshape(layers, experts)
    speeds = [700_000 + 23_041 * slot for slot in range(slots)]
    shares = split_quotas(counts, copies, speeds)
    digest = hashlib.sha256(json.dumps(shares.tolist()).encode()).hexdigest()
    assert digest == "f8ff7323189a8c7e758c30cb82b97c568641518ee5f69a3b52788c247ba97563"


def test_quotas_of_the_next_window_balance_a_placement_for_this_one(data_dir: Path) -> None:
    windows = deepseek_prefill(data_dir)
    limits = SlotLimits.uniform(32, 9, slots_per_domain=8)
    balance = []
    for planned, then in pairwise(windows):
        solver = QuotaSolver(place_copies(ExpertLoads(mean=planned), limits), limits.speeds_ppm)
        tokens = solver.slot_tokens(then)
        balance.append(float((tokens.mean(axis=1) / tokens.max(axis=1)).mean()))
    assert len(balance) == 7
    assert np.mean(balance) >= 0.98
    assert min(balance) >= 0.92
