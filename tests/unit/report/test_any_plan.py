"""Whatever the planner answers can be shown, written and read again."""

import dataclasses
import json
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nep.planning.cluster import Cluster, Slot
from nep.planning.cost.profiles import PROFILES
from nep.planning.cost.workload import Workload
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.search.make import make_plan
from nep.planning.search.request import Limits, Planned, PlanRequest
from nep.planning.shapes import preset
from nep.report.plan_export import FORMATS, export_plan
from nep.report.plan_html import plan_page
from nep.report.plan_json import plan_object
from nep.report.plan_table import plan_text

HEALTH = ["healthy"] * 6 + ["failed", "draining", "idle", "spare"]
SPEEDS = [1_000_000] * 4 + [700_000, 333_333]


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    number, per_node = draw(st.integers(1, 10)), draw(st.integers(1, 5))
    slots = tuple(
        Slot(
            index,
            index // per_node,
            draw(st.sampled_from(HEALTH)),
            draw(st.sampled_from(SPEEDS)),
            draw(st.sampled_from([None, 10**9, 80 * 10**9])),
        )
        for index in range(number)
    )
    shape = dataclasses.replace(preset("debug"), num_experts=draw(st.sampled_from([1, 3, 8, 13])), top_k=1)
    loads = None
    if draw(st.booleans()):
        counts = np.random.default_rng(draw(st.integers(0, 5))).integers(0, 50, (3, 2, shape.num_experts))
        loads = ExpertLoads.from_counts(counts * draw(st.integers(0, 1)))
    copies = draw(st.sampled_from([None, None, shape.num_experts, shape.num_experts + number]))
    return PlanRequest(
        cluster=Cluster(slots),
        shape=shape,
        workload=Workload(global_batch_size=draw(st.integers(1, 20)), micro_batch_size=2, seq_len=16),
        hardware=PROFILES["h100-sxm"],
        loads=loads,
        num_replicas=draw(st.sampled_from([1, 1, 2, 3, None])),
        redundancy=draw(st.sampled_from(["device", "none"])),
        limits=Limits(
            fractions=copies is None and draw(st.booleans()),
            physical_experts=copies,
            max_tp=draw(st.sampled_from([1, 1, 2])),
        ),
    )


def is_one_line(error: ValueError) -> bool:
    return "\n" not in str(error) and len(str(error)) > 10


def shown(request: PlanRequest) -> Planned | None:
    """The answer, after everything that can be made of it; None if there is no plan, said in one line."""
    try:
        planned = make_plan(request)
    except ValueError as refused:
        if not is_one_line(refused):
            raise
        return None
    assert f"plan {planned.plan.number} " in plan_text(request, planned, width=80)
    assert "NaN" not in plan_page(request, planned)
    value = json.loads(json.dumps(plan_object(request, planned), allow_nan=False))
    assert value["predicted"]["step_s"] > 0 and math.isfinite(value["balance"])
    assert {slot["slot"] for slot in value["slots"]} == set(planned.plan.slots) <= set(request.cluster.healthy)
    assert Plan.from_json(planned.plan.canonical_json()) == planned.plan
    for form in FORMATS:
        try:
            json.loads(export_plan(planned.plan, request.shape, form).text)
        except ValueError as refused:
            if not is_one_line(refused):
                raise
    return planned


@settings(max_examples=20)
@given(requests(), st.sets(st.integers(0, 9), max_size=3))
def test_from_scratch_and_onward(request: PlanRequest, dying: set[int]) -> None:
    planned = shown(request)
    if planned is not None:
        known = {slot.index for slot in request.cluster.slots}
        cluster = request.cluster.fail(dying & known)
        shown(dataclasses.replace(request, cluster=cluster, current=planned.plan))
