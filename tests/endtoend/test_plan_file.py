"""Training that begins with a plan from a file: any plan gives the numbers of the single-process reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nep.planning.cluster import Cluster, Slot
from nep.planning.cost.profiles import PROFILES
from nep.planning.cost.workload import Workload
from nep.planning.loads import ExpertLoads
from nep.planning.search.make import make_plan
from nep.planning.search.request import Limits, PlanRequest
from nep.planning.shapes import preset
from tests.endtoend.conftest import BATCH, SEQ_LEN, SmallJob


def _request(speeds: tuple[float, ...], num_replicas: int, limits: Limits) -> PlanRequest:
    """Uneven loads and speeds on one node, so that nothing comes out even."""
    shape = preset("debug")
    loads = np.random.default_rng(5).gamma(1.0, size=(shape.num_moe_layers, shape.num_experts))
    slots = tuple(Slot(index, 0, speed_ppm=round(speed * 1e6)) for index, speed in enumerate(speeds))
    return PlanRequest(
        cluster=Cluster(slots),
        shape=shape,
        workload=Workload(global_batch_size=BATCH, micro_batch_size=2, seq_len=SEQ_LEN, parameter_bytes=8),
        hardware=PROFILES["h100-sxm"],
        loads=ExpertLoads(mean=loads),
        num_replicas=num_replicas,
        limits=limits,
    )


@pytest.mark.parametrize(
    ("speeds", "num_replicas", "limits", "failure"),
    [
        ((1, 0.5, 1, 0.7, 1), 2, Limits(), "1@3:kill@backward"),
        ((1, 1, 0.6, 1), 1, Limits(max_tp=2), "2@4:kill@apply"),
        ((1, 0.7, 1, 1), 1, Limits(physical_experts=12, fractions=False), "1@3:kill@dispatch"),
    ],
    ids=["unequal speeds", "lanes", "expert copies"],
)
def test_an_uneven_plan_trains_like_the_reference_and_survives_a_kill(
    small_job: SmallJob, tmp_path: Path, speeds: tuple[float, ...], num_replicas: int, limits: Limits, failure: str
) -> None:
    plan = make_plan(_request(speeds, num_replicas, limits)).plan
    plan = replace(plan, number=7)  # as if it had grown out of others
    file = tmp_path / "plan.json"
    file.write_text(plan.canonical_json())
    outcome = small_job.run(len(speeds), "--plan", str(file), "--fail", failure, folder=tmp_path / "job")
    assert outcome.result is not None
    assert f"plan 7 from {file}, digest {plan.digest}" in outcome.output
    assert outcome.result["layout"] > 7
    assert outcome.result["unprotected_intervals"] == 0
