"""The search for a plan: laws that every plan keeps, and what is decided in plain cases."""

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nep.planning.cluster import Cluster, Slot
from nep.planning.cost.memory import step_memory
from nep.planning.cost.profiles import PROFILES
from nep.planning.cost.step_time import step_time
from nep.planning.cost.workload import Workload
from nep.planning.holding.assembly import ExpertAxes, assemble, hold_experts
from nep.planning.holding.dealing import deal_cut
from nep.planning.holding.lanes import hold_dense, make_lanes
from nep.planning.holding.replica_cuts import Prices
from nep.planning.loads import ExpertLoads
from nep.planning.placement.problem import Problem
from nep.planning.placement.whole import plain_whole
from nep.planning.plan import Plan
from nep.planning.search.changes import count_parts
from nep.planning.search.make import make_plan
from nep.planning.search.request import Limits, Planned, PlanRequest
from nep.planning.shapes import ModelShape, parameter_lines
from nep.planning.validation import check_plan, check_runnable
from tests.unit.planning.strategies import small_shape, units_of

LAWS = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@st.composite
def _loads(draw: st.DrawFn, shape: ModelShape) -> ExpertLoads | None:
    """None, zeros, one hot expert, half of them idle, or just uneven."""
    size = (shape.num_moe_layers, shape.num_experts)
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from(("none", "zero", "hot", "half", "uneven")))
    if kind == "none":
        return None
    mean = {
        "zero": np.zeros(size),
        "hot": np.where(np.arange(size[1]) == 0, 1000.0, 1.0) * np.ones(size),
        "half": np.where(rng.random(size) < 0.5, 0.0, rng.gamma(1.0, size=size)),
        "uneven": rng.gamma(1.0, size=size),
    }[kind]
    return ExpertLoads(mean=mean)


@st.composite
def _clusters(draw: st.DrawFn) -> Cluster:
    """Any number of slots, uneven memory, unequal speeds; some do not work, at least one does."""
    num_slots, per_node = draw(st.sampled_from((1, 2, 3, 5, 7, 8, 13))), draw(st.sampled_from((1, 3, 4)))
    memory = draw(st.sampled_from((None, 4_000_000, 12_000_000, 40_000_000)))
    healths = ("healthy",) * 6 + ("failed", "draining", "idle", "spare")

    def slot(index: int) -> Slot:
        return Slot(
            index,
            index // per_node,
            "healthy" if index == 0 else draw(st.sampled_from(healths)),
            speed_ppm=draw(st.sampled_from((1_000_000, 1_000_000, 700_000, 330_000))),
            memory_bytes=None if memory is None else memory * draw(st.sampled_from((10, 10, 7))) // 10,
        )

    return Cluster(tuple(slot(index) for index in range(num_slots)))


@st.composite
def _requests(draw: st.DrawFn) -> PlanRequest:
    shape = small_shape(
        draw(st.sampled_from((1, 2, 3, 5, 8, 31))),
        draw(st.sampled_from((1, 2, 7))),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    cluster = draw(_clusters())
    healthy = len(cluster.healthy)
    return PlanRequest(
        cluster=cluster,
        shape=shape,
        workload=Workload(
            global_batch_size=draw(st.sampled_from((1, 3, 16, 40))), micro_batch_size=1, seq_len=128, recompute=True
        ),
        hardware=PROFILES["h100-sxm"],
        loads=draw(_loads(shape)),
        num_replicas=draw(st.sampled_from((None, *range(1, min(3, healthy) + 1)))),
        redundancy=draw(st.sampled_from(("device", "device", "none"))),
        limits=Limits(
            fractions=draw(st.booleans()) or draw(st.booleans()),
            physical_experts=draw(st.sampled_from((None, None, shape.num_experts + 3))),
            max_tp=draw(st.sampled_from((1, 1, 2))),
        ),
    )


@st.composite
def _later(draw: st.DrawFn, request: PlanRequest, plan: Plan) -> PlanRequest:
    """The request some time later: slots fail, slow down and come back, loads drift."""

    def changed(slot: Slot) -> Slot:
        what = draw(st.sampled_from(("same",) * 6 + ("fails", "slow", "back")))
        if what == "fails" and slot.index != plan.slots[0] and slot.health == "healthy":
            return replace(slot, health="failed")
        if what == "slow":
            return replace(slot, speed_ppm=500_000)
        if what == "back":
            return replace(slot, health="healthy")
        return slot

    return replace(
        request,
        cluster=Cluster(tuple(changed(slot) for slot in request.cluster.slots)),
        loads=draw(_loads(request.shape)) if draw(st.booleans()) else request.loads,
        current=plan,
        num_replicas=None if request.num_replicas is None else len(plan.replicas),
        horizon_steps=draw(st.sampled_from((1, 1000))),
    )


def _planned(request: PlanRequest) -> Planned | None:
    """None if nothing fits: then the message has to say how many bytes are missing, and what helps."""
    try:
        return make_plan(request)
    except ValueError as error:
        message = str(error)
        known = "num_replicas" in message
        assert known or ("bytes" in message and any(remedy in message for remedy in ("add slots", "change less")))
        return None


def _check_laws(request: PlanRequest, planned: Planned) -> None:
    plan, report, lines = planned.plan, planned.report, parameter_lines(request.shape)
    check_plan(plan, lines)
    check_runnable(plan, lines, slots=plan.slots, global_batch_size=request.workload.global_batch_size)
    assert set(plan.slots) <= set(request.cluster.healthy)
    assert plan.global_batch_size == request.workload.global_batch_size
    holding = units_of(plan.holders)
    assert all(units <= holding[where] for where, units in units_of(plan.owners).items()), "owners hold what they own"
    if plan.redundancy == "device" and len(plan.slots) > 1:
        assert plan.unprotected(lines) == []
    _check_memory(request, planned)
    _check_transfers(request, planned)
    assert make_plan(request).plan.canonical_json() == plan.canonical_json()
    chosen = [one for one in report.alternatives if one.chosen]
    assert len(chosen) == 1 and chosen[0].step_s == report.predicted.total
    assert 0 < report.balance <= 1 + 1e-9
    assert report.bound_s <= report.placement_s * (1 + 1e-9)
    assert (report.skipped is not None) == (plan is request.current)
    assert [figures.slot for figures in report.slots] == list(plan.slots)


def _check_memory(request: PlanRequest, planned: Planned) -> None:
    """Nobody needs more than its part, in a step or while the layout changes."""
    limits = {
        slot.index: int(0.9 * (slot.memory_bytes or PROFILES["h100-sxm"].memory_bytes or 0))
        for slot in request.cluster.slots
    }
    if planned.report.copies is None:  # with copies, activations depend on how tokens are split
        memory = step_memory(planned.plan, shape=request.shape, workload=request.workload, loads=request.loads)
        assert memory.excess(dict(limits)) == {}
    for figures in planned.report.slots:
        assert figures.memory_bytes <= limits[figures.slot]
    if request.current is not None:
        parts = count_parts(
            request.current,
            planned.plan,
            lines=parameter_lines(request.shape),
            workload=request.workload,
            memory_bytes=dict(limits),
        )
        assert parts == planned.report.change_parts


def _check_transfers(request: PlanRequest, planned: Planned) -> None:
    """Never anything from or to a failed slot, or to one that the plan leaves out."""
    failed = {slot.index for slot in request.cluster.slots if slot.health == "failed"}
    if request.current is None:
        assert planned.report.transfers == {}
    for transfer in planned.report.transfers.values():
        for piece in transfer:
            assert piece.src not in failed and piece.dst in planned.plan.slots and piece.src != piece.dst


def _plain(request: PlanRequest, plan: Plan) -> Plan | None:
    """Whole experts as others place them, on the replicas of a plan; None if memory has no room for them."""
    lines = parameter_lines(request.shape)
    experts = ExpertAxes.of(lines)
    assert experts is not None
    loads = request.loads or ExpertLoads.uniform(len(experts.names), experts.num_experts)
    speeds = request.cluster.speeds_ppm
    dealt = []
    for slots in plan.replicas:
        cost = Prices.unknown(experts, speeds).cost_of(slots)
        problem = Problem.of(loads, speeds=[speeds[slot] / 1e6 for slot in slots], cost=cost)
        state, complete = plain_whole(problem)
        assert complete.all()
        dealt.append(deal_cut(state.cut(), experts.units_per_expert))
    lanes = make_lanes(
        [(index, (slot,)) for index, slots in enumerate(plan.replicas) for slot in slots],
        speeds,
        plan.global_batch_size,
    )
    plain = assemble(
        replicas=plan.replicas,
        lanes=lanes,
        cuts=hold_dense(lanes, speeds, lines) | hold_experts(experts, plan.replicas, dealt),
        cluster=request.cluster,
        lines=lines,
        redundancy=request.redundancy,
    )
    memory = step_memory(plain, shape=request.shape, workload=request.workload, loads=request.loads)
    limits = {slot.index: slot.memory_bytes for slot in request.cluster.slots}
    enough = {slot: None if limit is None else int(0.9 * limit) for slot, limit in limits.items()}
    return None if memory.excess(enough) else plain


@LAWS
@given(st.data())
def test_plans_from_scratch_keep_the_laws_and_are_no_worse_than_plain_whole_experts(data: st.DataObject) -> None:
    request = data.draw(_requests())
    planned = _planned(request)
    if planned is None:
        return
    _check_laws(request, planned)
    plain = _plain(request, planned.plan)
    if plain is not None:
        theirs = step_time(
            plain,
            shape=request.shape,
            workload=request.workload,
            cluster=request.cluster,
            hardware=request.hardware,
            loads=request.loads,
        )
        assert planned.report.predicted.total <= theirs.total * (1 + 1e-9)


@settings(LAWS, max_examples=6)  # each makes up to six plans
@given(st.data())
def test_plans_that_grow_out_of_others_keep_the_laws(data: st.DataObject) -> None:
    request = data.draw(_requests())
    planned = _planned(request)
    for _ in range(2):
        if planned is None:
            return
        request = data.draw(_later(request, planned.plan))
        planned = _planned(request)
        if planned is not None:
            _check_laws(request, planned)
