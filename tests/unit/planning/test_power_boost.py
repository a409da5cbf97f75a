"""Watts as a lever: speeds under planned limits, from what was measured under those in force."""

from dataclasses import replace

import pytest

from nep.planning.cluster import Cluster
from nep.planning.plan import Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch
from nep.planning.power import PPM, PowerSlot
from nep.planning.power_boost import PowerBoost
from nep.planning.shapes import parameter_lines, preset
from nep.planning.speed_curve import boosted

LINES = parameter_lines(preset("debug"))
CLUSTER = Cluster.uniform(16, 8)
HEALTHY = plan_from_scratch(CLUSTER, LINES, num_replicas=2, global_batch_size=64)


def boost(headroom: float = 1.3, **other: object) -> PowerBoost:
    most = round(700 * headroom)
    slots = [
        PowerSlot(slot=slot, domain=slot // 8, curve=boosted(700, most), default_w=700, min_w=400, max_w=most)
        for slot in range(16)
    ]
    return PowerBoost(slots, **other)  # type: ignore[arg-type]


def damaged() -> Plan:
    return plan_after_failure(HEALTHY, CLUSTER.fail([3]), LINES)


def full(plan: Plan) -> dict[int, int]:
    return dict.fromkeys(plan.slots, PPM)


def test_a_healthy_job_is_left_alone() -> None:
    lever = boost()
    assert lever(HEALTHY, full(HEALTHY)) == full(HEALTHY)
    assert lever.latest is not None and lever.latest.changes_w == {}


def test_the_damaged_replica_gets_its_work_back_whatever_its_share_is_now() -> None:
    lever, plan = boost(budgets_w={0: 7 * 910, 1: 5600}), damaged()
    # Three sequences of the damaged replica's first lane have gone to the other replica.
    lanes = list(plan.lanes)
    for index, more in ((0, -3), (len(lanes) - 1, 3)):
        lanes[index] = replace(lanes[index], num_sequences=lanes[index].num_sequences + more)
    moved = replace(plan, lanes=tuple(lanes))
    speeds = lever(plan, full(plan))
    assert lever(moved, full(moved)) == speeds
    assert all(speeds[slot] == pytest.approx(8 / 7 * PPM, rel=1e-3) for slot in range(8) if slot != 3)
    assert all(speeds[slot] == PPM for slot in range(8, 16))
    assert lever.latest is not None and lever.latest.keeps_pace


def test_what_a_dead_slot_needed_is_for_the_others_of_its_domain() -> None:
    plan = damaged()
    lever, careful = boost(), boost(failed_draw_w=140)
    lever(plan, full(plan))
    careful(plan, full(plan))
    assert lever.latest is not None and careful.latest is not None
    assert lever.latest.limits_w[0] == 800 and careful.latest.limits_w[0] == 780
    assert lever.latest.limits_w[8] == careful.latest.limits_w[8] == 700


def test_speeds_measured_under_raised_limits_ask_for_the_same_limits_again() -> None:
    lever, plan = boost(budgets_w={0: 7 * 910, 1: 5600}), damaged()
    speeds = lever(plan, full(plan))
    assert lever.latest is not None
    limits = dict(lever.latest.limits_w)
    lever.hold(limits)
    assert lever(plan, speeds) == pytest.approx(speeds, rel=1e-5)
    assert all(abs(lever.latest.limits_w[slot] - limit) <= 1 for slot, limit in limits.items())
    # Without being told it would take the boards for fast ones, and lower them.
    other = boost(budgets_w={0: 7 * 910, 1: 5600})
    other(plan, speeds)
    assert other.latest is not None and other.latest.limits_w[0] == 700


def test_a_slow_slot_is_asked_for_its_part() -> None:
    lever = boost(budgets_w={0: 8 * 910, 1: 8 * 910})
    measured = full(HEALTHY) | {5: 900_000}
    speeds = lever(HEALTHY, measured)
    # The replica as a whole lacks a tenth of a slot; cuts follow speeds, so each of its slots makes up for some.
    assert sum(speeds[slot] for slot in range(8)) == pytest.approx(8 * PPM, rel=1e-3)
    assert all(speeds[slot] == PPM for slot in range(8, 16))


def test_a_plan_of_other_slots_is_refused() -> None:
    lever = PowerBoost([PowerSlot(slot=0, domain=0, curve=boosted(700, 910), default_w=700, min_w=400, max_w=910)])
    with pytest.raises(ValueError, match="have no power slot; it knows"):
        lever(HEALTHY, full(HEALTHY))
