import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.descent import descend
from nep.planning.placement.moves import Rules
from nep.planning.placement.problem import Problem, slot_seconds
from nep.planning.placement.spread import spread_each
from nep.planning.placement.state import State
from tests.unit.planning.placement.cases import cases

RULES = st.builds(
    Rules,
    cut=st.booleans(),
    per_unit=st.booleans(),
    thrift=st.sampled_from((0.0, 0.2, 1.0)),
    steps=st.just(20),
)


@st.composite
def started(draw):
    """A problem in which everything is placed somehow."""
    case = draw(cases())
    problem = case.problem()
    problem = problem if problem.pool is None else problem.split(problem.limits)
    problem = problem.guided() if draw(st.booleans()) else problem
    state = State.empty(problem)
    whole = np.full(case.shape[:2], case.size)
    spread_each(state, whole, whole, np.full(case.shape[0], draw(st.sampled_from((0.0, 1e9)))))
    return state


@given(started(), RULES)
def test_the_busiest_slot_never_gets_busier_and_limits_hold(state, rules):
    before = state.busiest_s()
    held = state.held.sum(axis=1)
    descend(state, np.arange(state.problem.num_layers), rules)
    assert (state.busiest_s() <= before * (1 + 1e-9)).all()
    assert (state.held >= 0).all()
    np.testing.assert_array_equal(state.held.sum(axis=1), held)
    np.testing.assert_array_equal(state.used, state.held.sum(axis=2))
    assert (state.used <= state.problem.limits).all()
    scale = max(before.max(), 1e-300)
    np.testing.assert_allclose(state.seconds, slot_seconds(state.problem, state.held), rtol=1e-6, atol=1e-9 * scale)


@given(started())
def test_whole_pieces_stay_whole(state):
    pieces = np.sort(state.held, axis=1)
    descend(state, np.arange(state.problem.num_layers), Rules(cut=False, steps=20))
    # A piece may join another one of the same expert, but never falls apart.
    assert ((state.held > 0).sum(axis=1) <= (pieces > 0).sum(axis=1)).all()


@given(started(), st.data())
def test_what_is_fixed_stays(state, data):
    kept = state.held // data.draw(st.integers(1, 3))
    state.fixed = kept
    descend(state, np.arange(state.problem.num_layers), Rules(steps=20))
    assert (state.held >= kept).all()


@given(started())
def test_layers_that_are_not_asked_for_stay(state):
    before = state.held.copy()
    descend(state, np.arange(state.problem.num_layers)[1:], Rules(steps=20))
    np.testing.assert_array_equal(state.held[0], before[0])


def two_slots(held, memory=None, row_s=0.0) -> State:
    cost = PlacementCost(token_s=1, row_s=row_s, piece_s=0, units_per_expert=10, tokens=10)
    loads = ExpertLoads(mean=np.array([[4.0, 3.0, 2.0, 1.0]]))
    problem = Problem.of(loads, speeds=(1, 1), cost=cost, memory_units=memory)
    return State.of(problem, 10 * np.array([held]))


def test_a_move_a_cut_and_a_swap():
    move = two_slots([[1, 1, 0, 1], [0, 0, 1, 0]])
    descend(move, np.array([0]), Rules(cut=False))
    assert move.seconds.tolist() == [[5, 5]] or sorted(move.seconds[0]) == [4, 6]
    cut = two_slots([[1, 1, 0, 1], [0, 0, 1, 0]])
    descend(cut, np.array([0]), Rules())
    np.testing.assert_allclose(cut.seconds, [[5, 5]])
    swap = two_slots([[1, 1, 0, 0], [0, 0, 1, 1]], memory=[[20, 20]])
    descend(swap, np.array([0]), Rules(cut=False))
    np.testing.assert_allclose(swap.seconds, [[5, 5]])
    assert (swap.used == 20).all()


def test_a_level_is_enough():
    state = two_slots([[1, 1, 1, 1], [0, 0, 0, 0]])
    descend(state, np.array([0]), Rules(), np.array([8.0]))
    assert 5.5 <= state.busiest_s()[0] <= 8.01


def test_dear_rows_are_not_cut_for():
    state = two_slots([[1, 0, 0, 1], [0, 1, 1, 0]], row_s=2.0)
    descend(state, np.array([0]), Rules())
    assert ((state.held > 0).sum(axis=1) == 1).all()
