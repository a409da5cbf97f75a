"""The benchmark of damaged jobs: policies differ where they should, everything is labelled and predicted."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from models.mixtral import build
from nep.planning.validation import check_plan
from nep.testing.degraded_bench.failures import failed_slots, run_failures
from nep.testing.degraded_bench.jobs import FINE, MIXTRAL, Job, small
from nep.testing.degraded_bench.measure import Bench
from nep.testing.degraded_bench.page import measured
from nep.testing.degraded_bench.picture import picture
from nep.testing.degraded_bench.policies import POLICIES, drop_the_replica, ours, whole_experts
from nep.testing.degraded_bench.power import with_power
from nep.testing.degraded_bench.slow import run_slow
from scripts.bench_degraded import main


@pytest.mark.parametrize("job", [MIXTRAL, FINE], ids=lambda job: job.name)
def test_every_policy_trains_the_whole_batch_on_slots_that_live(job: Job) -> None:
    for where in ("one replica", "spread"):
        failed = failed_slots(job, where, 2)
        assert len(set(failed)) == 2
        for name, plan_of in POLICIES.items():
            plan = plan_of(job, failed)
            if plan is None:
                assert (name, where) == ("drop the replica", "spread")
                continue
            check_plan(plan, job.lines)
            assert plan.global_batch_size == job.global_batch_size
            assert not set(plan.slots) & set(failed)


def test_whole_experts_leave_one_slot_two_of_them_and_ours_shares_them() -> None:
    failed = failed_slots(MIXTRAL, "one replica", 1)
    size = MIXTRAL.shape.units_per_expert
    most = {}
    for plan_of in (whole_experts, ours):
        plan = plan_of(MIXTRAL, failed)
        assert plan is not None
        most[plan_of] = max(plan.holders.num_units("layers.0.experts", slot) for slot in plan.replicas[0])
    assert most == {whole_experts: 2 * size, ours: 8 * size // 7}
    dropped = drop_the_replica(MIXTRAL, failed)
    assert dropped is not None and dropped.slots == tuple(range(8, 16))


def test_watts_stay_within_boards_and_nodes_and_help() -> None:
    job = replace(MIXTRAL, sequences=16)
    failed = failed_slots(job, "one replica", 1)
    emulation = job.emulation(lambda *_: None, 0.0)  # type: ignore[arg-type,return-value]
    paces = []
    for node_headroom, budget_w in ((False, 8 * 700), (True, 1.3 * 8 * 700)):
        powered = with_power(job, failed, node_headroom=node_headroom)
        limits = powered.watts.limits_w
        assert max(limits.values()) <= 910
        for replica in powered.plan.replicas:
            assert sum(limits[slot] for slot in replica) <= budget_w
        assert powered.speed.limits_w == limits, "set by the controller"
        paces.append(emulation.predicted(powered.plan).total)
    assert paces[1] < paces[0] < emulation.predicted(ours(job, failed)).total


def test_shares_are_labelled_predicted_and_drawn() -> None:
    chosen = ("drop the replica", "whole experts", "ours, re-planned")
    table = run_failures(Bench(small(MIXTRAL), build, 0.0), most=1, policies=chosen)
    shares = table.shares_of_ideal()["one replica"]
    assert shares["drop the replica"]["1"] < shares["whole experts"]["1"] < shares["ours, re-planned"]["1"] < 1.01
    assert shares["ours, re-planned"]["0"] == 1.0
    of_healthy = table.shares_of_healthy()["one replica"]
    assert of_healthy["whole experts"]["1"] == pytest.approx(7 / 8 * shares["whole experts"]["1"])
    for counts in table.to_json()["one replica"].values():
        assert all(abs(one["predicted_over_emulated"] - 1) < 0.05 for one in counts.values())
    assert "emulated" in table.text()
    drawn = picture({"job": table.to_json()})
    assert drawn.startswith("<svg") and "emulated" in drawn and "ours, re-planned" in drawn
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    text = measured({"label": "emulated", "machine": "one", "pace": 0.0, "failed": {"job": table.to_json()}}, "today")
    assert f"| ours, re-planned | 1.000 (1.000) | {shares['ours, re-planned']['1']:.3f} (" in text


def test_a_slow_slot_is_found_and_compensated() -> None:
    job = replace(MIXTRAL, shape=replace(MIXTRAL.shape, num_layers=2), slots_per_replica=2, sequences=16)
    table = run_slow(Bench(job, build, 0.0), within=7)
    assert table.flagged_after is not None and table.flagged_after <= 5
    assert table.of_speeds(table.with_s) > table.of_speeds(table.without_s) + 0.05
    assert table.lines


@pytest.mark.parametrize(
    ("arguments", "what"),
    [("--only nothing", "choose of"), ("--counts 9", "1 to 4"), ("--only skewed --data /nonexistent", "missing")],
)
def test_bad_options_are_refused(arguments: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    assert what in capsys.readouterr().err
