"""Levers against slow slots: in order, no more than needed, each one explained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from nep.planning.cluster import Cluster
from nep.planning.compensate import LEVERS, Compensation, compensate, merge_replicas
from nep.planning.cost.hardware import HardwareProfile, Link
from nep.planning.cost.workload import Workload
from nep.planning.holding.lanes import share_by_pace
from nep.planning.plan import Lane, Plan
from nep.planning.planner import plan_from_scratch
from nep.planning.power import PowerSlot
from nep.planning.power_boost import PowerBoost
from nep.planning.search.request import Limits, PlanRequest
from nep.planning.shapes import ModelShape, parameter_lines, preset
from nep.planning.speed_curve import boosted
from nep.planning.validation import check_runnable

SHAPE = replace(preset("mixtral-8x7b"), num_layers=1, vocab_size=16)
FAST = Link(bytes_per_s=4e11)
HARDWARE = HardwareProfile(name="test", flops_per_s={2: 6e14}, scale_up=FAST, network=Link(bytes_per_s=4e10))
SLOTS = 8


def request(
    replicas: int, slow: Mapping[int, float], *, shape: ModelShape = SHAPE, sequences: int = 32, **others: object
) -> PlanRequest:
    """A job planned for equal slots, whose cluster has turned out to be another."""
    cluster = Cluster.uniform(SLOTS, SLOTS)
    plan = plan_from_scratch(
        cluster, parameter_lines(shape), num_replicas=replicas, global_batch_size=sequences * SLOTS
    )
    measured = cluster.with_speeds({slot: round(speed * 1e6) for slot, speed in slow.items()})
    workload = Workload(global_batch_size=sequences * SLOTS, micro_batch_size=8, seq_len=4096)
    given = {"cluster": measured, "shape": shape, "workload": workload, "hardware": HARDWARE, "current": plan}
    return PlanRequest(**(given | {"num_replicas": replicas} | others))  # type: ignore[arg-type]


def current(asked: PlanRequest) -> Plan:
    assert asked.current is not None
    return asked.current


def test_equal_slots_need_nothing() -> None:
    asked = request(1, {})
    found = compensate(asked)
    assert found.plan is asked.current and found.lever is None and not found.escalations and found.gain == 0


def test_one_replica_per_slot_takes_fewer_sequences_and_nothing_moves() -> None:
    found = compensate(request(8, {3: 0.5}))
    assert (found.lever, found.moved_bytes) == ("batch", 0)
    assert [one.lever for one in found.escalations if one.used] == ["batch"]
    shares = [lane.num_sequences for lane in found.plan.lanes]
    assert shares[3] == pytest.approx(shares[0] / 2, abs=1) and sum(shares) == 256
    assert found.after_s == pytest.approx(found.ideal_s, rel=0.03)


def test_in_one_replica_batch_shares_are_not_enough_and_experts_are_cut() -> None:
    asked = request(1, {3: 2 / 3})
    found = compensate(asked)
    assert found.lever == "cuts" and [one.lever for one in found.escalations] == ["batch", "cuts", "copies"]
    assert found.before_s > 1.35 * found.ideal_s and found.after_s < 1.06 * found.ideal_s
    axis = next(axis for axis in found.plan.holders.cuts if "expert" in axis or "moe" in axis)
    assert found.plan.holders.num_units(axis, 3) < 0.75 * current(asked).holders.num_units(axis, 3)
    assert found.plan.slots == current(asked).slots
    check_runnable(found.plan, parameter_lines(SHAPE), slots=range(SLOTS), global_batch_size=256)


def test_replicas_of_one_domain_share_their_copies_where_experts_may_not_be_cut() -> None:
    whole = Limits(fractions=False)
    found = compensate(request(2, {3: 2 / 3}, limits=whole))
    assert found.lever == "copies" and len(found.plan.replicas) == 1 and "experts may not be cut" in found.line
    assert found.ideal_s / found.after_s > 0.97
    check_runnable(found.plan, parameter_lines(SHAPE), slots=range(SLOTS), global_batch_size=256)
    by_batch = compensate(request(2, {3: 2 / 3}, limits=whole), levers=("batch",))
    assert by_batch.ideal_s / by_batch.after_s < 0.9, "the replica with the slow slot still waits for it"
    apart = Cluster.uniform(SLOTS, 4).with_speeds({3: 666_667})
    far = compensate(request(2, {3: 2 / 3}, limits=whole, cluster=apart))
    assert far.lever == "batch" and "no two replicas are in one scale-up domain" in far.line


def test_power_is_the_last_lever_and_is_asked_for_what_is_left() -> None:
    asked: list[Mapping[int, int]] = []

    def boost(plan: Plan, speeds: Mapping[int, int]) -> Mapping[int, int]:
        asked.append(speeds)
        return {slot: max(speed, 950_000) for slot, speed in speeds.items()}

    found = compensate(request(1, {3: 2 / 3}), boost=boost)
    without = compensate(request(1, {3: 2 / 3}))
    assert found.lever == "power" and found.speeds_ppm[3] == 950_000 and found.after_s < without.after_s
    assert [one[3] for one in asked] == [666_667]
    none = compensate(request(1, {3: 2 / 3}), boost=lambda plan, speeds: speeds)
    assert none.lever == "cuts" and "no watts can be moved" in none.line
    assert LEVERS[-1] == "power"


def test_a_recovered_slot_gets_its_work_back() -> None:
    asked = request(1, {3: 2 / 3})
    found = compensate(asked)
    again = compensate(replace(asked, cluster=Cluster.uniform(SLOTS, SLOTS), current=found.plan))
    assert again.lever is not None and again.after_s < 1.03 * compensate(request(1, {})).after_s
    assert set(again.plan.speeds_ppm) == {1_000_000}


@pytest.mark.parametrize(("replicas", "slow"), [(1, {0: 0.9}), (2, {2: 0.7, 6: 0.8}), (4, {1: 0.5, 5: 1.2})])
def test_what_was_compensated_is_left_alone(replicas: int, slow: Mapping[int, float]) -> None:
    """No flapping: the same measurements lead nowhere else, and never to a slower step."""
    asked = request(replicas, slow)
    found = compensate(asked)
    assert found.after_s <= found.before_s
    again = compensate(replace(asked, current=found.plan, num_replicas=len(found.plan.replicas)))
    assert again.gain < 0.01
    assert found.plan.global_batch_size == 256


def test_a_transfer_that_does_not_pay_in_time_is_not_made() -> None:
    slow_links = replace(HARDWARE, scale_up=Link(bytes_per_s=4e10))
    asked = request(1, {3: 2 / 3}, sequences=1, hardware=slow_links)
    assert compensate(asked).moved_bytes > 0
    found = compensate(replace(asked, horizon_steps=1))
    assert found.moved_bytes == 0 and "not worth it within 1 steps" in found.line


def test_the_log_line_says_what_and_how_much() -> None:
    found: Compensation = compensate(request(1, {3: 2 / 3}))
    assert "\n" not in found.line and "predicted gain 3" in found.line and "batch shares by speed: step" in found.line


def test_a_plan_is_needed() -> None:
    with pytest.raises(ValueError, match="plan in force"):
        compensate(replace(request(1, {}), current=None))


def test_merging_keeps_what_everybody_holds() -> None:
    plan = current(request(4, {}))
    merged = merge_replicas(plan, dict.fromkeys(range(4), 0) | dict.fromkeys(range(4, 8), 1))
    assert merged.replicas == ((0, 1, 2, 3), (4, 5, 6, 7)) and merged.holders is plan.holders
    assert [lane.replica for lane in merged.lanes] == [0] * 4 + [1] * 4
    assert merge_replicas(plan, {slot: slot for slot in range(8)}) is plan


def test_watts_of_the_domain_help_the_slow_slot() -> None:
    def board(slot: int, max_w: int) -> PowerSlot:
        return PowerSlot(slot=slot, domain=0, curve=boosted(700, 910), default_w=700, min_w=200, max_w=max_w)

    boost = PowerBoost([board(slot, 910) for slot in range(SLOTS)], budgets_w={0: 8 * 700 + 210})
    found = compensate(request(1, {3: 0.8}), boost=boost)
    assert found.lever == "power" and found.speeds_ppm[3] > 810_000 and boost.latest is not None
    assert found.after_s < compensate(request(1, {3: 0.8})).after_s
    full = PowerBoost([board(slot, 700) for slot in range(SLOTS)], budgets_w={0: 8 * 700})
    assert compensate(request(1, {3: 0.8}), boost=full).speeds_ppm[3] <= 801_000


def test_replicas_keep_pace_with_each_other_and_their_lanes_with_their_slots() -> None:
    """The replica with the slow slot hands sequences to the other one, the slow slot most of them."""
    found = compensate(request(2, {3: 2 / 3}), levers=("batch", "cuts"))
    lanes = {lane.slots[0]: lane.num_sequences for lane in found.plan.lanes}
    assert sum(lanes[slot] for slot in range(4)) < 0.96 * sum(lanes[slot] for slot in range(4, 8))
    assert lanes[3] == pytest.approx(lanes[0] * 2 / 3, abs=2.5)
    assert found.ideal_s / found.after_s > 0.95


def test_a_batch_is_shared_by_pace_in_the_proportions_of_now() -> None:
    lanes = tuple(Lane(slot // 2, (slot,), share) for slot, share in enumerate((8, 4, 6, 6)))
    even = share_by_pace(lanes, (2.0, 1.0))
    kept = share_by_pace(lanes, (2.0, 1.0), [8, 4, 6, 6])
    assert [lane.num_sequences for lane in even] == [4, 4, 8, 8]
    assert [lane.num_sequences for lane in kept] == [6, 2, 8, 8]
    empty = tuple(replace(lane, num_sequences=share) for lane, share in zip(lanes, (0, 0, 6, 6), strict=True))
    assert sum(lane.num_sequences for lane in share_by_pace(empty, (0.0, 1.0), [0, 0, 6, 6])) == 12
