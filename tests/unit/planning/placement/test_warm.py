import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.objective import layer_seconds
from nep.planning.placement.place import place
from nep.planning.placement.warm import warm
from tests.unit.planning.placement.cases import LOADS, cases, check_complete, check_memory


@settings(max_examples=150)
@given(cases(), st.data())
def test_a_change_fits_pays_and_keeps_to_its_budget(case, data):
    layers, experts, _ = case.shape
    before = place(case.loads, **case.keywords()).units
    count = layers * experts
    mean = np.array(data.draw(st.lists(LOADS, min_size=count, max_size=count))).reshape(layers, experts)
    loads = ExpertLoads(mean=mean)
    budget = data.draw(st.none() | st.integers(0, layers * experts * case.size))
    price = data.draw(st.sampled_from((0.0, 0.01, 10.0)))
    keywords = {**case.keywords(), "budget_units": budget, "unit_s": price}
    change = warm(before, loads, **keywords)
    check_complete(case, change.units)
    check_memory(case, change.units)
    received = int(np.maximum(change.units - before, 0).sum())
    assert change.moved_units == received <= (layers * experts * case.size if budget is None else budget)
    np.testing.assert_allclose(change.before_s, layer_seconds(before, loads, case.cost, case.speeds), rtol=1e-9)
    np.testing.assert_allclose(change.seconds, layer_seconds(change.units, loads, case.cost, case.speeds), rtol=1e-9)
    gain = change.before_s.sum() - change.total_s
    assert gain >= price * change.moved_units - 1e-9 * change.before_s.sum()
    again = warm(before, loads, **keywords)
    np.testing.assert_array_equal(change.units, again.units)


def drifted():
    generator = np.random.default_rng(0)
    state = generator.normal(size=(6, 64))
    cost = PlacementCost(token_s=1, row_s=0.05, piece_s=0, units_per_expert=16, tokens=64)
    before = place(ExpertLoads(mean=np.exp(0.8 * state)), speeds=np.ones(8), cost=cost).units
    state = 0.95 * state + 0.3 * generator.normal(size=state.shape)
    return before, ExpertLoads(mean=np.exp(0.8 * state)), cost


def test_a_few_units_do_most():
    before, loads, cost = drifted()
    keywords = {"speeds": np.ones(8), "cost": cost}
    total = before.sum()
    little = warm(before, loads, **keywords, budget_units=total // 100)
    plenty = warm(before, loads, **keywords)
    best = place(loads, **keywords).total_s
    assert 0 < little.moved_units <= total // 100
    assert little.note == "the budget is spent"
    assert plenty.total_s <= little.total_s < little.before_s.sum()
    # One per cent of the units makes up for half of what the drift cost.
    assert little.total_s - best < 0.5 * (little.before_s.sum() - best)
    assert plenty.total_s < 1.02 * best


def test_a_price_is_paid_only_by_what_gains_as_much():
    before, loads, cost = drifted()
    keywords = {"speeds": np.ones(8), "cost": cost}
    free, dear = warm(before, loads, **keywords), warm(before, loads, **keywords, unit_s=0.01)
    assert 0 < dear.moved_units < free.moved_units
    nothing = warm(before, loads, **keywords, unit_s=1e6)
    assert nothing.moved_units == 0
    assert nothing.note == "nothing more pays"
    np.testing.assert_array_equal(nothing.units, before)


def test_a_level_placement_stays():
    cost = PlacementCost(token_s=1, row_s=0.05, piece_s=0, units_per_expert=16, tokens=64)
    even = np.zeros((1, 8, 4), dtype=np.int64)
    even[0, np.arange(8), np.arange(8) // 2] = 16
    change = warm(even, ExpertLoads.uniform(1, 8), speeds=np.ones(4), cost=cost)
    assert change.moved_units == 0


def test_new_slots_are_given_something():
    cost = PlacementCost(token_s=1, row_s=0.05, piece_s=0, units_per_expert=16, tokens=64)
    before = np.zeros((2, 16, 4), dtype=np.int64)
    before[:, np.arange(16), np.arange(16) % 3] = 16
    change = warm(before, ExpertLoads.uniform(2, 16), speeds=np.ones(4), cost=cost)
    assert change.units[:, :, 3].sum(axis=1).min() >= 48
    assert change.total_s < 0.8 * change.before_s.sum()


def test_a_pool_is_not_overdrawn_by_layers_that_all_want_the_last_of_it():
    cost = PlacementCost(token_s=1, row_s=0.0, piece_s=0, units_per_expert=4, tokens=8)
    before = np.zeros((4, 4, 2), dtype=np.int64)
    before[:, :, 0] = 4
    memory = np.array([64, 6])
    change = warm(before, ExpertLoads.uniform(4, 4), speeds=(1, 1), cost=cost, memory_units=memory)
    assert change.units.sum(axis=(0, 1)).tolist() == [58, 6] or change.units[:, :, 1].sum() <= 6
    assert change.moved_units > 0


def test_an_incomplete_cut_is_for_repair():
    cost = PlacementCost(token_s=1, row_s=0.0, piece_s=0, units_per_expert=4, tokens=8)
    with pytest.raises(ValueError, match="must place each of the 4 once"):
        warm(np.array([[[3, 0]]]), ExpertLoads.uniform(1, 1), speeds=(1, 1), cost=cost)
