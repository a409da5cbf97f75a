"""The object of --json: plain, finite, and equal to the report."""

import dataclasses
import json

import numpy as np
import pytest

from nep.planning.cluster import Cluster
from nep.planning.planner import plan_after_failure, plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from nep.report.plan_json import plan_object
from tests.unit.report.planned import planned_of, request_of, whole_plan

LINES = parameter_lines(preset("debug"))


def test_numbers_are_those_of_the_report() -> None:
    cluster = Cluster.uniform(8, 4)
    before = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=8)
    request = request_of(cluster=cluster.fail([3]), current=before)
    plan = plan_after_failure(before, request.cluster, LINES)
    planned = planned_of(request, plan)
    value = json.loads(json.dumps(plan_object(request, planned, notes=["n"], files={"plan": "p"}), allow_nan=False))
    report = planned.report
    assert value["digest"] == plan.digest and value["slots_used"] == list(plan.slots)
    for name in ("predicted", "healthy", "current"):
        step = getattr(report, name)
        assert value[name]["step_s"] == pytest.approx(step.total)
        assert sum(value[name]["parts_s"].values()) == pytest.approx(step.total)
    assert value["predicted"]["waits_for"]["vote"]["resource"] == "latency"
    assert value["bound_s"] <= value["placement_s"] == report.placement_s
    assert [slot["slot"] for slot in value["slots"]] == list(plan.slots)
    assert sum(slot["whole_experts"] + slot["slices"] > 0 for slot in value["slots"]) == 7
    assert set(value["transfers"]) == {"parameters", "state"}
    assert value["transfers"]["parameters"]["bytes"] > 0
    assert value["survival"] == {"1": 1.0, "2": 0.75}
    assert [one["name"] for one in value["considered"]] == ["repair", "wait for repair"]
    assert value["notes"] == ["n"] and value["files"] == {"plan": "p"}


def test_infinity_and_numpy_are_no_json_and_do_not_get_there() -> None:
    request = request_of()
    planned = planned_of(request, whole_plan(request), copies=np.ones((2, 8, 4), dtype=np.int64))
    never = dataclasses.replace(planned.report.alternatives[1], move_s=float("inf"), step_s=float("inf"))
    report = dataclasses.replace(planned.report, alternatives=(never,), moved_bytes=np.int64(3))
    value = json.loads(json.dumps(plan_object(request, dataclasses.replace(planned, report=report)), allow_nan=False))
    assert value["considered"][0]["move_s"] is None
    assert value["copies"] == 64 and value["moved_bytes"] == 3
    assert value["current"] is None
