"""Lanes of several slots: what they hold, and what is left of them after a loss."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cluster import Cluster
from nep.planning.holding.lanes import batch_choices, fill_rounds, form_lanes, hold_dense, keep_dense, make_lanes
from nep.planning.layout import Layout, LineKind, axis_lines
from nep.planning.plan import Lane
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.validation import check_plan
from tests.unit.planning.strategies import debug_like_lines, slots_with

LINES = debug_like_lines(num_layers=2, num_heads=8, num_kv_heads=2, vocab_size=30)
DENSE = {axis: line for axis, line in axis_lines(LINES).items() if line.kind is not LineKind.EXPERTS}


def _check(layout: Layout, lanes: list[tuple[int, ...]]) -> None:
    """Every lane has everything, heads and rows once, and the KV heads of its query heads."""
    for axis, line in DENSE.items():
        for lane in lanes:
            for unit in range(line.num_units):
                having = slots_with(layout, axis, unit) & set(lane)
                if line.kind is LineKind.WHOLE:
                    assert having == set(lane)
                elif line.kind is LineKind.KV_HEADS:
                    query = axis.replace("kv_heads", "heads")
                    assert having == {
                        slot for head in range(4 * unit, 4 * unit + 4) for slot in slots_with(layout, query, head)
                    } & set(lane)
                else:
                    assert len(having) == 1


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.data())
def test_lanes_are_neighbours_in_a_domain_and_hold_the_dense_part_once(
    num_slots: int, width: int, per_node: int, data: st.DataObject
) -> None:
    replicas = [tuple(range(num_slots))]
    formed = form_lanes(replicas, width, {slot: slot // per_node for slot in range(num_slots)})
    assert [slot for _, slots in formed for slot in slots] == list(range(num_slots))
    assert all(len(slots) <= width and len({slot // per_node for slot in slots}) == 1 for _, slots in formed)
    speeds = {slot: data.draw(st.sampled_from((1_000_000, 700_000))) for slot in range(num_slots)}
    lanes = make_lanes(formed, speeds, 16)
    layout = Layout(hold_dense(lanes, speeds, LINES))
    _check(layout, [slots for _, slots in formed])
    left = data.draw(st.sets(st.integers(0, num_slots - 1), min_size=1))
    kept = Layout(keep_dense(layout, [slots for _, slots in formed], {slot: speeds[slot] for slot in left}, LINES))
    _check(kept, [lane for _, slots in formed if (lane := tuple(slot for slot in slots if slot in left))])
    for axis, line in DENSE.items():
        for unit in range(line.num_units):
            assert slots_with(layout, axis, unit) & left <= slots_with(kept, axis, unit), (
                "who stays keeps what it holds"
            )


def test_slow_slots_of_a_lane_hold_less() -> None:
    speeds = {0: 1_000_000, 1: 500_000}
    layout = Layout(hold_dense(make_lanes([(0, (0, 1))], speeds, 4), speeds, LINES))
    assert layout.by_slot("embedding") == {0: ((0, 20),), 1: ((20, 30),)}
    assert layout.num_units("layers.0.heads", 0) in (5, 6)


@pytest.mark.parametrize("lane_slots", [2, 4])
@pytest.mark.parametrize("dying", [(0,), (1, 5), (4, 5, 6, 7), (0, 2, 4, 6)])
def test_plans_with_wide_lanes_survive_failures(lane_slots: int, dying: tuple[int, ...]) -> None:
    cluster = Cluster.uniform(8, 8)
    plan = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=12, lane_slots=lane_slots)
    check_plan(plan, LINES)
    assert max(len(lane.slots) for lane in plan.lanes) == lane_slots
    cluster = cluster.fail(dying)
    after = plan_mirrors(plan_after_failure(plan, cluster, LINES), cluster, LINES)
    check_plan(after, LINES)
    assert after.unprotected(LINES) == []
    assert after.global_batch_size == 12
    _check(after.holders, [lane.slots for lane in after.lanes])
    for axis in plan.holders.cuts:
        for slot in after.slots:
            before = {unit for lo, hi in plan.holders.intervals(axis, slot) for unit in range(lo, hi)}
            now = {unit for lo, hi in after.holders.intervals(axis, slot) for unit in range(lo, hi)}
            assert before <= now


def test_lanes_without_survivors_disappear() -> None:
    cluster = Cluster.uniform(4, 4)
    plan = plan_from_scratch(cluster, LINES, num_replicas=1, global_batch_size=8, lane_slots=2)
    after = plan_after_failure(plan, cluster.fail([0, 1]), LINES)
    assert after.lanes == (Lane(0, (2, 3), 8),)
    assert all(after.holders.by_slot(axis)[2] == plan.holders.by_slot(axis)[2] for axis in DENSE)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from((10, 7, 4))), min_size=1, max_size=7), st.integers(0, 30))
def test_the_ways_to_share_a_batch_are_all_of_it(slots: list[tuple[int, int]], batch: int) -> None:
    speeds = {index: speed for index, (_, speed) in enumerate(slots)}
    lanes = make_lanes([(replica, (index,)) for index, (replica, _) in enumerate(slots)], speeds, batch)
    choices = batch_choices(lanes, speeds)
    assert choices[0] == lanes
    assert len(set(choices)) == len(choices)
    for choice in choices:
        assert sum(lane.num_sequences for lane in choice) == batch
        assert [(lane.replica, lane.slots) for lane in choice] == [(lane.replica, lane.slots) for lane in lanes]
    if len(set(speeds.values())) == 1:
        return
    done = [max(Fraction(lane.num_sequences, speeds[lane.slots[0]]) for lane in choice) for choice in choices]
    assert min(done) == done[0], "by speed is the earliest for lanes that need not wait for each other"


def _singles(shares: list[int], per_replica: int) -> tuple[Lane, ...]:
    return tuple(Lane(index // per_replica, (index,), share) for index, share in enumerate(shares))


def test_slow_lanes_get_what_need_not_be_full() -> None:
    """Four lanes and nine sequences: three rounds, whoever is slow; so the slow one can do without the last two."""
    speeds = {0: 10, 1: 7, 2: 10, 3: 10}
    choices = batch_choices(_singles([3, 2, 2, 2], 4), speeds)
    assert (3, 0, 3, 3) in {tuple(lane.num_sequences for lane in choice) for choice in choices}
    choices = batch_choices(_singles([3, 2, 2, 2], 4), speeds, micro_batch_size=2)
    assert (4, 0, 4, 1) in {tuple(lane.num_sequences for lane in choice) for choice in choices}


@given(st.lists(st.integers(0, 9), min_size=6, max_size=6), st.lists(st.floats(0.1, 9), min_size=2, max_size=2))
def test_a_last_round_that_is_not_full_goes_to_others(shares: list[int], seconds: list[float]) -> None:
    lanes = _singles(shares, 3)
    filled = fill_rounds(lanes, seconds, 1)
    assert [(lane.replica, lane.slots) for lane in filled] == [(lane.replica, lane.slots) for lane in lanes]
    sums = [
        [sum(lane.num_sequences for lane in way if lane.replica == index) for index in (0, 1)]
        for way in (lanes, filled)
    ]
    assert sum(sums[0]) == sum(sums[1])
    if seconds[0] == seconds[1]:
        assert filled == lanes
        return
    slow = seconds.index(max(seconds))
    over = sums[0][slow] % 3
    assert sums[1][slow] == (sums[0][slow] - over if over < sums[0][slow] else sums[0][slow])
