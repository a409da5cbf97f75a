import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.problem import Problem, slot_seconds
from nep.planning.placement.spread import Portion, spread, spread_each
from nep.planning.placement.state import State
from tests.unit.planning.placement.cases import cases


def lowest_level(state: State, layer: int, expert: int, units: int) -> float:
    """Seconds that the busiest taker ends with if unit after unit goes where it ends first."""
    problem = state.problem
    held, seconds = state.held[layer].copy(), state.seconds[layer].copy()
    unit = problem.work_s[layer, expert] / problem.units_per_expert / problem.speeds
    fixed = problem.row_s[layer, expert] + problem.piece_s / problem.speeds
    room = state.room()[layer].copy()
    # A slot pays for the piece with its first unit, so what a level holds is counted, not grown unit by unit.
    new = np.where(held[:, expert] > 0, 0.0, fixed)
    levels = sorted(
        seconds[slot] + new[slot] + unit[slot] * count
        for slot in range(problem.num_slots)
        for count in range(1, room[slot] + 1)
    )
    for level in levels:
        fits = 0
        for slot in range(problem.num_slots):
            for count in range(room[slot], 0, -1):
                if seconds[slot] + new[slot] + unit[slot] * count <= level * (1 + 1e-12):
                    fits += count
                    break
        if fits >= units:
            return level
    raise AssertionError("no room")


@given(st.data())
def test_a_portion_goes_to_the_lowest_level_there_is(data):
    case = data.draw(cases(max_layers=2, max_units=5))
    problem = case.problem()
    problem = problem if problem.pool is None else problem.split(problem.limits)
    state = State.empty(problem)
    layers = np.arange(problem.num_layers)
    expert = data.draw(st.integers(0, problem.num_experts - 1))
    portion = Portion(
        layers=layers,
        experts=np.full_like(layers, expert),
        units=np.full_like(layers, case.size),
        max_units=np.full_like(layers, case.size),
    )
    levels = [lowest_level(state, layer, expert, case.size) for layer in layers]
    assert spread(state, portion, np.zeros(layers.size)).all()
    np.testing.assert_array_equal(state.held[:, :, expert].sum(axis=1), case.size)
    for layer, level in zip(layers, levels, strict=True):
        assert state.busiest_s()[layer] <= level * (1 + 1e-5) + 1e-12


@given(cases())
def test_everything_is_placed_within_memory_and_adds_up(case):
    problem = case.problem()
    state = State.empty(problem)
    whole = np.full(case.shape[:2], case.size)
    spread_each(state, whole, whole, np.zeros(case.shape[0]))
    assert (state.held.sum(axis=1) == case.size).all()
    assert (state.used <= problem.limits).all()
    if problem.pool is not None:
        assert (state.used.sum(axis=0) <= problem.pool).all()
    np.testing.assert_allclose(state.seconds, slot_seconds(problem, state.held), rtol=1e-9, atol=1e-300)


def problem_of(row_s: float, memory) -> Problem:
    cost = PlacementCost(token_s=1, row_s=row_s, piece_s=0, units_per_expert=10, tokens=10)
    return Problem.of(ExpertLoads.uniform(1, 1), speeds=(1, 1, 1, 1), cost=cost, memory_units=memory)


def spread_one(problem: Problem, level: float, max_units: int = 10) -> list[int]:
    state = State.empty(problem)
    spread_each(state, np.array([[10]]), np.array([[max_units]]), np.array([level]))
    return state.held[0, :, 0].tolist()


def test_free_rows_are_spread_and_dear_ones_are_not():
    assert sorted(spread_one(problem_of(0.0, None), 0.0)) == [1, 3, 3, 3]
    assert spread_one(problem_of(0.0, None), 6.0) == [6, 4, 0, 0]
    assert spread_one(problem_of(0.0, None), 10.0) == [10, 0, 0, 0]


def test_at_most_so_many_units_to_a_slot_while_memory_lets_the_others_take_the_rest():
    assert spread_one(problem_of(0.0, None), 10.0, max_units=5) == [5, 5, 0, 0]
    assert spread_one(problem_of(0.0, [[10, 2, 0, 0]]), 10.0, max_units=5) == [10, 0, 0, 0]


def test_no_room_is_an_error():
    problem = problem_of(0.0, [[10, 0, 0, 0]])
    state = State.empty(problem)
    state.add(*(np.array([number]) for number in (0, 0, 0, 4)))
    with pytest.raises(RuntimeError, match="layer 0: 10 units of expert 0 do not fit into the 6 units"):
        spread_each(state, np.array([[10]]), np.array([[10]]), np.zeros(1))
