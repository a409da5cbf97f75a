import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.bounds import BINDING_WORDS, binding_counts, lower_bound, pieces_needed
from nep.planning.placement.objective import layer_seconds
from nep.planning.placement.problem import Problem
from tests.unit.planning.placement.cases import Case, cases


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to share units over slots."""
    if parts == 1:
        return [(total,)]
    return [(first, *rest) for first in range(total + 1) for rest in compositions(total - first, parts - 1)]


def best_of_all(case: Case) -> float:
    """Seconds of the best cut of a one-layer problem, found by trying all of them."""
    _, experts, slots = case.shape
    best = math.inf
    limits = case.problem().limits[0]
    for rows in itertools.product(compositions(case.size, slots), repeat=experts):
        units = np.array([rows])
        if (units.sum(axis=1)[0] <= limits).all():
            best = min(best, float(layer_seconds(units, case.loads, case.cost, case.speeds)[0]))
    return best


@settings(max_examples=150)
@given(cases(max_layers=1, max_experts=3, max_slots=3, max_units=3))
def test_nothing_is_faster_than_the_bound(case):
    bound = lower_bound(case.problem())
    assert bound.seconds[0] <= best_of_all(case) * (1 + 1e-6)


@given(cases())
def test_the_bound_is_the_largest_of_its_parts_and_names_it(case):
    bound = lower_bound(case.problem())
    table = np.stack(list(bound.parts.values()))
    np.testing.assert_array_equal(bound.seconds, table.max(axis=0))
    for layer, name in enumerate(bound.binds):
        assert bound.parts[name][layer] >= bound.seconds[layer] * (1 - 1e-8)
    assert sum(binding_counts(bound).values()) == case.shape[0]
    assert set(bound.binds) <= set(BINDING_WORDS)


def problem_of(mean, speeds, *, size=1, row_s=0.0, piece_s=0.0, memory=None) -> Problem:
    mean = np.array([mean], dtype=float)
    cost = PlacementCost(token_s=1.0, row_s=row_s, piece_s=piece_s, units_per_expert=size, tokens=float(mean.sum()))
    return Problem.of(ExpertLoads(mean=mean), speeds=speeds, cost=cost, memory_units=memory)


def test_work_binds_where_units_are_fine():
    bound = lower_bound(problem_of([1, 2, 3], (1, 1, 0.5), size=1000))
    assert bound.seconds[0] == pytest.approx(6 / 2.5, rel=1e-3)
    assert bound.binds == ("work",)


def test_rows_and_pieces_count_as_work():
    bound = lower_bound(problem_of([3, 3], (1, 1), size=10, row_s=0.5, piece_s=2))
    assert bound.seconds[0] == pytest.approx(3 * 1.5 + 2)


def test_unit_size_binds_where_units_do_not_divide():
    # 3 equal whole experts on 2 slots: one has two.
    bound = lower_bound(problem_of([1, 1, 1], (1, 1)))
    assert bound.seconds[0] == pytest.approx(2, rel=1e-6)
    assert bound.binds == ("unit size",)


def test_memory_binds_where_a_fast_slot_is_small():
    # The fast slot can hold one of four equal experts, so three are left for the slow one.
    bound = lower_bound(problem_of([1, 1, 1, 1], (3, 1), size=8, memory=[[8, 32]]))
    assert bound.seconds[0] == pytest.approx(3)
    assert bound.binds == ("memory",)


def test_a_hot_expert_binds_where_rows_are_dear():
    # Whole it takes 10 + 10 on one of the two slots; in two pieces 5 + 10 on both, and the cold one beside it.
    bound = lower_bound(problem_of([10, 0.5], (1, 1), size=10, row_s=1.0))
    assert bound.binds == ("hot expert",)
    assert bound.seconds[0] > 10.5


def test_pieces_that_a_deadline_forces():
    problem = problem_of([8, 4, 1], (1, 1, 1), size=8)
    assert pieces_needed(problem, np.array([4.0])).tolist() == [[2, 1, 1]]
    assert pieces_needed(problem, np.array([3.0])).tolist() == [[3, 2, 1]]
    # Not even one unit of the hottest: more pieces than there are units.
    assert pieces_needed(problem, np.array([0.9])).tolist()[0][0] == 9


def test_slots_without_memory_do_not_count():
    with_it = lower_bound(problem_of([1, 2, 3], (1, 1, 1), size=10, memory=[[60, 60, 0]]))
    without = lower_bound(problem_of([1, 2, 3], (1, 1), size=10))
    np.testing.assert_allclose(with_it.seconds, without.seconds)
