"""Slots are really killed while what carries their messages is NCCL's transport, on a stand-in for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.endtoend.conftest import SmallJob

SCRIPT = Path(__file__).with_name("nccl_train.py")


@pytest.mark.parametrize("failure", ["2@3:kill@sync", "1@4:kill@vote"])
def test_survivors_abort_and_go_on(small_job: SmallJob, tmp_path: Path, failure: str) -> None:
    """Nothing fails by itself: the supervisor's word ends the wait, aborts end the operations."""
    outcome = small_job.run(4, "--replicas", "2", "--fail", failure, folder=tmp_path, script=SCRIPT)
    assert outcome.result is not None
    assert outcome.result["live_slots"] == [slot for slot in range(4) if slot != int(failure[0])]
    assert len(outcome.result["recovery_s"]) == 1
    # Three survivors with three communicators each (a lane of one slot has none).
    assert outcome.output.count("nccl: abort") == 9
    assert outcome.output.count("nccl: synchronize") == 3


def test_a_slot_comes_back(small_job: SmallJob, tmp_path: Path) -> None:
    """Generations are given up to take it in, too."""
    outcome = small_job.run(
        3, "--replicas", "1", "--tp", "2", "--respawn", "1", "--fail", "1@2:kill@backward", folder=tmp_path,
        script=SCRIPT,
    )  # fmt: skip
    assert outcome.result is not None
    assert outcome.result["recovery_s"]
