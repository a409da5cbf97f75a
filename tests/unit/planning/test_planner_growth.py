"""Slots that come back, one by one or together, checked unit by unit."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nep.planning.cluster import Cluster
from nep.planning.layout import LineKind, axis_lines, axis_unit_numel
from nep.planning.plan import Plan
from nep.planning.planner import lost_intervals, plan_after_failure, plan_from_scratch, plan_mirrors, plan_with_slots
from nep.planning.shapes import parameter_lines, preset
from nep.planning.transfer import fetch
from nep.planning.validation import check_plan
from tests.unit.planning.strategies import debug_like_lines, slots_with

LINES = debug_like_lines(num_layers=2, num_experts=8, units_per_expert=6, vocab_size=17)
EXPERT_AXES = [axis for axis, line in axis_lines(LINES).items() if line.kind is LineKind.EXPERTS]


def _expert_units(plan: Plan, slot: int) -> int:
    return sum(plan.holders.num_units(axis, slot) for axis in EXPERT_AXES)


def _after_loss(num_slots: int, num_replicas: int, lost: list[int], lane_slots: int = 1) -> tuple[Plan, Cluster]:
    cluster = Cluster.uniform(num_slots, num_slots)
    plan = plan_from_scratch(cluster, LINES, num_replicas=num_replicas, global_batch_size=24, lane_slots=lane_slots)
    for slot in lost:
        cluster = cluster.fail([slot])
        plan = plan_mirrors(plan_after_failure(plan, cluster, LINES), cluster, LINES)
    return plan, cluster


def test_a_slot_that_comes_back_makes_cut_experts_whole_again() -> None:
    plan, cluster = _after_loss(8, 1, [3])
    whole = cluster.with_health([3], "healthy")
    after = plan_with_slots(plan, whole, LINES)
    check_plan(after, LINES)
    assert (after.number, after.slots, after.replicas) == (plan.number + 1, tuple(range(8)), (tuple(range(8)),))
    for axis in EXPERT_AXES:
        assert after.holders.intervals(axis, 3) == ((18, 24),), "expert 3"
        assert all(after.holders.num_units(axis, slot) == 6 for slot in range(8))


@settings(max_examples=60)
@given(st.data())
def test_any_order_of_losses_and_returns(data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(2, 8), "slots")
    num_replicas = data.draw(st.integers(1, min(3, num_slots)), "replicas")
    lane_slots = data.draw(st.integers(1, 2), "slots of a lane")
    plan, cluster = _after_loss(num_slots, num_replicas, [], lane_slots)
    for _ in range(data.draw(st.integers(1, 6), "events")):
        away = sorted(set(range(num_slots)) - set(plan.slots))
        if away and (len(plan.slots) == 1 or data.draw(st.booleans(), "return")):
            come = data.draw(st.lists(st.sampled_from(away), min_size=1, unique=True), "who comes")
            cluster = cluster.with_health(come, "healthy")
            after = plan_with_slots(plan, cluster, LINES, num_replicas=num_replicas, lane_slots=lane_slots)
            _check_growth(plan, after, come, num_replicas)
        else:
            gone = data.draw(st.sampled_from(plan.slots), "who is lost")
            cluster = cluster.fail([gone])
            after = plan_after_failure(plan, cluster, LINES)
        check_plan(after, LINES)
        plan = after
        if data.draw(st.booleans(), "mirror again"):
            plan = plan_mirrors(plan, cluster, LINES)
            check_plan(plan, LINES)
            assert plan.unprotected(LINES) == [] or len(plan.slots) == 1


def _check_growth(before: Plan, after: Plan, come: list[int], num_replicas: int) -> None:
    assert after.number == before.number + 1
    assert after.slots == tuple(sorted([*before.slots, *come]))
    assert after.global_batch_size == before.global_batch_size
    assert len(before.replicas) <= len(after.replicas) <= max(num_replicas, len(before.replicas))
    for replica in after.replicas:
        # A layer's units do not divide evenly, and layers take turns.
        units = [_expert_units(after, slot) for slot in replica]
        if any(slot in come for slot in replica):
            fair = sum(units) / len(units)
            assert all(_expert_units(after, s) <= fair + len(EXPERT_AXES) for s in replica if s in come)
    if len(after.replicas) > len(before.replicas):
        return
    for axis in EXPERT_AXES:
        for slot in before.slots:
            had, has = before.holders.by_slot(axis).get(slot, ()), after.holders.by_slot(axis).get(slot, ())
            units = {unit for lo, hi in has for unit in range(lo, hi)}
            assert units <= {unit for lo, hi in had for unit in range(lo, hi)}, "nobody but who comes gets anything"
    for axis, line in axis_lines(LINES).items():
        for unit in range(line.num_units):
            (old,), (new,) = slots_with(before.owners, axis, unit), slots_with(after.owners, axis, unit)
            assert new == old or new in come or old not in slots_with(after.holders, axis, unit)


@pytest.mark.parametrize("lane_slots", [1, 2])
def test_a_replica_that_had_disappeared_comes_back(lane_slots: int) -> None:
    plan, cluster = _after_loss(4, 2, [2, 3], lane_slots)
    assert plan.replicas == ((0, 1),)
    cluster = cluster.with_health([2], "healthy")
    plan = plan_with_slots(plan, cluster, LINES, num_replicas=2, lane_slots=lane_slots)
    assert plan.replicas == ((0, 1, 2),), "not while one of two would be of one slot"
    cluster = cluster.with_health([3], "healthy")
    plan = plan_with_slots(plan, cluster, LINES, num_replicas=2, lane_slots=lane_slots)
    check_plan(plan, LINES)
    assert plan.replicas == ((0, 1), (2, 3))
    assert max(len(lane.slots) for lane in plan.lanes) == lane_slots
    assert [_expert_units(plan, slot) for slot in range(4)] == [48] * 4


def test_both_slots_of_a_replica_together() -> None:
    plan, cluster = _after_loss(4, 2, [2, 3])
    cluster = cluster.with_health([2, 3], "healthy")
    assert plan_with_slots(plan, cluster, LINES, num_replicas=2).replicas == ((0, 1), (2, 3))
    assert plan_with_slots(plan, cluster, LINES, num_replicas=1).replicas == ((0, 1, 2, 3),)


def test_who_comes_owns_its_part() -> None:
    lines = parameter_lines(preset("debug"))
    cluster = Cluster.uniform(4, 4).fail([1])
    plan = plan_after_failure(
        plan_from_scratch(Cluster.uniform(4, 4), lines, num_replicas=2, global_batch_size=24), cluster, lines
    )
    after = plan_with_slots(plan, Cluster.uniform(4, 4), lines, num_replicas=2)
    sizes = axis_unit_numel(lines)
    owned = {
        slot: sum(after.owners.num_units(axis, slot) * size for axis, size in sizes.items()) for slot in after.slots
    }
    assert abs(owned[1] - sum(owned.values()) / 4) < 0.1 * sum(owned.values()) / 4
    moved = fetch([plan.owners, plan.mirrors], after.owners, tuple(sizes), have=plan.owners, unit_numel=sizes)
    assert {piece.dst for piece in moved.pieces} == {1}, "state travels to who comes only"


def test_nobody_has_come() -> None:
    plan, cluster = _after_loss(3, 1, [1])
    assert plan_with_slots(plan, cluster, LINES) is plan
    with pytest.raises(ValueError, match=r"slots \[0\] of plan 3 are not healthy"):
        plan_with_slots(plan, cluster.fail([0]), LINES)


@pytest.mark.parametrize("order", [((3,), (4,), (5,)), ((0, 1), (2,)), ((2,), (0, 1)), ((1,), (2,), (0,))])
def test_a_replica_that_comes_back_bit_by_bit_is_on_its_node_again(order: tuple[tuple[int, ...], ...]) -> None:
    """Else it would dispatch over the network, and the loss of a node could take an owner and its mirror."""
    cluster = Cluster.uniform(6, 3)
    plan = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=8)
    cluster = cluster.fail([slot for slots in order for slot in slots])
    plan = plan_mirrors(plan_after_failure(plan, cluster, LINES), cluster, LINES)
    for slots in order:
        cluster = cluster.with_health(slots, "healthy")
        plan = plan_mirrors(plan_with_slots(plan, cluster, LINES, num_replicas=2), cluster, LINES)
    assert {frozenset(replica) for replica in plan.replicas} == {frozenset((0, 1, 2)), frozenset((3, 4, 5))}
    assert not lost_intervals(plan, [0, 1, 2], LINES) and not lost_intervals(plan, [3, 4, 5], LINES)


def test_slots_of_two_replicas_come_back_to_their_nodes() -> None:
    cluster = Cluster.uniform(6, 3)
    plan = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=8)
    without = cluster.fail([0, 1, 2])
    plan = plan_mirrors(plan_after_failure(plan, without, LINES), without, LINES)
    plan = plan_mirrors(plan_with_slots(plan, cluster, LINES, num_replicas=2), cluster, LINES)
    assert plan.replicas == ((3, 4, 5), (0, 1, 2)), "not in the order of the slots"
    for gone in itertools.product((0, 1, 2), (3, 4, 5)):
        less = cluster.fail(gone)
        short = plan_mirrors(plan_after_failure(plan, less, LINES), less, LINES)
        after = plan_with_slots(short, cluster, LINES, num_replicas=2)
        assert {frozenset(replica) for replica in after.replicas} == {frozenset((0, 1, 2)), frozenset((3, 4, 5))}
