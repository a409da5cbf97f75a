"""Options become the request that they say, with defaults that keep plans comparable."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from nep.planning.cluster import Cluster
from nep.planning.cost.profiles import PROFILES
from nep.planning.plan import Plan
from nep.planning.planner import plan_from_scratch
from nep.planning.search.request import Limits, PlanRequest
from nep.planning.shapes import parameter_lines, preset
from nep.report.command_line import parse_options
from nep.report.plan_options import PlanOptions, question_of


def request(*arguments: str) -> PlanRequest:
    return question_of(parse_options(PlanOptions, prog="nep plan", arguments=arguments)).request


def written_plan(folder: Path) -> Plan:
    lines = parameter_lines(preset("debug"))
    plan = plan_from_scratch(Cluster.uniform(4, 4), lines, num_replicas=2, global_batch_size=10)
    (folder / "plan.json").write_text(plan.canonical_json())
    return plan


def test_defaults() -> None:
    asked = request("--model", "debug")
    assert asked.shape == preset("debug")
    assert asked.hardware == PROFILES["h100-sxm"]
    assert len(asked.cluster.slots) == 8
    assert {slot.memory_bytes for slot in asked.cluster.slots} == {80 * 10**9}  # the hardware's
    assert (asked.workload.global_batch_size, asked.workload.seq_len, asked.workload.parameter_bytes) == (32, 512, 2)
    assert (asked.num_replicas, asked.redundancy, asked.limits) == (1, "device", Limits())
    assert asked.loads is None and asked.current is None


def test_everything_that_can_be_said(tmp_path: Path) -> None:
    plan = written_plan(tmp_path)
    counts = np.arange(3 * 2 * 8).reshape(3, 2, 8)
    np.savez(tmp_path / "loads.npz", counts=counts, model=np.array("other"))
    arguments = shlex.split(
        "--model debug --neuron-block 16 --nodes 2 --gpus-per-node 4,2 --failed 1 --draining 2 --idle 3 --spare 4 "
        "--slow 5=0.5 --memory-gib 40 --hardware B200 --last-steps 2 --replicas auto --micro-batch-size 3 "
        "--seq-len 64 --dtype float32 --recompute --redundancy none --max-tp 2 --memory-share 0.5 --horizon-steps 7"
    )
    options = parse_options(
        PlanOptions,
        prog="nep plan",
        arguments=[*arguments, "--loads", str(tmp_path / "loads.npz"), "--current", str(tmp_path / "plan.json")],
    )
    question = question_of(options)
    asked = question.request
    assert asked.shape.neuron_block == 16
    assert [slot.health for slot in asked.cluster.slots] == [
        "healthy", "failed", "draining", "idle", "spare", "healthy"
    ]  # fmt: skip
    assert asked.cluster.slots[5].speed_ppm == 500_000
    assert {slot.memory_bytes for slot in asked.cluster.slots} == {40 * 2**30}
    assert asked.hardware.name == "b200-sxm"
    np.testing.assert_array_equal(asked.loads.mean, counts[1:].mean(axis=0))
    assert asked.num_replicas is None and asked.redundancy == "none"
    workload = asked.workload
    assert (workload.micro_batch_size, workload.seq_len, workload.parameter_bytes) == (3, 64, 4)
    assert workload.recompute
    assert workload.global_batch_size == 10  # the current plan's
    assert asked.limits == Limits(max_tp=2, memory_share=0.5)
    assert (asked.current, asked.horizon_steps) == (plan, 7)
    assert question.notes == (f"{tmp_path / 'loads.npz'} is of other, not of debug",)


def test_whole_experts_and_copies() -> None:
    assert request("--model", "debug", "--whole-experts").limits == Limits(fractions=False)
    copies = request("--model", "debug", "--physical-experts", "12").limits
    assert copies == Limits(fractions=False, physical_experts=12)


def test_the_batch_does_not_change_when_slots_fail() -> None:
    healthy = request("--model", "debug", "--nodes", "2")
    broken = request("--model", "debug", "--nodes", "2", "--failed", "3,4")
    assert healthy.workload == broken.workload


def test_a_cluster_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"nodes": 2, "gpus_per_node": 2, "memory_gib": {"0": 8}}))
    cluster = request("--model", "debug", "--cluster", str(path)).cluster
    assert [slot.memory_bytes for slot in cluster.slots] == [8 * 2**30] + [80 * 10**9] * 3
    with pytest.raises(ValueError, match=r"--nodes, --slow cannot go with --cluster"):
        request("--model", "debug", "--cluster", str(path), "--nodes", "2", "--slow", "0=0.5")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--replicas 0", r"replicas \(0\)"),
        ("--replicas many", r"replicas \(many\)"),
        ("--physical-experts 7", r"physical experts \(7\) must be at least 8"),
        ("--max-tp 0 --memory-share 2 --horizon-steps 0", r"max tp \(0\).*memory share \(2.0\).*horizon steps \(0\)"),
        ("--global-batch-size 0", r"global_batch_size \(0\)"),
        ("--last-steps 3", "--last-steps needs --loads"),
        ("--hardware V100", r"hardware \(V100\)"),
        ("--current none.json", "none.json cannot be read"),
        ("--neuron-block 3", r"neuron_block \(3\)"),
    ],
)
def test_wrong_values_are_named(arguments: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        request("--model", "debug", *shlex.split(arguments))
