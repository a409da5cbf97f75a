"""Slots that were lost come back while training, and the numbers stay those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from nep.testing.jobs import JobOutcome
from tests.endtoend.conftest import SmallJob
from tests.endtoend.test_recovery import pairs

PACED = Path(__file__).with_name("paced_train.py")


def run(small_job: SmallJob, folder: Path, num_slots: int, options: str, holds: str, **more: object) -> JobOutcome:
    held = [word for hold in holds.split() for word in ("--hold", hold)]
    words = [*options.split(), *held]
    return small_job.run(num_slots, *words, folder=folder, script=PACED, **more)  # type: ignore[arg-type]


def reasons(outcome: JobOutcome) -> list[str]:
    assert outcome.result is not None
    return [entry["reason"] for entry in outcome.result["generations"]]


def test_a_killed_slot_comes_back(small_job: SmallJob, tmp_path: Path) -> None:
    """In every phase and by every kind: test_chaos.py. Here, what a job says of it."""
    outcome = run(small_job, tmp_path, 4, "--replicas 2 --respawn 1 --fail 2@2:kill@vote", "4:1")
    assert outcome.result is not None
    assert outcome.result["live_slots"] == [0, 1, 2, 3]
    assert reasons(outcome) == ["start", "slots [2] are dead", "slots [2] return"]
    assert len(outcome.result["recovery_s"]) == 1, "coming back is no failure"
    (full_size_s,) = outcome.result["full_size_s"]
    assert full_size_s > outcome.result["recovery_s"][0]
    assert outcome.result["unprotected_intervals"] == 0


@pytest.mark.parametrize(
    ("num_slots", "options", "failures", "holds"),
    [
        (4, "--replicas 2", "0@2", "4:1"),  # who reports at the end was not there at the beginning
        (4, "--replicas 1 --tp 2", "1@2", "3:1"),  # a lane of two slots shrinks and grows
        (2, "--replicas 2", "1@2", "4:1"),  # a whole replica
        pytest.param(5, "--replicas 1", "3@1", "2:1", marks=pytest.mark.soak),
        pytest.param(2, "--replicas 1", "0@3:kill@dispatch", "5:1", marks=pytest.mark.soak),
        pytest.param(7, "--replicas 3", "6@2", "4:1", marks=pytest.mark.soak),
    ],
)
def test_back_to_full_size(
    small_job: SmallJob, tmp_path: Path, num_slots: int, options: str, failures: str, holds: str
) -> None:
    fail = " ".join(f"--fail {failure}" for failure in failures.split())
    outcome = run(small_job, tmp_path, num_slots, f"{options} --respawn 1 {fail}", holds)
    assert outcome.result is not None
    assert outcome.result["live_slots"] == list(range(num_slots))
    assert len(outcome.result["full_size_s"]) == 1 and len(outcome.result["validation_loss"]) == 2


def test_one_that_dies_while_it_comes_back_tries_again(small_job: SmallJob, tmp_path: Path) -> None:
    options = "--replicas 2 --respawn 2 --fail 2@2 --fail 2@5:kill@recover"
    outcome = run(small_job, tmp_path, 4, options, "4:1 5:2")
    came_and_died = "slots [2] return; then slots [2] are dead"
    assert reasons(outcome) == ["start", "slots [2] are dead", came_and_died, "slots [2] return"]
    assert outcome.result is not None and len(outcome.result["recovery_s"]) == 2
    assert outcome.result["live_slots"] == [0, 1, 2, 3]


def test_a_member_dies_while_another_comes_back(small_job: SmallJob, tmp_path: Path) -> None:
    second = next(slot for slot in range(5, 1, -1) if frozenset((1, slot)) not in pairs(6, 2))
    options = f"--replicas 2 --respawn 1 --fail 1@2 --fail {second}@5:kill@recover"
    outcome = run(small_job, tmp_path, 6, options, "4:1 5:2")
    assert outcome.result is not None and outcome.result["live_slots"] == list(range(6))


@pytest.mark.soak
def test_a_slot_whose_budget_is_spent_is_left_out(small_job: SmallJob, tmp_path: Path) -> None:
    options = "--replicas 2 --respawn 1 --fail 2@2 --fail 2@5"
    outcome = run(small_job, tmp_path, 4, options, "4:1")
    assert outcome.result is not None and outcome.result["live_slots"] == [0, 1, 3]
    assert "slot 2 is left out: its trainer has died 2 times" in outcome.output
    assert "nep undrain 2" in outcome.output


def test_nobody_comes_back_when_all_have_died(small_job: SmallJob, tmp_path: Path) -> None:
    options = "--replicas 1 --respawn 3 --fail 0@2 --fail 1@2"
    # Whoever comes back is not seen before step 3: a slot that is late in step 2 must not go on with the other.
    outcome = run(small_job, tmp_path, 2, options, "3:1", check=False)
    assert outcome.returncode == 1 and "nobody is left" in outcome.output


def test_under_torchrun(small_job: SmallJob, tmp_path: Path) -> None:
    outcome = run(small_job, tmp_path, 3, "--respawn 1 --fail 1@2", "4:1", launcher="torchrun")
    assert outcome.result is not None and outcome.result["live_slots"] == [0, 1, 2]
