"""Clusters from flags and files: what is said is what is there, and the rest is refused."""

import json
from pathlib import Path

import pytest

from nep.planning.cluster import Cluster
from nep.report.readers.cluster_file import GIB, ClusterFlags, cluster_from_flags, read_cluster, slot_list


def test_flags_of_the_manual() -> None:
    flags = ClusterFlags(nodes=4, gpus_per_node="8", failed="3,17", slow="5=0.7", memory_gib="80")
    cluster = cluster_from_flags(flags)
    assert len(cluster.slots) == 32
    assert [slot.index for slot in cluster.slots if slot.health == "failed"] == [3, 17]
    assert {slot.index: slot.speed_ppm for slot in cluster.slots if slot.speed_ppm != 10**6} == {5: 700_000}
    assert {slot.memory_bytes for slot in cluster.slots} == {80 * GIB}
    assert [slot.node for slot in cluster.slots] == [index // 8 for index in range(32)]


def test_healthy_flags_are_a_uniform_cluster() -> None:
    assert cluster_from_flags(ClusterFlags(nodes=3, gpus_per_node="4")) == Cluster.uniform(12, 4)


def test_nodes_may_differ_and_slots_are_numbered_through() -> None:
    cluster = cluster_from_flags(ClusterFlags(nodes=3, gpus_per_node="2,1,3"))
    assert [slot.node for slot in cluster.slots] == [0, 0, 1, 2, 2, 2]


def test_every_health_and_unequal_memory() -> None:
    flags = ClusterFlags(failed="0", draining="1", idle="2-3", spare="4", memory_gib="80,6-7=40", slow="5-6=0.5,7=2")
    cluster = cluster_from_flags(flags)
    health = ["failed", "draining", "idle", "idle", "spare", "healthy", "healthy", "healthy"]
    assert [slot.health for slot in cluster.slots] == health
    assert [slot.memory_bytes for slot in cluster.slots] == [80 * GIB] * 6 + [40 * GIB] * 2
    assert [slot.speed_ppm for slot in cluster.slots][5:] == [500_000, 500_000, 2_000_000]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"failed": "8"}, r"failed names slots \[8\]; there are slots 0 to 7"),
        ({"failed": "x"}, r"failed \(x\) must be slots"),
        ({"failed": "5-3"}, r"failed \(5-3\) is no range"),
        ({"failed": "-1"}, r"failed \(-1\) must be slots"),
        ({"failed": "1", "spare": "1"}, "slot 1 is failed and spare"),
        ({"slow": "5"}, r"slow \(5\) must be slots and a number"),
        ({"slow": "5=fast"}, r"slow \(5=fast\)"),
        ({"slow": "5=0"}, r"slow \(5=0\) must be a speed"),
        ({"slow": "5=nan"}, r"slow \(5=nan\) must be a speed"),
        ({"slow": "9=0.5"}, r"slow names slots \[9\]"),
        ({"memory_gib": "-4"}, r"memory-gib \(-4\) must be positive"),
        ({"memory_gib": "80,40"}, r"memory-gib \(40\) must be slots"),
        ({"gpus_per_node": "8,8"}, r"gpus-per-node \(8,8\) must be one number"),
        ({"gpus_per_node": "0"}, "at least one GPU"),
        ({"gpus_per_node": "a"}, r"gpus-per-node \(a\)"),
        ({"nodes": 0}, "needs nodes"),
    ],
)
def test_flags_that_cannot_be(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cluster_from_flags(ClusterFlags(**flags))


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"failed names.*slow names.*memory-gib \(0\)"):
        cluster_from_flags(ClusterFlags(failed="9", slow="9=1", memory_gib="0"))


def _read(value: object, tmp_path: Path) -> Cluster:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(value))
    return read_cluster(path)


def test_a_file_says_what_flags_say(tmp_path: Path) -> None:
    value = {"nodes": 2, "gpus_per_node": 4, "failed": [3], "slow": {"5": 0.7}, "memory_gib": 80}
    flags = ClusterFlags(nodes=2, gpus_per_node="4", failed="3", slow="5=0.7", memory_gib="80")
    assert _read(value, tmp_path) == cluster_from_flags(flags)
    value["gpus_per_node"] = [4, 3]
    value["memory_gib"] = {"default": 80, "6": 40}
    flags = ClusterFlags(nodes=2, gpus_per_node="4,3", failed="3", slow="5=0.7", memory_gib="80,6=40")
    assert _read(value, tmp_path) == cluster_from_flags(flags)


def test_slots_one_by_one(tmp_path: Path) -> None:
    slots = [
        {"index": 4, "node": 1, "health": "failed"},
        {"index": 0, "node": 0, "speed": 0.9, "memory_gib": 1.5},
        {"index": 1, "node": 0, "speed_ppm": 123, "memory_bytes": 7},
    ]
    cluster = _read({"schema": 1, "slots": slots}, tmp_path)
    assert [slot.index for slot in cluster.slots] == [0, 1, 4]
    assert [slot.speed_ppm for slot in cluster.slots] == [900_000, 123, 10**6]
    assert [slot.memory_bytes for slot in cluster.slots] == [3 * GIB // 2, 7, None]
    assert cluster.live == (0, 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "JSON object"),
        ({}, "slots, or with nodes"),
        ({"nodes": 1, "gpu_per_node": 8}, "gpu_per_node unknown"),
        ({"schema": 2, "nodes": 1}, r"schema \(2\)"),
        ({"nodes": 1, "slots": []}, "nodes does not go with slots"),
        ({"nodes": "4"}, "another form"),
        ({"nodes": 2, "gpus_per_node": [8]}, "gpus_per_node"),
        ({"nodes": 1, "failed": ["3"]}, r"failed \('3'\) must be an integer"),
        ({"nodes": 1, "failed": 3}, "another form"),
        ({"nodes": 1, "memory_gib": "80"}, "another form"),
        ({"slots": [{"index": 0}]}, "index and node"),
        ({"slots": [{"index": 0, "node": 0, "sped": 1}]}, "sped unknown"),
        ({"slots": [{"index": 0, "node": 0, "speed": 1, "speed_ppm": 1}]}, "speed and speed_ppm"),
        ({"slots": [{"index": 0, "node": 0, "health": "sick"}]}, r"health \('sick'\)"),
        ({"slots": [{"index": 0, "node": 0, "memory_bytes": 0}]}, "must be positive"),
        ({"slots": [{"index": 0, "node": 0}, {"index": 0, "node": 1}]}, "listed twice"),
    ],
)
def test_files_that_cannot_be(value: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        _read(value, tmp_path)


def test_slot_lists() -> None:
    assert slot_list("", "x") == []
    assert slot_list(" 3, 17 ", "x") == [3, 17]
    assert slot_list("0-2,9", "x") == [0, 1, 2, 9]
