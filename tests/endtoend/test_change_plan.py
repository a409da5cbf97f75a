"""A live change of layout: training goes on under any other plan, and its numbers are those of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nep.planning.cluster import Cluster
from nep.planning.cost.profiles import PROFILES
from nep.planning.cost.workload import Workload
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.search.make import make_plan
from nep.planning.search.request import Limits, PlanRequest
from nep.planning.shapes import preset
from tests.endtoend.conftest import BATCH, SEQ_LEN, SmallJob


def _plan(num_slots: int, num_replicas: int, limits: Limits, seed: int) -> Plan:
    """For loads that only this plan has seen."""
    shape = preset("debug")
    loads = np.random.default_rng(seed).gamma(1.0, size=(shape.num_moe_layers, shape.num_experts))
    return make_plan(
        PlanRequest(
            cluster=Cluster.uniform(num_slots, num_slots),
            shape=shape,
            workload=Workload(global_batch_size=BATCH, micro_batch_size=2, seq_len=SEQ_LEN, parameter_bytes=8),
            hardware=PROFILES["h100-sxm"],
            loads=ExpertLoads(mean=loads),
            num_replicas=num_replicas,
            limits=limits,
        )
    ).plan


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of plans for four slots that have little in common."""
    folder = tmp_path_factory.mktemp("plans")
    made = {
        "lanes": _plan(4, 1, Limits(max_tp=2), 1),
        "replicas": _plan(4, 2, Limits(), 2),
        "copies": _plan(4, 1, Limits(physical_experts=13, fractions=False), 3),
    }
    for name, plan in made.items():
        (folder / name).write_text(plan.canonical_json())
    return {name: folder / name for name in made}


@pytest.mark.parametrize("order", [("lanes", "replicas", "copies"), ("copies", "lanes", "replicas")])
def test_plans_may_change_while_training(
    small_job: SmallJob, plans: dict[str, Path], tmp_path: Path, order: tuple[str, ...]
) -> None:
    changes = [f"{step}={plans[name]}" for step, name in zip((1, 2, 4), order, strict=True)]
    outcome = small_job.run(4, *(word for change in changes for word in ("--change-plan", change)), folder=tmp_path)
    assert outcome.result is not None
    assert outcome.result["layout"] == 4, "the first plan and three changes"
    assert not outcome.result["recovery_s"]


@pytest.mark.parametrize("failure", ["1@3:kill@recover", "0@2:kill@return", "3@3:kill@forward"])
def test_a_slot_that_dies_around_a_change_costs_nothing(
    small_job: SmallJob, plans: dict[str, Path], tmp_path: Path, failure: str
) -> None:
    """While state moves, just before and just after."""
    outcome = small_job.run(4, "--change-plan", f"2={plans['lanes']}", "--fail", failure, folder=tmp_path)
    assert outcome.result is not None and len(outcome.result["recovery_s"]) == 1


def test_a_plan_that_no_longer_fits_is_named_and_left(
    small_job: SmallJob, plans: dict[str, Path], tmp_path: Path
) -> None:
    outcome = small_job.run(4, "--change-plan", f"4={plans['lanes']}", "--fail", "2@2", folder=tmp_path)
    assert "no change of plan after step 4" in outcome.output
    assert "slots [0, 1, 2, 3] must be [0, 1, 3], all that this job runs on" in outcome.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lanes", "must be STEP=FILE"),
        ("6={lanes}", "must be a step of this job but the last, 1 to 5"),
        ("2=missing.json", "missing.json"),
    ],
)
def test_bad_changes_are_refused_before_anything_starts(
    small_job: SmallJob, plans: dict[str, Path], tmp_path: Path, change: str, message: str
) -> None:
    outcome = small_job.run(1, "--change-plan", change.format(**plans), folder=tmp_path, check=False)
    assert outcome.returncode == 2 and message in outcome.output
