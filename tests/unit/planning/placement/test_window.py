import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.bounds import lower_bound
from nep.planning.placement.problem import Problem
from nep.planning.placement.window import window_cut
from tests.unit.planning.placement.cases import cases


@given(cases(max_units=40))
def test_every_unit_once_and_within_limits(case):
    problem = case.problem()
    problem = problem if problem.pool is None else problem.split(problem.limits)
    state = window_cut(problem)
    assert (state.held >= 0).all()
    assert (state.held.sum(axis=1) == case.size).all()
    assert (state.used <= problem.limits).all()
    # Every slot but the last takes one window, whose ends are at most two more pieces.
    assert ((state.held > 0).sum(axis=(1, 2)) <= case.shape[1] + 2 * (case.shape[2] - 1)).all()


def linear_program(problem: Problem) -> float:
    """Seconds of the best cut if experts could be cut anywhere and only arithmetic counted."""
    from scipy.optimize import linprog

    experts, slots = problem.num_experts, problem.num_slots
    count = experts * slots
    objective = np.zeros(count + 1)
    objective[-1] = 1
    whole = np.zeros((experts, count + 1))
    upper = np.zeros((2 * slots, count + 1))
    for expert in range(experts):
        whole[expert, expert * slots : (expert + 1) * slots] = 1
        for slot in range(slots):
            upper[slot, expert * slots + slot] = problem.work_s[0, expert] / problem.speeds[slot]
            upper[slots + slot, expert * slots + slot] = problem.units_per_expert
    upper[:slots, -1] = -1
    right = np.concatenate([np.zeros(slots), problem.limits[0]])
    found = linprog(objective, A_ub=upper, b_ub=right, A_eq=whole, b_eq=np.ones(experts), method="highs")
    assert found.status == 0
    return float(found.fun)


@st.composite
def fine_problems(draw):
    """One layer, experts of a thousand units, unequal speeds and memory, tight or not."""
    experts, slots = draw(st.integers(1, 10)), draw(st.integers(1, 6))
    generator = np.random.default_rng(draw(st.integers(0, 10_000)))
    loads = generator.lognormal(0, draw(st.sampled_from((0.0, 0.5, 1.5))), experts)
    loads[1:] *= generator.random(experts - 1) > 0.1
    memory = generator.uniform(0.3, 1, slots)
    memory *= draw(st.sampled_from((1.0, 1.02, 1.2, 2.0))) * experts * 1000 / memory.sum()
    speeds = np.ones(slots) if draw(st.booleans()) else generator.uniform(0.3, 1, slots)
    cost = PlacementCost(token_s=1, row_s=0, piece_s=0, units_per_expert=1000, tokens=1)
    limits = np.ceil(memory).astype(np.int64)[None]
    return Problem.of(ExpertLoads(mean=loads[None]), speeds=speeds, cost=cost, memory_units=limits)


@settings(max_examples=100)
@given(fine_problems())
def test_it_is_the_optimum_of_the_linear_program_up_to_a_unit(problem):
    optimum = linear_program(problem)
    unit = problem.work_s.max() / problem.units_per_expert / problem.speeds.min()
    assert window_cut(problem).busiest_s()[0] <= optimum + 2 * unit
    bound = lower_bound(problem)
    assert max(bound.parts["work"][0], bound.parts["memory"][0]) == pytest.approx(optimum, rel=1e-6)


def test_exact_shares_of_load_and_memory():
    generator = np.random.default_rng(0)
    loads = ExpertLoads(mean=generator.lognormal(0, 0.8, (5, 64)))
    cost = PlacementCost(token_s=1, row_s=0, piece_s=0, units_per_expert=1000, tokens=1)
    limits = np.full((5, 8), 8000)
    state = window_cut(Problem.of(loads, speeds=np.ones(8), cost=cost, memory_units=limits))
    assert (state.used == 8000).all()
    np.testing.assert_allclose(state.seconds, 1 / 8, rtol=2e-3)
