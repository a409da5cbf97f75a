"""The whole loop on CPUs: a slot fails, watts are planned, limits are set, and the damaged replica keeps pace."""

from dataclasses import replace

import pytest

from models import mixtral
from nep.planning.batch import split_sequences
from nep.planning.cluster import Cluster
from nep.planning.cost.workload import Workload
from nep.planning.plan import Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.power import PPM, needed_by_plan, needed_speeds, plan_watts
from nep.planning.shapes import parameter_lines
from nep.power.controller import PowerController
from nep.power.health import health_signals
from nep.testing.emulation.cases import IDEAL, MIXTRAL_LIKE, QUICK_CASES
from nep.testing.emulation.links import Role
from nep.testing.emulation.powered import PoweredSpeed
from nep.testing.emulation.run import EmulatedRun, run_emulated
from nep.testing.emulation.setting import Emulation, SlotFailure

SHAPE = replace(MIXTRAL_LIKE, num_layers=1)
LINES = parameter_lines(SHAPE)
CLUSTER = Cluster.uniform(16, 8)
NODES = {slot.index: slot.node for slot in CLUSTER.slots}
# 56 sequences for each replica: 7 a slot of 8, 8 a slot of 7.
BATCH = 112
MESSAGES: frozenset[Role] = frozenset({"dispatch", "transfer", "vote"})
COMPUTE = ("attention", "dense", "expert_gemm", "optimizer")


def emulation(powered: PoweredSpeed, free: frozenset[Role]) -> Emulation:
    workload = Workload(
        global_batch_size=BATCH, micro_batch_size=8, seq_len=4096, grad_sync="point_to_point", overlap=True
    )
    return Emulation(
        shape=SHAPE,
        workload=workload,
        hardware=IDEAL,
        cluster=CLUSTER,
        build=mixtral.build,
        speed=powered,
        free=free,
    )


def undamaged() -> Plan:
    return plan_from_scratch(CLUSTER, LINES, num_replicas=2, global_batch_size=BATCH)


def recovered(plan: Plan, cluster: Cluster) -> Plan:
    """What recovery makes, with the batch shared out by replicas: watts make up for the slot, not the other replica."""
    after = plan_mirrors(plan_after_failure(plan, cluster, LINES), cluster, LINES)
    sizes = [len(after.replicas[lane.replica]) for lane in after.lanes]
    shares = split_sequences(BATCH, [56 // size for size in sizes])
    return replace(
        after, lanes=tuple(replace(lane, num_sequences=share) for lane, share in zip(after.lanes, shares, strict=True))
    )


def pace(run: EmulatedRun) -> float:
    """Steps per second with the last plan over those with the first."""
    return run.timeline_s(run.steps[0].plan) / run.timeline_s()


def budgets(powered: PoweredSpeed, failed: int) -> dict[int, int]:
    """The damaged node may draw what its live boards' highest limits are; the other one its default limits."""
    most = sum(device.range_w().max_w for slot, device in powered.devices.items() if slot < 8 and slot != failed)
    return {0: most, 1: 8 * 700}


@pytest.mark.parametrize(("headroom", "least", "most"), [(1.0, 0.865, 0.88), (1.3, 0.99, 1.0)])
def test_seven_slots_keep_the_pace_of_eight(headroom: float, least: float, most: float) -> None:
    """Where computing is all there is, 8/7 of the speed is all that is needed; 1.3 times the power have it."""
    powered = PoweredSpeed.uniform(range(16), headroom=headroom)

    def answer(plan: Plan, cluster: Cluster) -> Plan:
        after = recovered(plan, cluster)
        needed = needed_by_plan(after, healthy_slots=16)
        watts = plan_watts(powered.power_slots(needed, NODES), budgets_w=budgets(powered, 3))
        assert controller.set_limits(watts.limits_w).complete
        return replace(after, speeds_ppm=tuple(watts.speeds_ppm[slot] for slot in after.slots))

    with PowerController(powered.devices) as controller:
        run = run_emulated(
            undamaged(),
            emulation(powered, MESSAGES),
            steps=4,
            schedule=[SlotFailure(step=3, slot=3)],
            replan=answer,
        )
        limits = dict(powered.limits_w)
    assert least <= pace(run) <= most
    # Healthy slots kept their limits, so they are not slowed by a millionth.
    assert all(limits[slot] == 700 for slot in range(8, 16))
    assert run.busy_s(run.steps[0].plan)[8]["expert_gemm"] == pytest.approx(run.busy_s()[8]["expert_gemm"], rel=1e-9)
    assert set(powered.limits_w.values()) == {700}


@pytest.mark.soak
def test_measured_seconds_make_the_plan_and_the_prediction_holds() -> None:
    """With all messages, which no clock shortens: the planner is told what it needs and says what will come of it."""
    powered = PoweredSpeed.uniform(range(16))
    schedule = [SlotFailure(step=3, slot=3)]
    before = run_emulated(undamaged(), emulation(powered, frozenset()), steps=4, schedule=schedule, replan=recovered)
    healthy_s, damaged_s = before.timeline_s(before.steps[0].plan), before.timeline_s()
    compute = {
        slot: sum(kinds.get(kind, 0.0) for kind in COMPUTE) for slot, kinds in before.busy_s().items() if slot < 8
    }
    other = {slot: damaged_s - seconds for slot, seconds in compute.items()}
    needed = needed_speeds(compute, target_s=healthy_s, other_s=other) | dict.fromkeys(range(8, 16), PPM)
    watts = plan_watts(powered.power_slots(needed, NODES), budgets_w=budgets(powered, 3))
    predicted_s = max(compute[slot] * PPM / watts.speeds_ppm[slot] + other[slot] for slot in compute)
    with PowerController(powered.devices) as controller:
        assert controller.set_limits(watts.limits_w).complete
        after = run_emulated(recovered(undamaged(), CLUSTER.fail([3])), emulation(powered, frozenset()), steps=2)
    assert after.timeline_s() == pytest.approx(predicted_s, rel=0.02)
    assert after.timeline_s() < damaged_s


@pytest.mark.soak  # slept: a machine that does other things spoils it
def test_heat_takes_back_what_cooling_cannot_carry_off() -> None:
    case = replace(QUICK_CASES[0], slots=4, shape=SHAPE, sequences=2)
    powered = PoweredSpeed.uniform(range(4), kelvin_per_w=0.07, tau_s=0.1)
    with PowerController(powered.devices) as controller:
        assert controller.set_limits(dict.fromkeys(range(4), 910)).complete
        run = run_emulated(case.plan(), replace(case.emulation(mixtral.build), speed=powered, free=MESSAGES), steps=8)
        signals = {signal.kind for signal in health_signals(powered.devices[3].read())}
    first, last = run.steps[0].seconds, run.steps[-1].seconds
    assert last > first * 1.02
    assert "throttle" in signals
    assert powered.devices[3].chip.temperature_c < 87
