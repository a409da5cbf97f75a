import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.objective import check_cut, figures, layer_seconds, slot_seconds
from nep.planning.placement.problem import Problem
from tests.unit.planning.placement.cases import Case, cases, slow_slot_seconds


@st.composite
def any_cut(draw, case: Case):
    """Units anywhere, complete or not."""
    count = int(np.prod(case.shape))
    units = draw(st.lists(st.integers(0, case.size), min_size=count, max_size=count))
    return np.array(units, dtype=np.int64).reshape(case.shape)


@given(st.data())
def test_seconds_are_those_of_the_pieces(data):
    case = data.draw(cases())
    units = data.draw(any_cut(case))
    fast = slot_seconds(units, case.loads, case.cost, case.speeds)
    np.testing.assert_allclose(fast, slow_slot_seconds(case, units), rtol=1e-12, atol=0)
    np.testing.assert_array_equal(layer_seconds(units, case.loads, case.cost, case.speeds), fast.max(axis=1))


def test_what_a_piece_costs():
    cost = PlacementCost(token_s=2.0, row_s=3.0, piece_s=5.0, units_per_expert=4, tokens=10.0)
    loads = ExpertLoads(mean=np.array([[4.0, 1.0]]))  # 8 and 2 tokens
    units = np.array([[[3, 1], [0, 4]]])
    seconds = slot_seconds(units, loads, cost, (1.0, 0.5))
    assert seconds.tolist() == [[8 * 2 * 3 / 4 + 5 + 8 * 3, (8 * 2 / 4 + 2 * 2 + 5 + 5) / 0.5 + (8 + 2) * 3]]


def test_figures_of_a_cut_in_halves():
    loads = ExpertLoads(mean=np.array([[3.0, 1.0]]))
    halves = np.full((1, 2, 2), 2)
    whole = np.array([[[4, 0], [0, 4]]])
    cut, uncut = figures(halves, loads, (1, 1)), figures(whole, loads, (1, 1))
    assert (cut.balance, cut.rows, cut.busiest_rows, cut.memory, cut.pieces) == (1, 2, 2, 1, 4)
    assert (uncut.balance, uncut.rows, uncut.busiest_rows, uncut.memory, uncut.pieces) == (2 / 3, 1, 1.5, 1, 2)
    assert figures(whole, loads, (3, 1)).balance == 1


def test_a_wrong_cut_is_refused():
    cost = PlacementCost(token_s=1, row_s=0, piece_s=0, units_per_expert=4, tokens=1)
    problem = Problem.of(ExpertLoads.uniform(1, 2), speeds=(1, 1), cost=cost)
    with pytest.raises(ValueError, match=r"shape \(1, 2, 3\); loads and speeds make it \(1, 2, 2\)"):
        check_cut(problem, np.zeros((1, 2, 3), dtype=np.int64))
    with pytest.raises(ValueError, match="integers of at least 0"):
        check_cut(problem, np.full((1, 2, 2), -1))
    with pytest.raises(ValueError, match="integers of at least 0"):
        check_cut(problem, np.full((1, 2, 2), 2.0))
    with pytest.raises(ValueError, match="3 units of expert 1 in layer 0; it must place each of the 4 once"):
        check_cut(problem, np.array([[[4, 0], [1, 2]]]), complete=True)
    check_cut(problem, np.array([[[4, 0], [1, 3]]]), complete=True)
