"""A preemption notice (SIGUSR1 to a process of the job): its slot leaves, or the job stops; and who is told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nep.checkpoint.folders import whole_in
from nep.fault_tolerance.control_store import ControlStore, supervisor_key
from nep.fault_tolerance.processes import NOTICE
from nep.fault_tolerance.running_job import RunningJob, find_job
from nep.testing.jobs import JobOutcome
from tests.endtoend.conftest import SmallJob
from tests.endtoend.test_drain import wait_for
from tests.endtoend.test_return import reasons

LEAVING = Path(__file__).with_name("leaving_train.py")


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says which slots will leave, and how many are in reserve: see `leaving_train.py`."""

    def say(slots: Sequence[int], spares: int = 0) -> None:
        monkeypatch.setenv("NEP_TEST_LEAVING", ",".join(map(str, slots)))
        monkeypatch.setenv("NEP_TEST_SPARES", str(spares))

    return say


def notify(small_job: SmallJob, folder: Path, slots: Sequence[int], options: Sequence[str]) -> JobOutcome:
    """Run a job of four slots; some get the notice as soon as there is a first plan."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(small_job.run, 4, *options, folder=folder, check=False, script=LEAVING)
        file = wait_for(lambda: next(iter(folder.glob("runs/*/job.json")), None), job.done)
        assert isinstance(file, Path), job.result().output
        address = find_job(str(file))
        wait_for(RunningJob(address).decision, job.done)
        store = ControlStore.connect(address.store_address, address.prefix, 5.0)
        wait_for(lambda: store.exists([supervisor_key(slot) for slot in slots]), job.done)
        for slot in slots:
            supervisor = store.get_json(supervisor_key(slot))
            assert supervisor is not None, job.result().output
            os.kill(supervisor["pid"], NOTICE)
        return job.result()


def test_a_slot_that_gets_a_notice_leaves(small_job: SmallJob, tmp_path: Path, leave: Callable[..., None]) -> None:
    leave([2])
    alerts = tmp_path / "alerts"
    outcome = notify(small_job, tmp_path, [2], ["--replicas", "2", "--on-alert", f"tee -a {alerts}"])
    small_job.check(outcome)
    assert reasons(outcome) == ["start", "slots [2] are drained"]
    assert "slot 2: preemption notice: this slot leaves after the next step" in outcome.output
    told = [json.loads(line) for line in alerts.read_text().splitlines()]
    assert [(one["event"], one["missing_slots"], one["unprotected_intervals"]) for one in told] == [
        ("degraded", [2], 0)
    ]
    assert "3 of 4 slots train, slots 2 are missing; all state is held twice (slots [2] are drained)" in told[0]["text"]


def test_a_job_whose_slots_all_get_a_notice_stops_with_a_checkpoint(
    small_job: SmallJob, tmp_path: Path, leave: Callable[..., None]
) -> None:
    leave(range(4))
    options = ["--replicas", "2", "--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "100"]
    outcome = notify(small_job, tmp_path, range(4), options)
    assert outcome.returncode == 0, outcome.output
    assert "the same command goes on from step" in outcome.output
    (saved,) = whole_in(tmp_path / "saved")
    assert 1 <= saved.step < 6
    again = small_job.run(4, *options, folder=tmp_path / "again")
    assert again.result is not None and again.result["resumed_step"] == saved.step


def test_spares_take_over_from_a_job_whose_slots_all_get_a_notice(
    small_job: SmallJob, tmp_path: Path, leave: Callable[..., None]
) -> None:
    leave(range(2), spares=2)
    options = ["--replicas", "2", "--spares", "2", "--checkpoint-dir", str(tmp_path / "saved")]
    outcome = notify(small_job, tmp_path, range(2), options)
    small_job.check(outcome)
    assert outcome.result is not None
    members = [generation["slots"] for generation in outcome.result["generations"]]
    assert members == [[0, 1], [0, 1, 2, 3], [2, 3]], "they come before anybody leaves"
    assert "the same command goes on from step" not in outcome.output


def test_a_slot_whose_health_check_complains_leaves(
    small_job: SmallJob, tmp_path: Path, leave: Callable[..., None]
) -> None:
    leave([1])
    check = tmp_path / "check"
    check.write_text("#!/bin/sh\n[ $1 != 1 ] || { echo ECC errors on device $2; exit 3; }\n")
    check.chmod(0o755)
    options = ["--replicas", "2", "--health-check", f"{check} {{slot}} {{local}}", "--health-every-s", "0.01"]
    outcome = small_job.run(4, *options, folder=tmp_path, script=LEAVING)
    assert reasons(outcome) == ["start", "slots [1] are drained"]
    assert "slot 1: health check: ECC errors on device 1: this slot leaves after the next step" in outcome.output
