"""An operator lets a slot of a running job leave, and come back; the numbers stay those of one process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nep.checkpoint.folders import whole_in
from nep.cli import main as nep
from nep.fault_tolerance.requests import Request, Requests
from nep.fault_tolerance.running_job import RunningJob, find_job
from nep.testing.jobs import JobOutcome
from tests.endtoend.conftest import SmallJob
from tests.endtoend.test_return import PACED, reasons

Operator = Callable[[RunningJob, Path], None]


def run(small_job: SmallJob, folder: Path, num_slots: int, options: str, holds: str, operate: Operator) -> JobOutcome:
    """Run a job, and operate on it from the time on when all train."""
    held = [word for hold in holds.split() for word in ("--hold", hold)]
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(small_job.run, num_slots, *options.split(), *held, folder=folder, script=PACED)
        file = wait_for(lambda: next(iter(folder.glob("runs/*/job.json")), None), job.done)
        if file is not None:
            running = RunningJob(find_job(str(file)))
            wait_for(lambda: running.decision(), job.done)
            operate(running, file)
        return job.result()


def wait_for(look: Callable[[], object], over: Callable[[], bool]) -> object:
    deadline = time.monotonic() + 60
    while not (found := look()) and not over():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def state_of(running: RunningJob, slot: int) -> str:
    return next(one.state for one in running.slots() if one.slot == slot)


@pytest.mark.parametrize(
    ("num_slots", "options", "slot"),
    [
        (4, "--replicas 2", 0),  # the one that reports
        (3, "--redundancy none", 1),  # nothing is mirrored: all must move
        (4, "--tp 2", 3),
        pytest.param(4, "--replicas 2", 2, marks=pytest.mark.soak),
        pytest.param(2, "--replicas 2", 1, marks=pytest.mark.soak),
    ],
)
def test_a_drained_slot_leaves_and_nothing_is_lost(
    small_job: SmallJob, tmp_path: Path, num_slots: int, options: str, slot: int
) -> None:
    outcome = run(small_job, tmp_path, num_slots, options, "3:1", lambda running, _: running.drain(slot) and None)
    assert outcome.result is not None
    assert reasons(outcome) == ["start", f"slots [{slot}] are drained"]
    assert outcome.result["generations"][1]["step"] == 3
    assert outcome.result["recovery_s"] == [] and outcome.result["full_size_s"] == [], "it is no failure"
    assert f"slot {slot}: slot {slot} is drained and leaves" in outcome.output
    if "none" not in options:
        assert (outcome.result["unprotected_intervals"] == 0) == (num_slots > 2)


def test_drain_and_undrain_by_command(small_job: SmallJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, object] = {}

    def said(*arguments: str) -> tuple[int, str, str]:
        code = nep(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    def operate(running: RunningJob, file: Path) -> None:
        address = running.address.store_address
        seen["unknown"] = said("drain", "9", "--job", str(file))
        seen["too early"] = said("undrain", "2", "--job", str(file))
        seen["drain"] = said("drain", "2", "--job", str(file), "--json")
        seen["again"] = said("drain", "2", "--job", address)
        wait_for(lambda: state_of(running, 2) == "drained", lambda: False)
        seen["status"] = said("status", "--job", str(file.parent), "--json")
        seen["page"] = said("status", "--job", address)
        seen["undrain"] = said("undrain", "2", "--job", address)

    outcome = run(small_job, tmp_path, 4, "--replicas 2", "3:1 5:3", operate)
    assert reasons(outcome) == ["start", "slots [2] are drained", "slots [2] return"]
    assert outcome.result is not None and outcome.result["live_slots"] == [0, 1, 2, 3]
    assert seen["unknown"] == (2, "", "nep: drain: slot (9) is none of this job's, 0 to 3\n")
    assert seen["too early"][0] == 2 and "only one that is drained or down" in seen["too early"][2]  # type: ignore[index]
    assert json.loads(seen["drain"][1])["request"] == 1  # type: ignore[index]
    assert seen["again"][0] == 2 and "already" in seen["again"][2]  # type: ignore[index]
    status = json.loads(seen["status"][1])  # type: ignore[index]
    assert [slot["state"] for slot in status["slots"]] == ["training", "training", "drained", "training"]
    assert status["generation"] == 2 and status["exit_code"] is None
    assert "slot 2    drained" in seen["page"][1]  # type: ignore[index]
    assert "comes back" in seen["undrain"][1]  # type: ignore[index]
    assert nep(["drain", "1", "--job", str(next(tmp_path.glob("runs/*/job.json")))]) == 1
    assert "the job is over" in capsys.readouterr().err


def test_the_last_slot_cannot_be_drained(small_job: SmallJob, tmp_path: Path) -> None:
    refused: list[str] = []

    def operate(running: RunningJob, _: Path) -> None:
        running.drain(1)
        with pytest.raises(ValueError, match="slot 0 is the last one that trains; stop the job instead") as caught:
            running.drain(0)
        refused.append(str(caught.value))
        # The job has waited for this: asked for before, so it changes nothing.
        Requests().post(running._store, Request(kind="drain", slot=1))

    outcome = run(small_job, tmp_path, 2, "--replicas 2", "3:2", operate)
    assert refused and outcome.result is not None and outcome.result["live_slots"] == [0]


@pytest.mark.parametrize(
    "failure", ["1@4:kill@recover", "2@4:kill@recover", pytest.param("3@3:kill@return", marks=pytest.mark.soak)]
)
def test_somebody_dies_while_a_slot_is_drained(small_job: SmallJob, tmp_path: Path, failure: str) -> None:
    """The slot that is drained itself, or another one."""
    outcome = run(
        small_job, tmp_path, 4, f"--replicas 2 --fail {failure}", "3:1", lambda running, _: running.drain(2) and None
    )
    assert outcome.result is not None
    assert 2 not in outcome.result["live_slots"] and len(outcome.result["live_slots"]) in (2, 3)


def test_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert nep(["status"]) == 2
    assert "no job.json in runs/*/" in capsys.readouterr().err
    assert nep(["status", "--job", "nowhere"]) == 2
    assert "is no file" in capsys.readouterr().err
    assert nep(["status", "--job", "127.0.0.1:1"]) == 1
    assert "no control store answers at 127.0.0.1:1" in capsys.readouterr().err
    assert nep(["drain", "--job", "127.0.0.1:1"]) == 2


def test_saves_go_on_while_slots_leave_and_come_back(small_job: SmallJob, tmp_path: Path) -> None:
    """Slot 2 is drained with a save in flight, slot 1 is killed and comes back to write its part of later ones."""
    saved = tmp_path / "saved"
    words = f"--checkpoint-dir {saved} --checkpoint-every 1 --checkpoint-keep 9"
    options = f"--replicas 2 --respawn 1 --fail 1@4:kill@backward {words}"
    outcome = run(small_job, tmp_path, 4, options, "3:1 5:2", lambda running, _: running.drain(2) and None)
    assert reasons(outcome) == ["start", "slots [2] are drained", "slots [1] are dead", "slots [1] return"]
    whole = [one.step for one in whole_in(saved)]
    assert whole[0] == 6 and set(whole) >= {6, 5, 2}, f"{whole}: {outcome.output}"
    again = small_job.run(1, *words.split(), folder=tmp_path / "again", launcher="alone")
    assert again.result is not None and again.result["resumed_step"] == 6
