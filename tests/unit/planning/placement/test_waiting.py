from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.objective import slot_seconds
from nep.planning.placement.place import place
from nep.planning.placement.repair import repair
from nep.planning.placement.waiting import least_waiting, waited_seconds
from nep.planning.placement.warm import warm
from tests.unit.planning.placement.cases import Case, cases, check_complete, check_memory, slow_slot_seconds


def slow_waited_seconds(case: Case, units: np.ndarray) -> np.ndarray:
    """The busiest slot by rows alone and the busiest by all else, each layer."""
    free_rows = replace(case, cost=replace(case.cost, row_s=0.0))
    only_rows = replace(case, cost=replace(case.cost, token_s=0.0, piece_s=0.0))
    return slow_slot_seconds(free_rows, units).max(axis=1) + slow_slot_seconds(only_rows, units).max(axis=1)


@settings(max_examples=40)
@given(cases())
def test_the_cut_that_waits_least_is_taken_and_never_waits_longer_than_the_plain_one(case):
    def at(price: PlacementCost) -> np.ndarray:
        return place(case.loads, speeds=case.speeds, cost=price, memory_units=case.memory_units).units

    apart = case.memory_units is None or case.memory_units.ndim == 2
    units = least_waiting(at, case.loads, case.speeds, case.cost, mix=apart)
    check_complete(case, units)
    check_memory(case, units)
    waited = waited_seconds(units, case.loads, case.cost, case.speeds)
    np.testing.assert_allclose(waited, slow_waited_seconds(case, units), rtol=1e-9)
    plain = waited_seconds(at(case.cost), case.loads, case.cost, case.speeds)
    assert waited.sum() <= plain.sum() * (1 + 1e-9)
    if apart:
        assert (waited <= plain * (1 + 1e-9)).all()
    # Waiting for rows and for products apart takes at least as long as for the slot that has most of both.
    assert (waited >= slot_seconds(units, case.loads, case.cost, case.speeds).max(axis=1) * (1 - 1e-9)).all()


@settings(max_examples=40)
@given(cases(), st.sampled_from((0.0, 0.01, 1e6)))
def test_a_change_has_to_gain_what_its_journey_costs(case, unit_s):
    before = place(case.loads, **case.keywords()).units
    loads = ExpertLoads(mean=np.roll(case.loads.mean, 1, axis=1))
    keywords = {"speeds": case.speeds, "memory_units": case.memory_units, "unit_s": unit_s}
    after = least_waiting(
        lambda price: warm(before, loads, cost=price, **keywords).units,
        loads,
        case.speeds,
        case.cost,
        before=before,
        unit_s=unit_s,
    )
    was, now = (waited_seconds(units, loads, case.cost, case.speeds).sum() for units in (before, after))
    assert was - now >= unit_s * np.maximum(after - before, 0).sum() - 1e-9 * was


def test_rows_that_others_wait_for_anyway_are_free():
    # Sixteen halves of eight experts, one lost: its other half has the rows already, so placement gives it all of it
    # and doubles its work. Once one slot has rows of two experts all may have them, and the work is level.
    cost = PlacementCost(token_s=1.0, row_s=0.5, piece_s=0.0, units_per_expert=112, tokens=8.0)
    units = np.zeros((1, 8, 16), dtype=np.int64)
    units[0, np.arange(16) // 2, np.arange(16)] = 56
    units = units[:, :, 1:]
    loads = ExpertLoads.uniform(1, 8)
    speeds = [1.0] * 15

    def at(price: PlacementCost) -> np.ndarray:
        return repair(units, (), loads, speeds=speeds, cost=price).units

    plain, level = at(cost), least_waiting(at, loads, speeds, cost, mix=True)
    assert waited_seconds(plain, loads, cost, speeds)[0] > 1.35
    assert waited_seconds(level, loads, cost, speeds)[0] < 1.05 * (8 / 15 + 2 * 0.5)
    assert (level >= units).all()
