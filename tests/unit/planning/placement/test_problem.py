import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.pool import relabel, split_pool
from nep.planning.placement.problem import Problem
from tests.unit.planning.placement.cases import cases

COST = PlacementCost(token_s=1, row_s=0.5, piece_s=0, units_per_expert=4, tokens=10)
LOADS = ExpertLoads(mean=np.array([[3.0, 1.0], [0.0, 0.0]]))


def test_prices():
    problem = Problem.of(LOADS, speeds=(1, 2), cost=COST)
    np.testing.assert_allclose(problem.tokens, [[7.5, 2.5], [5, 5]])
    np.testing.assert_allclose(problem.work_s, problem.tokens)
    np.testing.assert_allclose(problem.row_s, 0.5 * problem.tokens)
    assert problem.limits.tolist() == [[8, 8], [8, 8]]
    assert problem.usable.all()


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"speeds": ()}, r"speeds have shape \(0,\)"),
        ({"speeds": [[1, 1]]}, r"speeds have shape \(1, 2\)"),
        ({"speeds": (1, 0)}, r"speeds\[1\] \(0.0\) must be finite and above 0; leave a dead slot out"),
        ({"speeds": (1, np.nan)}, r"speeds\[1\] \(nan\)"),
        ({"memory_units": (8, 7)}, r"memory_units \(together 15\) cannot hold 2 layers of 8 units"),
        ({"memory_units": [[8, 0], [4, 3]]}, r"memory_units\[1\] \(together 7\) cannot hold a layer of 8 units"),
        ({"memory_units": (8, 7, 9)}, r"shape \(3,\); they must be \[slots\] \(2\)"),
        ({"memory_units": (8.0, 8.0)}, "float64; they must be whole units, so round down"),
        ({"memory_units": (-1, 99)}, r"memory_units \(-1\) must be at least 0"),
    ],
)
def test_wrong_input_is_refused(changed, match):
    with pytest.raises(ValueError, match=match):
        Problem.of(LOADS, **{"speeds": (1, 1), "cost": COST, **changed})


def test_memory_of_both_kinds():
    pooled = Problem.of(LOADS, speeds=(1, 1, 1), cost=COST, memory_units=(16, 5, 0))
    assert pooled.limits.tolist() == [[8, 5, 0]] * 2
    assert pooled.usable.tolist() == [True, True, False]
    by_layer = Problem.of(LOADS, speeds=(1, 1), cost=COST, memory_units=[[99, 0], [3, 5]])
    assert by_layer.pool is None
    assert by_layer.limits.tolist() == [[8, 0], [3, 5]]


def test_without_some_slots():
    problem = Problem.of(LOADS, speeds=(1, 1, 1), cost=COST, memory_units=(8, 8, 8))
    rest = problem.without(np.array([1]))
    assert rest.usable.tolist() == [True, False, True]
    assert rest.pool.tolist() == [8, 0, 8]
    with pytest.raises(ValueError, match="together 8"):
        problem.without(np.array([1, 2]))


@given(cases())
def test_guided_prices_make_every_unit_weigh_something(case):
    problem = case.problem()
    guided = problem.guided()
    assert guided.work_s.any()
    assert (guided.work_s >= problem.work_s).all()
    assert (guided.row_s >= problem.row_s).all()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 9))
def test_a_split_pool_gives_every_layer_its_part(pool, num_layers):
    pool = np.array(pool)
    limits = split_pool(pool, num_layers)
    np.testing.assert_array_equal(limits.sum(axis=0), pool)
    assert limits.max(initial=0) <= -(-pool.max() // num_layers)
    assert (limits.sum(axis=1) >= pool.sum() // num_layers).all()


@given(st.data())
def test_relabelling_exchanges_slots_of_one_speed_only(data):
    layers, slots = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    count = layers * slots
    used = np.array(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))).reshape(layers, slots)
    speeds = np.array(data.draw(st.lists(st.sampled_from((1.0, 0.7)), min_size=slots, max_size=slots)))
    source = relabel(used, np.full(slots, 99), speeds)
    for row in source:
        assert sorted(row) == list(range(slots))
        np.testing.assert_array_equal(speeds[row], speeds)


def test_relabelling_evens_memory_out():
    generator = np.random.default_rng(0)
    used = generator.integers(4, 12, size=(58, 32))
    source = relabel(used, np.full(32, 1000), np.ones(32))
    totals = np.take_along_axis(used, source, axis=1).sum(axis=0)
    assert used.sum(axis=0).max() - used.sum(axis=0).min() > 30
    assert totals.max() - totals.min() <= 8
