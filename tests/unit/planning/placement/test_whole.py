import numpy as np
from hypothesis import given

from nep.planning.placement.problem import slot_seconds
from nep.planning.placement.state import State
from nep.planning.placement.whole import fill_whole, plain_whole
from tests.unit.planning.placement.cases import cases, slow_longest_first


@given(cases())
def test_the_plain_rule_is_the_slow_one(case):
    problem = case.problem()
    state, complete = plain_whole(problem)
    for layer in range(case.shape[0]):
        slots = slow_longest_first(case, layer, problem.limits[layer] // case.size)
        assert complete[layer] == (slots is not None)
        if slots is not None:
            expected = np.zeros((case.shape[2], case.shape[1]), dtype=np.int64)
            expected[slots, np.arange(case.shape[1])] = case.size
            np.testing.assert_array_equal(state.held[layer], expected)


@given(cases())
def test_the_state_adds_up(case):
    problem = case.problem()
    state, _ = plain_whole(problem)
    np.testing.assert_allclose(state.seconds, slot_seconds(problem, state.held), rtol=1e-9, atol=1e-300)
    np.testing.assert_array_equal(state.used, state.held.sum(axis=2))
    assert (state.used <= problem.limits).all()


@given(cases())
def test_only_what_is_wanted_is_placed(case):
    problem = case.problem()
    wanted = np.zeros(case.shape[:2], dtype=bool)
    wanted[0, 0] = wanted[-1, -1] = True
    state = State.empty(problem)
    left = fill_whole(state, wanted)
    assert not left[~wanted].any()
    np.testing.assert_array_equal(state.held.sum(axis=1), case.size * (wanted & ~left))
