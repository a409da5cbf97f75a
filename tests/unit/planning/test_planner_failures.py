"""Failures one after another, down to a single slot, checked unit by unit."""

import time
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nep.planning.cluster import Cluster
from nep.planning.layout import Lines, arrange, axes, axis_lines, axis_unit_numel
from nep.planning.plan import Plan
from nep.planning.planner import lost_intervals, plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.transfer import fetch
from nep.planning.validation import check_plan
from tests.unit.planning.strategies import debug_like_lines, slots_with, units_of

LINES = debug_like_lines(num_layers=1, num_experts=3, units_per_expert=5, vocab_size=17)


def _start(num_slots: int, num_replicas: int, per_node: int = 1, lines: Lines = LINES) -> tuple[Plan, Cluster]:
    cluster = Cluster.uniform(num_slots, per_node)
    return plan_from_scratch(cluster, lines, num_replicas=num_replicas, global_batch_size=24), cluster


def _check_step(before: Plan, after: Plan, cluster: Cluster, lines: Lines) -> None:
    """Everything that has to hold from one plan to the next; units only, no interval arithmetic."""
    check_plan(after, lines)
    alive = set(cluster.healthy)
    assert after.number == before.number + 1
    assert after.slots == tuple(slot for slot in before.slots if slot in alive)
    survivors = [tuple(slot for slot in replica if slot in alive) for replica in before.replicas]
    assert after.replicas == tuple(replica for replica in survivors if replica)
    assert after.global_batch_size == before.global_batch_size
    for axis, line in axis_lines(lines).items():
        for intervals in after.holders.by_slot(axis).values():
            assert intervals == arrange(intervals, line.units_per_expert), "full experts must lie first"
        for unit in range(line.num_units):
            _check_unit(before, after, survivors, axis, unit)


def _check_unit(before: Plan, after: Plan, survivors: list[tuple[int, ...]], axis: str, unit: int) -> None:
    held, holding = slots_with(before.holders, axis, unit), slots_with(after.holders, axis, unit)
    alive = set(after.slots)
    for replica in survivors:
        kept = held & set(replica)
        now = holding & set(replica)
        # Minimum movement: survivors keep all they held, and get exactly what none of them held, once.
        if kept or not replica:
            assert now == kept
        else:
            assert len(now) == 1
    (owned_by,), (owner,) = slots_with(before.owners, axis, unit), slots_with(after.owners, axis, unit)
    assert owner in holding
    assert owner == owned_by or owned_by not in alive
    # Mirrors: what lives and is not now the owner, nothing new.
    assert slots_with(after.mirrors, axis, unit) == (slots_with(before.mirrors, axis, unit) & alive) - {owner}


@given(st.data())
def test_any_sequence_of_failures_down_to_one_slot(data: st.DataObject) -> None:
    num_slots = data.draw(st.sampled_from((2, 3, 4, 5, 6, 7, 11, 13)), "slots")
    num_replicas = data.draw(st.integers(1, min(3, num_slots)), "replicas")
    plan, cluster = _start(num_slots, num_replicas, data.draw(st.integers(1, 4), "slots per node"))
    dying = data.draw(st.permutations(range(num_slots)), "order of death")[: num_slots - 1]
    while dying:
        together = data.draw(st.integers(1, min(3, len(dying))), "at once")
        failed, dying = dying[:together], dying[together:]
        cluster = cluster.fail(failed)
        after = plan_after_failure(plan, cluster, LINES)
        _check_step(plan, after, cluster, LINES)
        plan = after
        if data.draw(st.booleans(), "mirror again"):
            mirrored = plan_mirrors(plan, cluster, LINES)
            check_plan(mirrored, LINES)
            assert mirrored.unprotected(LINES) == [] or len(mirrored.slots) == 1
            assert (mirrored.owners, mirrored.holders) == (plan.owners, plan.holders)
            plan = mirrored
    assert len(plan.slots) == 1


@pytest.mark.parametrize("num_slots", [5, 7, 11, 13])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("last_first", [False, True])
def test_primes_one_by_one_with_mirrors_lose_nothing(num_slots: int, num_replicas: int, last_first: bool) -> None:
    plan, cluster = _start(num_slots, num_replicas)
    for slot in sorted(range(1, num_slots), reverse=last_first):
        cluster = cluster.fail([slot])
        assert lost_intervals(plan, cluster.live, LINES) == []
        after = plan_after_failure(plan, cluster, LINES)
        _check_step(plan, after, cluster, LINES)
        plan = plan_mirrors(after, cluster, LINES)
        assert len(plan.slots) == 1 or plan.unprotected(LINES) == []
    assert plan.slots == (0,)


def test_what_travels_is_exactly_what_was_lost() -> None:
    """8 slots to 7 move one eighth of the experts and, of the optimizer state, the dead slot's share."""
    lines = debug_like_lines(num_layers=3, num_experts=8, units_per_expert=8, vocab_size=64)
    plan, cluster = _start(8, 1, lines=lines)
    after = plan_after_failure(plan, cluster.fail([3]), lines)
    order, live = list(axes(lines)), after.slots
    state = [plan.owners.restrict(live), plan.mirrors.restrict(live)]
    params = fetch([*state, plan.holders.restrict(live)], after.holders, order, plan.holders)
    dead_units = {where: len(units) for where, units in units_of(plan.holders).items() if where[1] == 3}
    experts = sum(count for (axis, _), count in dead_units.items() if axis.endswith("experts"))
    assert params.num_units == experts == 3 * 8
    assert {piece.axis for piece in params} == {f"layers.{layer}.experts" for layer in range(3)}
    owners = fetch(state, after.owners, order, plan.owners)
    assert owners.num_units == sum(plan.owners.num_units(axis, 3) for axis in order)
    assert all(3 not in (piece.src, piece.dst) for piece in (*params, *owners))


@given(st.integers(3, 13), st.integers(1, 3), st.data())
def test_survivors_stay_even_and_pieces_stay_few(num_slots: int, num_replicas: int, data: st.DataObject) -> None:
    """Nobody has a unit more than an even share, and each failure adds about a piece per survivor: cutting every
    lost piece over everybody would double the pieces every time."""
    assume(num_replicas <= num_slots)
    lines = debug_like_lines(num_layers=2, num_experts=8, units_per_expert=64)
    plan, cluster = _start(num_slots, num_replicas, lines=lines)
    for slot in data.draw(st.permutations(range(num_slots)))[:-1]:
        cluster = cluster.fail([slot])
        after = plan_after_failure(plan, cluster, lines)
        for axis in ("layers.0.experts", "layers.1.experts"):
            for replica in after.replicas:
                counts = [after.holders.num_units(axis, one) for one in replica]
                assert max(counts) < 8 * 64 / len(replica) + 1
            pieces = [
                sum(
                    len({unit // 64 for unit in units})
                    for (name, _), units in units_of(one.holders).items()
                    if name == axis
                )
                for one in (plan, after)
            ]
            assert pieces[1] <= pieces[0] + 2 * len(after.slots)
        plan = after


def test_what_does_not_divide_goes_to_another_slot_in_each_layer() -> None:
    """8 lost units for 7 survivors leave one over in each of 7 layers: everybody takes one of these."""
    lines = debug_like_lines(num_layers=7, num_experts=8, units_per_expert=8)
    plan, cluster = _start(8, 1, lines=lines)
    after = plan_after_failure(plan, cluster.fail([3]), lines)
    held = [sum(after.holders.num_units(f"layers.{layer}.experts", slot) for layer in range(7)) for slot in after.slots]
    assert held == [8 * 8] * 7


def test_a_lost_replica_disappears_and_the_others_take_its_batch() -> None:
    plan, cluster = _start(6, 3)
    after = plan_after_failure(plan, cluster.fail([2, 3]), LINES)
    assert after.replicas == ((0, 1), (4, 5))
    assert [(lane.replica, lane.slots, lane.num_sequences) for lane in after.lanes] == [
        (0, (0,), 6),
        (0, (1,), 6),
        (1, (4,), 6),
        (1, (5,), 6),
    ]
    assert all(after.holders.intervals(axis, 4) == plan.holders.intervals(axis, 4) for axis in axes(LINES))


def test_a_draining_slot_leaves_but_is_still_a_source() -> None:
    plan, cluster = _start(4, 2)
    cluster = cluster.with_health([1], "draining")
    after = plan_after_failure(plan, cluster, LINES)
    _check_step(plan, after, cluster, LINES)
    assert 1 not in after.slots
    assert 1 in cluster.live
    fetched = fetch([plan.owners.restrict(cluster.live)], after.owners, list(axes(LINES)), plan.owners)
    assert {piece.src for piece in fetched} == {1}


def test_a_false_alarm_only_counts_up() -> None:
    plan, cluster = _start(4, 2)
    after = plan_after_failure(plan, cluster, LINES)
    assert after.number == 2
    assert (after.holders, after.owners, after.mirrors) == (plan.holders, plan.owners, plan.mirrors)
    assert after.lanes == plan.lanes


def test_a_dead_owners_bytes_are_spread_over_those_who_hold_them() -> None:
    """In equal replicas the heirs end within a unit of the mean, as far as the experts' few heirs allow."""
    lines = debug_like_lines(num_layers=3, num_experts=8, units_per_expert=16, vocab_size=64)
    plan, cluster = _start(8, 1, lines=lines)
    after = plan_after_failure(plan, cluster.fail([5]), lines)
    unit_numel = axis_unit_numel(lines)
    owned = dict.fromkeys(after.slots, 0)
    for (axis, slot), units in units_of(after.owners).items():
        owned[slot] += len(units) * unit_numel[axis]
    mean = sum(owned.values()) / len(owned)
    slack = max(*unit_numel.values(), 4 * unit_numel["layers.0.experts"])
    assert max(owned.values()) <= mean + slack


def _seconds(num_slots: int, lines: Lines) -> float:
    """Best of three: planning after a failure and everything recovery computes with the plan."""
    plan, cluster = _start(num_slots, num_slots // 8, 8, lines)
    cluster = cluster.fail([3])
    order, live = list(axes(lines)), cluster.live
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        after = plan_after_failure(plan, cluster, lines)
        state = [plan.owners.restrict(live), plan.mirrors.restrict(live)]
        assert lost_intervals(plan, live, lines) == []
        fetch(state, after.owners, order, plan.owners)
        fetch(state, after.holders, order, plan.holders)
        best = min(best, time.perf_counter() - started)
    return best


def test_planning_grows_in_step_with_the_slots() -> None:
    """Eight times the slots take about eight times as long; a scan of all pairs would take sixty-four."""
    lines = debug_like_lines(num_layers=4, num_experts=8, units_per_expert=112, vocab_size=32_000)
    times = [_seconds(num_slots, lines) for num_slots in (64, 512)]
    assert all(later / earlier < 24 for earlier, later in pairwise(times)), times
