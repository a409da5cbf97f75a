"""The planner of watts: never above a limit, no more than needed, and as near to the pace as can be."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cluster import Cluster
from nep.planning.planner import plan_after_failure, plan_from_scratch
from nep.planning.power import PPM, PowerSlot, domain_budgets, needed_by_plan, needed_speeds, plan_watts
from nep.planning.shapes import parameter_lines, preset
from nep.planning.speed_curve import A40, V100, SpeedCurve, boosted

BOOST = boosted(700, 910)
FULL = -(-8 * PPM // 7)
"""Speed with which 7 slots do the work of 8."""


def slot(number: int, needed: int = PPM, domain: int = 0, **other: object) -> PowerSlot:
    numbers = {"default_w": 700, "min_w": 200, "max_w": 910} | other
    return PowerSlot(slot=number, domain=domain, curve=BOOST, needed_ppm=needed, **numbers)  # type: ignore[arg-type]


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[PowerSlot], dict[int, int]]:
    slots = []
    for number in range(draw(st.integers(1, 9))):
        curve = draw(st.sampled_from([V100, A40, BOOST]))
        least = draw(st.integers(curve.lowest_w - 40, curve.lowest_w + 60))
        default = draw(st.integers(max(least, curve.lowest_w), curve.highest_w + 30))
        slots.append(
            PowerSlot(
                slot=number,
                domain=draw(st.integers(0, 2)),
                curve=curve,
                min_w=least,
                default_w=default,
                max_w=default + draw(st.integers(0, 300)),
                needed_ppm=draw(st.sampled_from([0, 300_000, 875_000, PPM, 1_050_000, FULL, 2_000_000])),
                speed_ppm=draw(st.sampled_from([PPM, 700_000, 1_010_000])),
            )
        )
    budgets = {}
    for domain in {one.domain for one in slots}:
        own = [one for one in slots if one.domain == domain]
        low, high = sum(one.lowest_w for one in own), sum(one.max_w for one in own)
        if draw(st.booleans()):
            budgets[domain] = draw(st.integers(low, high + 50))
    return slots, budgets


@given(questions())
def test_never_above_a_limit_or_a_budget(question: tuple[list[PowerSlot], dict[int, int]]) -> None:
    slots, budgets = question
    plan = plan_watts(slots, budgets_w=budgets)
    for one in slots:
        assert type(plan.limits_w[one.slot]) is int
        assert one.min_w <= plan.limits_w[one.slot] <= one.max_w
        assert plan.speeds_ppm[one.slot] == one.speed_at(plan.limits_w[one.slot])
    for domain in {one.domain for one in slots}:
        own = [one for one in slots if one.domain == domain]
        budget = budgets.get(domain, sum(one.default_w for one in own))
        assert sum(plan.limits_w[one.slot] for one in own) <= budget
    assert plan.pace_ppm == min(
        [plan.speeds_ppm[one.slot] * PPM // one.needed_ppm for one in slots if one.needed_ppm], default=PPM
    )


@given(questions())
def test_no_plan_has_a_better_pace_and_no_watt_is_wasted(question: tuple[list[PowerSlot], dict[int, int]]) -> None:
    slots, budgets = question
    plan = plan_watts(slots, budgets_w=budgets)
    pace = min(plan.pace_ppm, PPM)
    if pace < PPM:
        # A millionth more is out of reach: the lowest limits for it break a board's or a domain's limit.
        lowest = {one.slot: one.watts_for(-(-one.needed_ppm * (pace + 1) // PPM)) for one in slots}
        assert any(watts is None for watts in lowest.values()) or any(
            sum(lowest[one.slot] or 0 for one in slots if one.domain == domain)
            > budgets.get(domain, sum(one.default_w for one in slots if one.domain == domain))
            for domain in {one.domain for one in slots}
        )
    for one in slots:
        limit = plan.limits_w[one.slot]
        if limit > one.default_w:
            # Raised only as far as the pace asks.
            assert one.speed_at(limit - 1) < -(-one.needed_ppm * pace // PPM)
        if limit < one.default_w:
            # Lowered only where the domain's budget is used up.
            own = [other for other in slots if other.domain == one.domain]
            budget = budgets.get(one.domain, sum(other.default_w for other in own))
            assert sum(plan.limits_w[other.slot] for other in own) == budget


@given(questions())
def test_the_order_of_slots_does_not_matter(question: tuple[list[PowerSlot], dict[int, int]]) -> None:
    slots, budgets = question
    assert plan_watts(slots, budgets_w=budgets) == plan_watts(slots[::-1], budgets_w=budgets)


def test_brute_force_finds_nothing_better() -> None:
    curve = SpeedCurve(((10, 0.4), (14, 0.8), (18, 1.0), (22, 1.1)), "test")
    for needs, budget in itertools.product(
        ((PPM, 1_080_000, 900_000), (700_000, 1_100_000, 600_000)), (42, 50, 54, 60)
    ):
        slots = [
            PowerSlot(slot=number, domain=0, curve=curve, min_w=10, default_w=18, max_w=22, needed_ppm=need)
            for number, need in enumerate(needs)
        ]
        paces = {}
        for limits in itertools.product(range(10, 23), repeat=3):
            if sum(limits) <= budget:
                pace = min(
                    one.speed_at(limit) * PPM // one.needed_ppm for one, limit in zip(slots, limits, strict=True)
                )
                paces[limits] = min(pace, PPM)
        plan = plan_watts(slots, budgets_w={0: budget})
        assert min(plan.pace_ppm, PPM) == max(paces.values())


@pytest.mark.parametrize("curve", [V100, A40, BOOST])
def test_the_lowest_limit_for_a_speed_is_the_lowest(curve: SpeedCurve) -> None:
    top = curve.highest_w
    one = PowerSlot(slot=0, domain=0, curve=curve, default_w=top, min_w=curve.lowest_w, max_w=top, speed_ppm=990_007)
    for limit in range(curve.lowest_w, top + 1):
        speed = one.speed_at(limit)
        # Curves rise by more than a millionth a watt.
        assert one.watts_for(speed) == limit
        assert limit == top or one.watts_for(speed + 1) == limit + 1
    assert one.watts_for(one.speed_at(top) + 1) is None


def test_seven_slots_keep_the_pace_of_eight_with_headroom() -> None:
    slots = [slot(number, FULL) for number in range(7)] + [slot(8 + number, domain=1) for number in range(8)]
    plan = plan_watts(slots, budgets_w={0: 7 * 910})
    assert plan.keeps_pace
    assert plan.pace_before_ppm == 874_999
    assert plan.gain_ppm == pytest.approx(8 / 7 * PPM, abs=3)
    assert set(plan.changes_w) == set(range(7))
    damaged, healthy = plan.domains
    assert damaged.bound == "none" and healthy.after_w == healthy.before_w == 5600
    # 8/7 of the speed for 1.263 times the power: 9.5 % less for each watt.
    assert damaged.after_w == 7 * 884
    assert damaged.efficiency_ppm == pytest.approx(905_000, abs=1000)


def test_a_dead_slots_budget_is_what_a_full_domain_has() -> None:
    slots = [slot(number, FULL) for number in range(7)]
    whole = domain_budgets(dict.fromkeys(range(8), 700), dict.fromkeys(range(8), 0))
    assert whole == {0: 5600}
    plan = plan_watts(slots, budgets_w=whole)
    assert set(plan.limits_w.values()) == {800}
    assert plan.domains[0].bound == "domain budget"
    assert plan.pace_ppm == 955_348
    drawing = domain_budgets(dict.fromkeys(range(8), 700), dict.fromkeys(range(8), 0), failed_draw_w={7: 140})
    assert set(plan_watts(slots, budgets_w=drawing).limits_w.values()) == {780}


def test_slots_with_slack_give_their_watts_away() -> None:
    slots = [slot(number, FULL) for number in range(4)] + [slot(number, 700_000) for number in range(4, 8)]
    plan = plan_watts(slots)
    assert plan.keeps_pace
    assert {plan.limits_w[number] for number in range(4)} == {884}
    assert {plan.limits_w[number] for number in range(4, 8)} == {516}
    # Slack is shared: the fastest gives first.
    uneven = [slot(0, FULL), slot(1, 900_000), slot(2, 700_000)]
    plan = plan_watts(uneven)
    assert plan.limits_w[0] == 884 and sum(plan.limits_w.values()) == 2100
    # A watt makes one part in a thousand of speed here.
    assert plan.speeds_ppm[1] / 900_000 == pytest.approx(plan.speeds_ppm[2] / 700_000, abs=2e-3)
    assert plan.limits_w[2] < plan.limits_w[1] < 700


def test_a_pace_that_one_domain_cannot_reach_costs_no_watts_elsewhere() -> None:
    slots = [slot(number, FULL, max_w=770) for number in range(7)] + [slot(8 + number, FULL, 1) for number in range(7)]
    plan = plan_watts(slots, budgets_w={0: 7 * 910, 1: 7 * 910})
    assert plan.domains[0].bound == "slot limit" and plan.domains[0].binding_slots == tuple(range(7))
    assert plan.domains[1].bound == "another domain"
    assert {plan.limits_w[number] for number in range(7)} <= {769, 770}
    assert {plan.limits_w[8 + number] for number in range(7)} <= {769, 770}


def test_a_healthy_job_keeps_its_defaults() -> None:
    plan = plan_watts([slot(number) for number in range(8)])
    assert plan.changes_w == {} and plan.gain_ppm == PPM and plan.keeps_pace


def test_needed_speeds_leave_room_for_what_no_clock_shortens() -> None:
    needed = needed_speeds({0: 0.8, 1: 0.4}, target_s=1.0, other_s={0: 0.2, 1: 0.5})
    assert needed == {0: PPM, 1: 800_000}
    with pytest.raises(ValueError, match="power cannot help there"):
        needed_speeds({0: 0.8}, target_s=1.0, other_s={0: 1.0})


def test_needed_by_plan_counts_work() -> None:
    lines = parameter_lines(preset("debug"))
    cluster = Cluster.uniform(8, 4)
    plan = plan_from_scratch(cluster, lines, num_replicas=2, global_batch_size=64)
    assert set(needed_by_plan(plan, healthy_slots=8).values()) == {PPM}
    damaged = plan_after_failure(plan, cluster.fail([1]), lines)
    needed = needed_by_plan(damaged, healthy_slots=8)
    for index, replica in enumerate(damaged.replicas):
        sequences = sum(lane.num_sequences for lane in damaged.lanes if lane.replica == index)
        assert {needed[number] for number in replica} == {-(-sequences * PPM // (len(replica) * 8))}
    with pytest.raises(ValueError, match="at least 7, the slots of plan"):
        needed_by_plan(damaged, healthy_slots=6)


def test_input_that_cannot_be_is_named() -> None:
    for numbers, why in (
        ({"min_w": 800}, "min_w .800. <= default_w .700."),
        ({"needed_ppm": -1}, "needed_ppm .-1."),
        ({"speed_ppm": 0}, "leave out a slot that stands still"),
        ({"default_w": 300}, "where its curve begins"),
    ):
        with pytest.raises(ValueError, match=why):
            PowerSlot(
                **({"slot": 0, "domain": 0, "curve": BOOST, "default_w": 700, "min_w": 200, "max_w": 910} | numbers)
            )
    with pytest.raises(ValueError, match="no power to plan"):
        plan_watts([])
    with pytest.raises(ValueError, match=r"slots \[3\] are listed twice"):
        plan_watts([slot(3), slot(3)])
    with pytest.raises(ValueError, match=r"budgets_w\[0\] .799. must be at least 800 W"):
        plan_watts([slot(0), slot(1)], budgets_w={0: 799})


def test_many_slots_take_no_time() -> None:
    def seconds(count: int) -> float:
        slots = [slot(number, FULL if number % 72 < 36 else 700_000, number // 72) for number in range(count)]
        best = []
        for _ in range(3):
            begin = time.process_time()
            plan_watts(slots)
            best.append(time.process_time() - begin)
        return min(best)

    assert seconds(4096) < 16 * seconds(1024)
