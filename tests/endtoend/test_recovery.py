"""Slots are really killed, and nothing is lost: every loss and parameter equals the single-process reference.

The reference (`nep.testing.reference`) shares no code with the distributed path. Slots that die stay away here; every
kind of failure in every phase, with slots that come back, is in test_chaos.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nep.planning.cluster import Cluster
from nep.planning.layout import axes, intersect
from nep.planning.planner import plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from tests.endtoend.conftest import BATCH, SmallJob


def test_one_process(small_job: SmallJob, tmp_path: Path) -> None:
    small_job.run(1, folder=tmp_path, launcher="alone")


@pytest.mark.parametrize(
    ("num_slots", "replicas"), [(4, 2), (5, 2), (7, 3), *(pytest.param(n, 1, marks=pytest.mark.soak) for n in (4, 5))]
)
def test_healthy(small_job: SmallJob, tmp_path: Path, num_slots: int, replicas: int) -> None:
    outcome = small_job.run(num_slots, "--replicas", str(replicas), folder=tmp_path)
    assert outcome.result is not None and outcome.result["recovery_s"] == []


@pytest.mark.parametrize(
    ("num_slots", "replicas", "failure"),
    [
        (4, 2, "0@1:kill@forward"),  # rank 0, in the first step
        pytest.param(4, 1, "0@4:kill@vote", marks=pytest.mark.soak),
        (4, 2, "3@6:kill@return"),  # the last slot, in the last step
        pytest.param(5, 1, "2@2:kill@backward", marks=pytest.mark.soak),
        pytest.param(5, 2, "4@5:kill@sync", marks=pytest.mark.soak),  # the smaller replica
        pytest.param(7, 3, "3@3:kill@mirror", marks=pytest.mark.soak),
        (2, 2, "1@3:kill@apply"),  # one slot is left
        pytest.param(2, 1, "0@3:kill@dispatch", marks=pytest.mark.soak),
    ],
)
def test_kill_anywhere(small_job: SmallJob, tmp_path: Path, num_slots: int, replicas: int, failure: str) -> None:
    small_job.run(num_slots, "--replicas", str(replicas), "--fail", failure, folder=tmp_path)


@pytest.mark.parametrize(
    ("num_slots", "replicas", "first", "second"),
    [
        pytest.param(4, 2, "2@2:kill@sync", "0@4:kill@return", marks=pytest.mark.soak),
        pytest.param(5, 1, "1@2:kill@dispatch", "3@3:kill@vote", marks=pytest.mark.soak),
        (5, 2, "0@2:kill@vote", "1@5:kill@backward"),  # a whole replica but one slot
        pytest.param(4, 2, "2@2:kill@apply", "3@4:kill@forward", marks=pytest.mark.soak),  # a whole replica
        (7, 2, "6@3:kill@mirror", "0@6:kill@apply"),
    ],
)
def test_two_kills_one_after_the_other(
    small_job: SmallJob, tmp_path: Path, num_slots: int, replicas: int, first: str, second: str
) -> None:
    outcome = small_job.run(num_slots, "--replicas", str(replicas), "--fail", first, "--fail", second, folder=tmp_path)
    assert outcome.result is not None
    assert len(outcome.result["live_slots"]) == num_slots - 2
    assert len(outcome.result["recovery_s"]) == 2


@pytest.mark.parametrize(
    ("num_slots", "options", "failures"),
    [
        (4, "--replicas 2 --tp 2", ["1@3:kill@backward"]),  # one lane of two slots shrinks to one
        (5, "--tp 3", ["0@3:kill@forward"]),  # lanes of three and two slots in one replica
        (7, "--replicas 2 --tp 4", ["5@2:kill@dispatch", "0@4:kill@vote"]),  # lanes of four and three
    ],
)
def test_lanes_of_several_slots_shrink(
    small_job: SmallJob, tmp_path: Path, num_slots: int, options: str, failures: list[str]
) -> None:
    """Tensor parallelism becomes nonuniform: heads, vocabulary and experts are cut anew over what is left."""
    fail = [argument for failure in failures for argument in ("--fail", failure)]
    outcome = small_job.run(num_slots, *options.split(), *fail, folder=tmp_path)
    assert outcome.result is not None and len(outcome.result["recovery_s"]) == len(failures)


def test_owner_and_mirror_lost_together_end_with_code_3(small_job: SmallJob, tmp_path: Path) -> None:
    # With two slots each is the other's mirror; two of three cannot both be spared.
    failures = ["--fail", "0@3:kill@sync", "--fail", "1@3:kill@sync"]
    outcome = small_job.run(3, "--replicas", "1", *failures, folder=tmp_path, check=False)
    assert outcome.returncode == 3, outcome.output
    said = [line for line in outcome.output.splitlines() if "checkpoint" in line]
    assert len(said) == 1 and said[0].startswith("slot 2: slots [0, 1] were lost together"), outcome.output


def test_without_redundancy_a_lost_slot_means_a_checkpoint(small_job: SmallJob, tmp_path: Path) -> None:
    outcome = small_job.run(3, "--redundancy", "none", "--fail", "1@2", folder=tmp_path, check=False)
    assert outcome.returncode == 3, outcome.output


def test_under_torchrun(small_job: SmallJob, tmp_path: Path) -> None:
    outcome = small_job.run(4, "--replicas", "2", "--fail", "1@3:kill@backward", folder=tmp_path, launcher="torchrun")
    assert outcome.result is not None and outcome.result["live_slots"] == [0, 2, 3]


def pairs(num_slots: int, replicas: int) -> set[frozenset[int]]:
    """Owner and mirror of anything, in the first plan of the small job."""
    cluster, lines = Cluster.uniform(num_slots, num_slots), parameter_lines(preset("debug"))
    plan = plan_from_scratch(cluster, lines, num_replicas=replicas, global_batch_size=BATCH)
    found = set()
    for axis in axes(lines):
        owned, mirrored = plan.owners.by_slot(axis), plan.mirrors.by_slot(axis)
        for owner, intervals in owned.items():
            found |= {frozenset((owner, mirror)) for mirror in mirrored if intersect(intervals, mirrored[mirror])}
    return found


@pytest.mark.parametrize(("num_slots", "replicas"), [(5, 1), (6, 2)])
def test_a_second_slot_is_killed_while_the_first_is_recovered_from(
    small_job: SmallJob, tmp_path: Path, num_slots: int, replicas: int
) -> None:
    together = pairs(num_slots, replicas)
    second = next(slot for slot in range(num_slots - 1, 1, -1) if frozenset((1, slot)) not in together)
    failures = ["--fail", "1@3:kill@backward", "--fail", f"{second}@3:kill@recover"]
    outcome = small_job.run(num_slots, "--replicas", str(replicas), *failures, folder=tmp_path)
    assert outcome.result is not None
    assert outcome.result["live_slots"] == [slot for slot in range(num_slots) if slot not in (1, second)]
    assert outcome.result["unprotected_intervals"] == 0
