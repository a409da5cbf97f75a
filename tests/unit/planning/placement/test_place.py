from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.objective import figures, layer_seconds
from nep.planning.placement.place import place
from nep.planning.placement.pool import split_pool
from tests.unit.planning.placement.cases import (
    Case,
    cases,
    check_complete,
    check_memory,
    slow_longest_first,
    slow_slot_seconds,
)


def plain_seconds(case: Case) -> float:
    """Seconds of the plain whole-expert placement, infinite if memory cannot hold it."""
    layers, experts, slots = case.shape
    memory = case.memory_units
    if memory is None:
        memory = np.full((layers, slots), experts * case.size)
    elif memory.ndim == 1:
        memory = split_pool(memory, layers)
    units = np.zeros(case.shape, dtype=np.int64)
    for layer in range(layers):
        found = slow_longest_first(case, layer, memory[layer] // case.size)
        if found is None:
            return float("inf")
        units[layer, np.arange(experts), found] = case.size
    return float(slow_slot_seconds(case, units).max(axis=1).sum())


def fits_whole(case: Case) -> bool:
    """Whether memory, a pool or not, holds every expert whole."""
    layers, experts, _ = case.shape
    places = case.memory_units // case.size
    if places.ndim == 1:
        return int(places.sum()) >= layers * experts
    return bool((places.sum(axis=1) >= experts).all())


@settings(max_examples=200)
@given(cases())
def test_a_placement_is_complete_fits_and_is_never_worse_than_the_plain_one(case):
    placed = place(case.loads, **case.keywords())
    check_complete(case, placed.units)
    check_memory(case, placed.units)
    np.testing.assert_allclose(
        placed.seconds, layer_seconds(placed.units, case.loads, case.cost, case.speeds), rtol=1e-9
    )
    assert placed.total_s <= plain_seconds(case) * (1 + 1e-6)
    assert (placed.seconds >= placed.bound.seconds * (1 - 1e-6)).all()
    again = place(case.loads, **case.keywords())
    np.testing.assert_array_equal(placed.units, again.units)
    assert placed.considered == again.considered


@settings(max_examples=100)
@given(cases())
def test_whole_experts_are_whole(case):
    if plain_seconds(case) == float("inf") and not fits_whole(case):
        with pytest.raises(ValueError, match="whole experts that fit"):
            place(case.loads, **case.keywords(), cut=False)
        return
    placed = place(case.loads, **case.keywords(), cut=False)
    check_complete(case, placed.units)
    check_memory(case, placed.units)
    assert set(np.unique(placed.units)) <= {0, case.size}
    assert placed.total_s <= plain_seconds(case) * (1 + 1e-6)


@given(cases(max_layers=2), st.sampled_from((2.0**-20, 2.0**7)))
def test_the_unit_of_time_does_not_matter(case, scale):
    # Powers of two, which do not round.
    cost = replace(
        case.cost,
        token_s=case.cost.token_s * scale,
        row_s=case.cost.row_s * scale,
        piece_s=case.cost.piece_s * scale,
    )
    placed = place(case.loads, **case.keywords())
    scaled = place(case.loads, **{**case.keywords(), "cost": cost})
    np.testing.assert_array_equal(scaled.units, placed.units)


def test_what_was_considered_is_said():
    generator = np.random.default_rng(0)
    loads = ExpertLoads(mean=generator.lognormal(0, 0.8, (4, 32)))
    cost = PlacementCost(token_s=1, row_s=0.0, piece_s=0, units_per_expert=16, tokens=32)
    placed = place(loads, speeds=np.ones(8), cost=cost, memory_units=np.full((4, 8), 64))
    names = [one.name for one in placed.considered]
    assert names[0] == "whole experts, longest first"
    assert {"whole experts, then cuts that pay", "window cut"} <= set(names)
    assert sum(one.chosen for one in placed.considered) == 4
    for one in placed.considered:
        assert one.chosen_seconds <= one.seconds * (1 + 1e-9)
        assert one.layers == 4 or one.note


def test_dear_rows_leave_the_window_cut_out():
    loads = ExpertLoads(mean=np.random.default_rng(0).lognormal(0, 0.5, (4, 32)))
    cost = PlacementCost(token_s=1, row_s=2.0, piece_s=0, units_per_expert=16, tokens=32)
    placed = place(loads, speeds=np.ones(8), cost=cost)
    (window,) = [one for one in placed.considered if one.name == "window cut"]
    assert (window.layers, window.chosen) == (0, 0)
    assert "rows" in window.note


SHAPES = [
    # experts, slots, units: every one breaks some other planner
    (8, 7, 112),
    (8, 15, 112),
    (8, 16, 112),
    (8, 1, 4),
    (3, 8, 16),
    (1, 8, 16),
    (7, 13, 11),
    (61, 13, 4),
    (256, 31, 16),
    (5, 5, 1),
    (4, 7, 1),
]


@pytest.mark.parametrize(("experts", "slots", "size"), SHAPES)
@pytest.mark.parametrize("row_s", [0.0, 0.3])
def test_every_shape_is_planned(experts, slots, size, row_s):
    generator = np.random.default_rng(experts * slots)
    loads = ExpertLoads(mean=generator.lognormal(0, 0.7, (3, experts)))
    cost = PlacementCost(token_s=1, row_s=row_s, piece_s=0.001, units_per_expert=size, tokens=100)
    tight = np.full((3, slots), -(-experts * size // slots))
    for memory in (None, tight, tight.sum(axis=0)):
        placed = place(loads, speeds=np.ones(slots), cost=cost, memory_units=memory)
        case = Case(loads=loads, speeds=(1.0,) * slots, cost=cost, memory_units=memory)
        check_complete(case, placed.units)
        check_memory(case, placed.units)
        assert (placed.seconds >= placed.bound.seconds * (1 - 1e-6)).all()
        if row_s == 0 and size > 1 and experts * size >= 8 * slots:
            assert placed.total_s <= 1.1 * placed.bound.total_s


def test_an_expert_hotter_than_a_fair_share_is_cut():
    loads = ExpertLoads(mean=np.array([[30.0, *[1.0] * 30]]))
    cost = PlacementCost(token_s=1, row_s=0.01, piece_s=0, units_per_expert=16, tokens=60)
    placed = place(loads, speeds=np.ones(8), cost=cost)
    assert (placed.units[0, 0] > 0).sum() >= 4
    assert placed.total_s <= 1.1 * placed.bound.total_s


def test_unequal_speeds_get_unequal_loads():
    speeds = np.array([0.7, 0.85, 1, 1, 1, 1, 1, 1])
    loads = ExpertLoads(mean=np.random.default_rng(0).lognormal(0, 0.6, (8, 64)))
    cost = PlacementCost(token_s=1, row_s=0.0, piece_s=0, units_per_expert=16, tokens=64)
    placed = place(loads, speeds=speeds, cost=cost)
    assert figures(placed.units, loads, speeds).balance >= 0.98
    assert placed.total_s <= placed.bound.total_s / 0.99


def test_a_pool_of_memory_is_worth_having():
    # With as much memory for each layer as it needs on average, slots with hot experts must take cold ones too.
    loads = ExpertLoads(mean=np.random.default_rng(1).lognormal(0, 0.9, (12, 64)))
    cost = PlacementCost(token_s=1, row_s=0.3, piece_s=0, units_per_expert=16, tokens=64)
    pooled = place(loads, speeds=np.ones(8), cost=cost, memory_units=np.full(8, 12 * 128))
    apart = place(loads, speeds=np.ones(8), cost=cost, memory_units=np.full((12, 8), 128))
    assert (pooled.units.sum(axis=(0, 1)) == 12 * 128).all()
    assert pooled.total_s < 0.995 * apart.total_s


def test_slots_without_memory_hold_nothing():
    cost = PlacementCost(token_s=1, row_s=0.1, piece_s=0, units_per_expert=4, tokens=64)
    loads = ExpertLoads.uniform(2, 8)
    placed = place(loads, speeds=np.ones(4), cost=cost, memory_units=(64, 0, 64, 0))
    assert placed.units[:, :, [1, 3]].sum() == 0
    assert placed.total_s == pytest.approx(placed.bound.total_s)


def test_too_little_memory_is_refused():
    cost = PlacementCost(token_s=1, row_s=0.1, piece_s=0, units_per_expert=4, tokens=64)
    loads = ExpertLoads.uniform(1, 3)
    with pytest.raises(ValueError, match=r"together 11\) cannot hold a layer of 12 units"):
        place(loads, speeds=(1, 1), cost=cost, memory_units=[[6, 5]])
    place(loads, speeds=(1, 1), cost=cost, memory_units=[[6, 6]])
    with pytest.raises(ValueError, match=r"whole experts that fit: 2\) cannot hold 3 of 4 units each; allow cuts"):
        place(loads, speeds=(1, 1), cost=cost, memory_units=[[6, 6]], cut=False)
