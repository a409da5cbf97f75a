"""Plans from scratch, mirrors, and what a failure would lose. Planning after failures has its own file."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nep.planning.cluster import Cluster, Slot
from nep.planning.holding.dealing import Integers, count_cut
from nep.planning.holding.replica_cuts import UNKNOWN_COST
from nep.planning.layout import Layout, LineKind, Lines, axis_lines, axis_unit_numel, normalize
from nep.planning.loads import ExpertLoads
from nep.planning.placement.objective import layer_seconds
from nep.planning.plan import Lane, Plan
from nep.planning.planner import lost_intervals, plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.validation import check_plan
from tests.unit.planning.strategies import debug_like_lines, layouts, line_list, slots_with, units_of

LINES = debug_like_lines()
SIZES = [(slots, replicas) for slots in (1, 2, 3, 4, 5, 7, 8, 11, 13) for replicas in (1, 2, 3) if replicas <= slots]


def _scratch(num_slots: int, num_replicas: int, slots_per_node: int = 1, lines: Lines = LINES) -> Plan:
    cluster = Cluster.uniform(num_slots, slots_per_node)
    return plan_from_scratch(cluster, lines, num_replicas=num_replicas, global_batch_size=32)


def _bytes(layouts_: list[Layout], plan: Plan, lines: Lines) -> dict[int, int]:
    unit_numel = axis_unit_numel(lines)
    total = dict.fromkeys(plan.slots, 0)
    for layout in layouts_:
        for (axis, slot), units in units_of(layout).items():
            total[slot] += len(units) * unit_numel[axis]
    return total


@pytest.mark.parametrize(("num_slots", "num_replicas"), SIZES)
def test_from_scratch_every_replica_is_whole_and_every_unit_owned_once(num_slots: int, num_replicas: int) -> None:
    plan = _scratch(num_slots, num_replicas)
    assert plan.number == 1
    assert [slot for replica in plan.replicas for slot in replica] == list(range(num_slots))
    sizes = [len(replica) for replica in plan.replicas]
    assert len(sizes) == num_replicas and max(sizes) - min(sizes) <= 1
    for axis, line in axis_lines(LINES).items():
        for unit in range(line.num_units):
            holding = slots_with(plan.holders, axis, unit)
            if line.kind is LineKind.EXPERTS:
                assert sorted(plan.replica_of(slot) for slot in holding) == list(range(num_replicas))
            else:
                assert holding == set(plan.slots)
            owning = slots_with(plan.owners, axis, unit)
            assert len(owning) == 1 and owning <= holding
            mirroring = slots_with(plan.mirrors, axis, unit)
            assert len(mirroring) == (1 if num_slots > 1 else 0) and not mirroring & owning
    check_plan(plan, LINES)


def _cut_by_the_line(num_experts: int, size: int, num_slots: int) -> Integers:
    """Every slot the next so many units of the line, ``[1, experts, slots]``."""
    units = num_experts * size
    taker = [unit * num_slots // units for unit in range(units)]
    cut = np.zeros((1, num_experts, num_slots), dtype=np.int64)
    for unit, slot in enumerate(taker):
        cut[0, unit // size, slot] += 1
    return cut


@pytest.mark.parametrize(("num_slots", "num_replicas"), SIZES)
@pytest.mark.parametrize(("num_experts", "size"), [(4, 4), (8, 7), (8, 112), (3, 5)])
def test_from_scratch_experts_are_placed_no_worse_than_by_the_line(
    num_slots: int, num_replicas: int, num_experts: int, size: int
) -> None:
    """Cutting the line evenly is what everybody would try first; it is as even, and has about as many pieces."""
    lines = debug_like_lines(num_layers=1, num_experts=num_experts, units_per_expert=size)
    plan = _scratch(num_slots, num_replicas, lines=lines)
    for replica in plan.replicas:
        held = [[plan.holders.intervals("layers.0.experts", slot) for slot in replica]]
        cut, line = count_cut(held, num_experts, size), _cut_by_the_line(num_experts, size, len(replica))
        cost = replace(UNKNOWN_COST, units_per_expert=size)
        ours, theirs = (
            layer_seconds(one, ExpertLoads.uniform(1, num_experts), cost, [1.0] * len(replica)) for one in (cut, line)
        )
        assert ours[0] <= theirs[0] * (1 + 1e-9)


def test_experts_that_come_out_even_are_where_everybody_expects_them() -> None:
    for num_slots, units in ((4, 16), (8, 8), (16, 4)):
        lines = debug_like_lines(num_layers=2, num_experts=8, units_per_expert=8)
        plan = _scratch(num_slots, 1, lines=lines)
        for axis in ("layers.0.experts", "layers.1.experts"):
            assert [plan.holders.intervals(axis, slot) for slot in range(num_slots)] == [
                ((slot * units, (slot + 1) * units),) for slot in range(num_slots)
            ]


def test_eight_experts_on_seven_slots_are_full_experts_and_slices() -> None:
    lines = debug_like_lines(num_layers=1, num_experts=8, units_per_expert=7)
    plan = _scratch(7, 1, lines=lines)
    held = plan.holders.by_slot("layers.0.experts")
    assert sorted(
        unit for units in units_of(plan.holders).items() if "experts" in units[0][0] for unit in units[1]
    ) == [*range(56)]
    assert all(sum(hi - lo for lo, hi in intervals) == 8 for intervals in held.values())
    full = [intervals[0] for intervals in held.values() if (intervals[0][1] - intervals[0][0]) == 7]
    assert len(full) >= 5 and all(lo % 7 == 0 for lo, _ in full), "full experts lie first"


def test_more_slots_than_units_leave_some_without_experts() -> None:
    lines = debug_like_lines(num_experts=2, units_per_expert=2)
    plan = _scratch(7, 1, lines=lines)
    assert sorted(plan.holders.num_units("layers.0.experts", slot) for slot in plan.slots) == [
        0,
        0,
        0,
        1,
        1,
        1,
        1,
    ]
    check_plan(plan, lines)


def test_only_healthy_slots_are_planned_and_batches_follow_speed() -> None:
    cluster = Cluster(
        (Slot(0, 0), Slot(1, 0, "spare"), Slot(2, 0, speed_ppm=500_000), Slot(3, 0, "failed"), Slot(7, 1))
    )
    plan = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=10)
    assert plan.slots == (0, 2, 7)
    assert plan.replicas == ((0, 2), (7,))
    assert plan.lanes == (Lane(0, (0,), 4), Lane(0, (2,), 2), Lane(1, (7,), 4))
    assert plan.speeds_ppm == (1_000_000, 500_000, 1_000_000)


@given(st.integers(1, 13), st.integers(1, 3), st.integers(1, 40))
def test_lane_shares_sum_to_the_batch(num_slots: int, num_replicas: int, batch: int) -> None:
    assume(num_replicas <= num_slots)
    plan = plan_from_scratch(Cluster.uniform(num_slots, 4), LINES, num_replicas=num_replicas, global_batch_size=batch)
    shares = [lane.num_sequences for lane in plan.lanes]
    assert sum(shares) == plan.global_batch_size == batch
    assert max(shares) - min(shares) <= 1
    assert [lane.replica for lane in plan.lanes] == sorted(lane.replica for lane in plan.lanes)


@pytest.mark.parametrize(("num_slots", "num_replicas"), [one for one in SIZES if one[0] % one[1] == 0])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_ownership_of_equal_replicas_is_within_a_few_units_of_the_mean(
    num_slots: int, num_replicas: int, num_layers: int
) -> None:
    """Slots in the same place of all replicas share the same experts evenly, and those places differ by less
    than one unit a layer. Everything else goes to the least loaded slot, which the last unit leaves at most
    one unit over the mean."""
    lines = debug_like_lines(num_layers=num_layers, num_experts=8, units_per_expert=16, vocab_size=64)
    plan = _scratch(num_slots, num_replicas, lines=lines)
    unit_numel = axis_unit_numel(lines)
    owned = _bytes([plan.owners], plan, lines)
    mean = sum(owned.values()) / num_slots
    slack = max(*unit_numel.values(), (num_layers + 1) * unit_numel["layers.0.experts"])
    assert max(owned.values()) <= mean + slack


@pytest.mark.parametrize(("num_slots", "num_replicas"), [one for one in SIZES if one[0] % one[1]])
def test_ownership_of_unequal_replicas_is_near_the_mean(num_slots: int, num_replicas: int) -> None:
    """Unequal replicas cut experts in different places and the greedy pass has no tight bound; over 2 to 64
    slots of real models the worst excess over the mean was 10 %, and half of that again is allowed here."""
    lines = debug_like_lines(num_layers=3, num_experts=8, units_per_expert=16, vocab_size=64)
    plan = _scratch(num_slots, num_replicas, lines=lines)
    owned = _bytes([plan.owners], plan, lines)
    mean = sum(owned.values()) / num_slots
    assert max(owned.values()) <= 1.15 * mean + max(axis_unit_numel(lines).values())


@pytest.mark.parametrize(("num_slots", "num_replicas"), [one for one in SIZES if one[0] > 1])
def test_mirrors_leave_the_state_as_even_as_ownership(num_slots: int, num_replicas: int) -> None:
    """Everybody owns and mirrors one owner's state, so nobody keeps more than twice the largest."""
    lines = debug_like_lines(num_layers=3, num_experts=8, units_per_expert=16, vocab_size=64)
    plan = _scratch(num_slots, num_replicas, lines=lines)
    state = _bytes([plan.owners, plan.mirrors], plan, lines)
    owned = _bytes([plan.owners], plan, lines)
    assert max(state.values()) <= 2 * max(owned.values())
    assert min(state.values()) >= 2 * min(owned.values())


@given(st.integers(2, 13), st.integers(1, 3), st.integers(1, 5))
def test_mirrors_are_in_another_domain_where_there_is_one(slots: int, replicas: int, per_node: int) -> None:
    assume(replicas <= slots)
    plan = _scratch(slots, replicas, per_node)
    several_nodes = slots > per_node
    for axis, line in axis_lines(LINES).items():
        for unit in range(line.num_units):
            (owner,), (mirror,) = slots_with(plan.owners, axis, unit), slots_with(plan.mirrors, axis, unit)
            assert owner != mirror
            assert not several_nodes or owner // per_node != mirror // per_node


def test_redundancy_none_has_no_mirrors_and_says_what_is_unprotected() -> None:
    plan = plan_from_scratch(Cluster.uniform(4, 2), LINES, num_replicas=2, global_batch_size=4, redundancy="none")
    assert plan.mirrors == Layout({})
    assert plan.unprotected(LINES) == [(axis, 0, line.num_units) for axis, line in axis_lines(LINES).items()]
    assert plan_mirrors(plan, Cluster.uniform(4, 2), LINES) is plan


def test_a_plan_from_scratch_needs_no_more_mirrors() -> None:
    for slots in (1, 2, 5):
        plan = _scratch(slots, 1)
        assert plan_mirrors(plan, Cluster.uniform(slots, 1), LINES) is plan
    assert _scratch(5, 1).unprotected(LINES) == []
    assert _scratch(1, 1).unprotected(LINES) != []


@given(st.data())
def test_plan_mirrors_completes_any_mirrors_and_is_idempotent(data: st.DataObject) -> None:
    num_units = {"b": data.draw(st.integers(1, 12)), "a": 6}
    lines = line_list(num_units)
    cluster = Cluster.uniform(data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3)))
    slots = cluster.live
    owners = data.draw(layouts(num_units, slots, "partition"))
    owned, wanted = units_of(owners), units_of(data.draw(layouts(num_units, slots, "partition")))
    some = data.draw(st.sets(st.integers(0, 12)))
    mirrors = Layout(
        {
            axis: {
                slot: normalize(
                    (unit, unit + 1) for unit in wanted.get((axis, slot), set()) & some - owned.get((axis, slot), set())
                )
                for slot in slots
            }
            for axis in num_units
        }
    )
    plan = Plan(
        number=4,
        slots=slots,
        replicas=(slots,),
        lanes=tuple(Lane(0, (slot,), 1) for slot in slots),
        holders=owners,
        owners=owners,
        mirrors=mirrors,
        redundancy="device",
        speeds_ppm=(1_000_000,) * len(slots),
    )
    after = plan_mirrors(plan, cluster, lines)
    check_plan(after, lines)
    assert after.unprotected(lines) == []
    assert (after is plan) == (after.mirrors == plan.mirrors)
    assert after.number == (4 if after is plan else 5)
    assert after.owners == plan.owners and after.holders == plan.holders
    assert plan_mirrors(after, cluster, lines) is after
    domains = cluster.domains
    for axis, count in num_units.items():
        for unit in range(count):
            (owner,), (mirror,) = slots_with(owners, axis, unit), slots_with(after.mirrors, axis, unit)
            assert domains[mirror] != domains[owner]


@given(st.data())
def test_lost_is_what_has_neither_owner_nor_mirror_alive(data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, 7))
    plan = _scratch(num_slots, data.draw(st.integers(1, min(3, num_slots))), data.draw(st.integers(1, 3)))
    live = data.draw(st.sets(st.sampled_from(plan.slots)))
    expected = [
        (axis, unit)
        for axis, line in axis_lines(LINES).items()
        for unit in range(line.num_units)
        if not (slots_with(plan.owners, axis, unit) | slots_with(plan.mirrors, axis, unit)) & live
    ]
    found = lost_intervals(plan, live, LINES)
    assert [(axis, unit) for axis, lo, hi in found for unit in range(lo, hi)] == expected
    if len(live) >= num_slots - 1 > 0:
        assert found == [], "one failure of a mirrored plan loses nothing"


def test_impossible_jobs_are_refused_with_all_reasons_at_once() -> None:
    with pytest.raises(ValueError, match=r"num_replicas \(5\) cannot exceed the healthy slots \(4\); use at most 4"):
        plan_from_scratch(Cluster.uniform(4, 2), LINES, num_replicas=5, global_batch_size=4)
    with pytest.raises(ValueError, match="num_replicas") as caught:
        plan_from_scratch(
            Cluster.uniform(4, 2),
            {},
            num_replicas=0,
            global_batch_size=0,
            redundancy="twice",  # type: ignore[arg-type]
        )
    for message in (
        "num_replicas (0) must be at least 1",
        "global_batch_size (0) must be at least 1",
        "redundancy ('twice') must be one of device, host, none",
        "lines (none)",
    ):
        assert message in str(caught.value)


def test_plans_for_another_cluster_are_refused() -> None:
    plan = _scratch(4, 2)
    for replan in (plan_after_failure, plan_mirrors):
        with pytest.raises(ValueError, match=r"slots \[2, 3\] of plan 1 are not of the cluster"):
            replan(plan, Cluster.uniform(2, 1), LINES)
    with pytest.raises(RuntimeError, match="no slot of plan 1 is healthy"):
        plan_after_failure(plan, Cluster.uniform(4, 1).fail(range(4)), LINES)
