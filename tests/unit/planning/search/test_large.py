"""Large jobs: what is alike is worked out once, and nothing is listed piece by piece."""

import random
from collections import Counter
from dataclasses import replace

import pytest

import nep.planning.cost.step_time as step_time
import nep.planning.holding.replica_cuts as replica_cuts
import nep.planning.search.changes as changes
from nep.planning.cluster import Cluster
from nep.planning.cost.profiles import PROFILES
from nep.planning.cost.workload import Workload
from nep.planning.search.make import make_plan
from nep.planning.search.request import PlanRequest
from nep.planning.shapes import parameter_lines, preset
from nep.planning.validation import check_plan

MIXTRAL = preset("mixtral-8x7b")


def _request(num_slots: int) -> PlanRequest:
    return PlanRequest(
        cluster=Cluster.uniform(num_slots, 8),
        shape=MIXTRAL,
        workload=Workload(global_batch_size=4 * num_slots, micro_batch_size=1, seq_len=4096, overlap=True),
        hardware=PROFILES["h200-sxm"],
        num_replicas=num_slots // 8,
    )


def test_each_kind_of_replica_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work follows the kinds of damage, not the slots: 512 of them took minutes, as 1,024 did."""
    request = _request(512)
    before = make_plan(request)
    dead = random.Random(0).sample(range(512), 32)
    kinds = {tuple(slot % 8 for slot in slots if slot in dead) for slots in before.plan.replicas}
    calls: Counter[str] = Counter()

    def counted(module: object, name: str) -> None:
        original = getattr(module, name)

        def count(*args: object, **keywords: object) -> object:
            calls[name] += 1
            return original(*args, **keywords)

        monkeypatch.setattr(module, name, count)

    counted(step_time, "replica_time")
    counted(replica_cuts, "repair")
    counted(replica_cuts, "place")
    counted(changes, "fetch")
    planned = make_plan(replace(request, cluster=request.cluster.fail(dead), current=before.plan))
    check_plan(planned.plan, parameter_lines(MIXTRAL))
    # Every kind at four prices of rows; and to see what placing experts anew would gain, every size of replica.
    assert calls["repair"] <= 4 * len(kinds)
    assert calls["place"] <= 4 * (len(kinds) + 4)
    assert calls["fetch"] == 0
    # As it is shared out, a replica of a kind may have a few sequences more or fewer.
    assert calls["replica_time"] <= 16 * len(kinds)
    assert planned.report.transfers == {}
    assert planned.report.flows is not None and planned.report.moved_bytes > 0
    names = {one.name: one.why for one in planned.report.alternatives}
    assert "experts placed anew" in names and "repair" in names
    chosen = next(one for one in planned.report.alternatives if one.chosen)
    assert chosen.name.startswith("repair") and chosen.move_s == planned.report.move_s
