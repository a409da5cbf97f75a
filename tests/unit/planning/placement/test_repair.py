import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.place import place
from nep.planning.placement.repair import repair
from tests.unit.planning.placement.cases import Case, cases, check_complete, check_memory


def memory_suffices(case: Case, slots: list[int]) -> bool:
    """Whether these slots alone can hold the experts."""
    layers, experts, _ = case.shape
    if case.memory_units is None:
        return True
    room = case.memory_units[..., slots].sum(axis=-1)
    return bool((room >= experts * case.size * (layers if room.ndim == 0 else 1)).all())


@settings(max_examples=150)
@given(cases(max_slots=6), st.data())
def test_what_was_lost_moves_and_nothing_else(case, data):
    slots = case.shape[2]
    assume(slots > 1)
    placed = place(case.loads, **case.keywords()).units
    lost = data.draw(st.lists(st.integers(0, slots - 1), min_size=1, max_size=slots - 1, unique=True))
    left = [slot for slot in range(slots) if slot not in lost]
    quick = data.draw(st.booleans())
    if not memory_suffices(case, left):
        with pytest.raises(ValueError, match="cannot hold"):
            repair(placed, lost, case.loads, **case.keywords(), quick=quick)
        return
    change = repair(placed, lost, case.loads, **case.keywords(), quick=quick)
    check_complete(case, change.units)
    check_memory(case, change.units)
    assert change.units[:, :, lost].sum() == 0
    assert (change.units[:, :, left] >= placed[:, :, left]).all()
    assert change.lost_units == change.moved_units == placed[:, :, lost].sum()
    assert (change.seconds >= change.bound.seconds * (1 - 1e-6)).all()
    again = repair(placed, lost, case.loads, **case.keywords(), quick=quick)
    np.testing.assert_array_equal(change.units, again.units)


@settings(max_examples=60)
@given(cases(max_slots=6), st.data())
def test_extra_moves_stay_within_their_number_and_pay(case, data):
    slots = case.shape[2]
    assume(slots > 1)
    placed = place(case.loads, **case.keywords()).units
    lost = [data.draw(st.integers(0, slots - 1))]
    extra = data.draw(st.integers(0, 10))
    assume(memory_suffices(case, [slot for slot in range(slots) if slot not in lost]))
    least = repair(placed, lost, case.loads, **case.keywords())
    more = repair(placed, lost, case.loads, **case.keywords(), extra_units=extra)
    check_complete(case, more.units)
    check_memory(case, more.units)
    assert more.total_s <= least.total_s * (1 + 1e-9)
    received = np.maximum(more.units - np.where(np.isin(np.arange(slots), lost), 0, placed), 0).sum()
    assert received == more.moved_units <= least.moved_units + extra


def test_one_of_eight():
    loads = ExpertLoads(mean=np.random.default_rng(0).lognormal(0, 0.2, (4, 8)))
    cost = PlacementCost(token_s=1, row_s=0.02, piece_s=0, units_per_expert=112, tokens=8)
    whole = np.zeros((4, 8, 8), dtype=np.int64)
    whole[:, np.arange(8), np.arange(8)] = 112
    change = repair(whole, [3], loads, speeds=np.ones(8), cost=cost)
    assert change.moved_units == 4 * 112
    assert np.isinf(change.before_s).all()
    uncut = np.sort(loads.normalised().mean, axis=1)[:, :2].sum(axis=1) * 8
    # Whole on one survivor the lost expert would nearly double the time.
    assert (change.seconds < 0.85 * uncut).all()


def test_missing_units_are_placed_whoever_held_them():
    cost = PlacementCost(token_s=1, row_s=0.1, piece_s=0, units_per_expert=4, tokens=8)
    units = np.array([[[4, 0], [0, 1]]])
    change = repair(units, (), ExpertLoads.uniform(1, 2), speeds=(1, 1), cost=cost)
    assert change.units.sum(axis=2).tolist() == [[4, 4]]
    assert change.lost_units == 3


def test_survivors_over_their_memory_keep_what_they_have():
    cost = PlacementCost(token_s=1, row_s=0.1, piece_s=0, units_per_expert=4, tokens=8)
    units = np.array([[[4, 0, 0], [4, 0, 0], [0, 2, 2]]])
    change = repair(units, [2], ExpertLoads.uniform(1, 3), speeds=(1, 1, 1), cost=cost, memory_units=[[4, 8, 4]])
    assert change.units.tolist() == [[[4, 0, 0], [4, 0, 0], [0, 4, 0]]]


def test_what_cannot_be_repaired():
    cost = PlacementCost(token_s=1, row_s=0.1, piece_s=0, units_per_expert=4, tokens=8)
    units = np.array([[[4, 0], [0, 4]]])
    keywords = {"speeds": (1, 1), "cost": cost}
    with pytest.raises(ValueError, match="all 2 slots are lost; restart from a checkpoint"):
        repair(units, [0, 1], ExpertLoads.uniform(1, 2), **keywords)
    with pytest.raises(ValueError, match=r"lost slots \[2\] must be of the 2 slots"):
        repair(units, [2], ExpertLoads.uniform(1, 2), **keywords)
    with pytest.raises(ValueError, match=r"together 6\) cannot hold"):
        repair(units, [1], ExpertLoads.uniform(1, 2), **keywords, memory_units=[[6, 6]])
    with pytest.raises(ValueError, match="more units of an expert than there are"):
        repair(units + 1, [1], ExpertLoads.uniform(1, 2), **keywords)


def line_cut(slots: int) -> tuple[ExpertLoads, PlacementCost, np.ndarray]:
    """256 experts of 2,048 units, cut by the line over slots that divide them."""
    cost = PlacementCost(token_s=1, row_s=0.02, piece_s=0, units_per_expert=2048, tokens=256)
    each = 256 * 2048 // slots
    units = np.zeros((1, slots, 256), dtype=np.int64)
    units[0, np.arange(slots), np.arange(slots) * each // 2048] = each
    loads = ExpertLoads(mean=np.random.default_rng(0).lognormal(0, 0.5, (1, 256)))
    return loads, cost, np.swapaxes(units, 1, 2)


def test_the_order_of_growth():
    # Four times the slots, and of the lost ones; sixteen times the seconds would be a quadratic planner.
    seconds = []
    for slots in (4096, 16_384):
        loads, cost, units = line_cut(slots)
        lost = np.random.default_rng(1).choice(slots, slots // 16, replace=False)
        times = []
        for _ in range(3):
            begin = time.process_time()
            change = repair(units, lost, loads, speeds=np.ones(slots), cost=cost)
            times.append(time.process_time() - begin)
        assert change.moved_units == units[:, :, lost].sum()
        seconds.append(min(times))
    assert seconds[1] < 10 * seconds[0]
