"""The supervisor with real processes and real signals, under the test launcher and once under torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.supervisor_job import is_running

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("supervisor_job.py")
LAUNCH = ("-m", "nep.testing.launch", "--timeout", "60", "--json")
# Milliseconds on an idle machine; on a busy one still before any lease or wait of these jobs ends (10 s or more,
# see LONG_BASE_S in supervisor_job.py), so that a death or a fence that waits for one of them is seen here.
AT_ONCE_S = 8.0

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True, kw_only=True)
class Result:
    returncode: int
    exit_codes: list[int]
    orphans: int
    seconds: float
    stdout: str
    stderr: str
    run_dir: Path

    def note(self, slot: int) -> Any:
        return json.loads((self.run_dir / f"note{slot}.json").read_text())

    def log(self, slot: int) -> str:
        return (self.run_dir / f"slot{slot}.log").read_text()


def environment() -> dict[str, str]:
    """Without what another launcher may have left, and with the repository on the path."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def start(run_dir: Path, scenario: str, num_slots: int, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, *LAUNCH, "--nproc-per-node", str(num_slots), *options]
    return subprocess.Popen(
        [*command, "--", str(SCRIPT), scenario, str(run_dir)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def collect(process: "subprocess.Popen[str]", run_dir: Path) -> Result:
    stdout, stderr = process.communicate(timeout=90)
    print(stdout, stderr)  # pytest shows it when the test fails
    report = json.loads(stdout.splitlines()[-1])
    return Result(
        returncode=process.returncode,
        exit_codes=report["exit_codes"],
        orphans=report["orphans"],
        seconds=report["seconds"],
        stdout=stdout,
        stderr=stderr,
        run_dir=run_dir,
    )


def run(run_dir: Path, scenario: str, num_slots: int = 2, *options: str) -> Result:
    return collect(start(run_dir, scenario, num_slots, *options), run_dir)


def wait_for_files(run_dir: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(list(run_dir.glob(pattern))) < count:
        assert time.monotonic() < deadline, f"{count} files {pattern} did not come up in {run_dir}"
        time.sleep(0.02)


def wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"of {pids} some are still there after {seconds} s"
        time.sleep(0.02)


def assert_clean(result: Result, exit_codes: list[int]) -> None:
    assert result.exit_codes == exit_codes
    assert result.orphans == 0


def assert_failed(result: Result, num_slots: int) -> None:
    """The first parent to leave, with 1, makes the launcher stop the others, maybe while they leave as well."""
    assert result.returncode == 1
    assert len(result.exit_codes) == num_slots
    assert set(result.exit_codes) <= {1, -signal.SIGTERM}
    assert result.orphans == 0


def test_a_healthy_job_leaves_when_it_has_ended(tmp_path: Path) -> None:
    result = run(tmp_path, "healthy", 4)
    assert_clean(result, [0, 0, 0, 0])
    assert result.returncode == 0
    for slot in range(4):
        # A thread at the fork could hold a lock that its trainer waits for: the parent has one thread only.
        assert result.note(slot) == {"parent_threads": 1, "slot": slot, "num_slots": 4}
    job = json.loads((tmp_path / "job.json").read_text())
    assert job["schema"] == 1
    assert job["num_slots"] == 4
    assert job["store_address"].startswith("127.0.0.1:")
    assert job["run_id"] in job["prefix"]


def test_a_sigkilled_trainer_is_reported_at_once(tmp_path: Path) -> None:
    result = run(tmp_path, "kill", 3)
    assert_clean(result, [0, 0, 0])
    seen, killed_s = result.note(0), result.note(1)["killed_s"]
    assert 0 <= seen["seen_s"] - killed_s < AT_ONCE_S
    assert (seen["fault"]["kind"], seen["fault"]["slot"]) == ("exit", 1)
    record = seen["exit"]
    assert (record["signal"], record["status"], record["generation"]) == ("SIGKILL", -9, 1)
    assert (record["incarnation"], record["fenced"]) == (1, False)
    assert killed_s <= record["time"] < killed_s + AT_ONCE_S
    assert "ended by SIGKILL in generation 1" in result.log(1)


def test_exit_zero_before_the_end_is_a_failure(tmp_path: Path) -> None:
    result = run(tmp_path, "exit_zero")
    assert_clean(result, [0, 0])
    assert result.note(0)["exit"]["status"] == 0


def test_an_exception_is_reported_and_logged(tmp_path: Path) -> None:
    result = run(tmp_path, "exception")
    assert_clean(result, [0, 0])
    assert result.note(0)["exit"]["status"] == 1
    assert "RuntimeError: no more beads on the abacus" in result.log(1)
    assert "RuntimeError: no more beads on the abacus" in result.stderr
    assert Path(result.note(0)["exit"]["log"]) == tmp_path / "slot1.log"


def test_a_fence_kills_a_frozen_trainer_of_the_named_incarnation(tmp_path: Path) -> None:
    result = run(tmp_path, "freeze")
    assert_clean(result, [0, 0])
    seen = result.note(0)
    assert seen["survived"], "a fence for another incarnation killed this one"
    assert seen["fence_s"] < AT_ONCE_S
    assert (seen["exit"]["signal"], seen["exit"]["fenced"]) == ("SIGKILL", True)


def test_a_killed_parent_takes_its_trainer_along(tmp_path: Path) -> None:
    result = run(tmp_path, "parent_killed", 2, "--grace", "30")
    assert result.exit_codes[1] == -9
    assert result.returncode == 128 + 9
    assert result.exit_codes[0] == 1  # told to stop by the launcher, as torchrun does
    assert result.orphans == 0
    assert not any(is_running(result.note(slot)["pid"]) for slot in range(2))
    assert result.seconds < 60, "its trainer would have slept so long"


def test_nobody_left(tmp_path: Path) -> None:
    result = run(tmp_path, "all_dead", 3)
    assert_failed(result, 3)
    assert "nobody is left: the trainers of slots [0, 1, 2] have ended" in result.stderr
    assert "exit code 7" in result.log(2)


def test_nobody_left_of_a_later_generation(tmp_path: Path) -> None:
    result = run(tmp_path, "members_dead", 3)
    assert_failed(result, 3)
    assert "nobody is left: the trainers of slots [0, 1] have ended" in result.stderr


@pytest.mark.parametrize(("scenario", "flagged"), [("decided_with", [1, 3]), ("decided_without", [1])])
def test_the_newest_decision_that_counts_on_the_dead_is_flagged(
    tmp_path: Path, scenario: str, flagged: list[int]
) -> None:
    result = run(tmp_path, scenario)
    assert_clean(result, [0, 0])
    assert result.note(0)["flagged"] == flagged


def test_the_fault_is_raised_for_the_generation_of_the_dead(tmp_path: Path) -> None:
    result = run(tmp_path, "later_generation")
    assert_clean(result, [0, 0])
    seen = result.note(0)
    assert not seen["first"]
    assert (seen["exit"]["generation"], seen["exit"]["signal"]) == (5, "SIGSEGV")
    assert "Fatal Python error: Segmentation fault" in result.stderr  # with the trainer's stack


def test_the_parent_of_a_dead_trainer_leaves_with_the_code_of_the_job(tmp_path: Path) -> None:
    result = run(tmp_path, "ends_with_code")
    # Once the parent of the dead has left with a code, the launcher stops the other, which may be on its way out.
    healthy, bereaved = result.exit_codes
    assert bereaved == 4 and healthy in (4, -15)
    assert_clean(result, [healthy, bereaved])


def test_a_crash_after_the_end_does_not_spoil_it(tmp_path: Path) -> None:
    result = run(tmp_path, "crash_after_end")
    assert_clean(result, [0, 0])
    assert "ended by SIGABRT after the end of the job" in result.log(1)


def test_a_trainer_that_does_not_leave_is_killed(tmp_path: Path) -> None:
    result = run(tmp_path, "stuck_after_end")
    assert_clean(result, [0, 0])
    assert "it did not leave after the end of the job" in result.log(1)


def test_processes_that_a_dead_trainer_leaves_behind_are_ended(tmp_path: Path) -> None:
    result = run(tmp_path, "leave_helpers")
    assert_clean(result, [0, 0])
    helpers = [int((tmp_path / f"helper{stubborn}").read_text()) for stubborn in (0, 1)]
    assert not any(is_running(pid) for pid in helpers)


def test_a_stopped_job_kills_trainers_that_do_not_stop(tmp_path: Path) -> None:
    process = start(tmp_path, "ignore_stop", 2)
    wait_for_files(tmp_path, "note*.json", 2)
    process.send_signal(signal.SIGTERM)
    result = collect(process, tmp_path)
    assert_clean(result, [1, 1])
    assert result.returncode == 1
    assert "it did not finish after the launcher's signal" in result.log(0)


def test_the_death_of_the_launcher_ends_everything(tmp_path: Path) -> None:
    process = start(tmp_path, "obey_stop", 2)
    wait_for_files(tmp_path, "note*.json", 2)
    notes = [json.loads((tmp_path / f"note{slot}.json").read_text()) for slot in range(2)]
    process.kill()
    process.communicate(timeout=30)
    wait_until_gone([note[who] for note in notes for who in ("pid", "parent")], 20)
    # Each trainer had the time to stop in an orderly way.
    assert len(list(tmp_path.glob("stopped*"))) == 2
    log = (tmp_path / "slot0.log").read_text()
    assert "the launcher has died" in log or "lost the control store" in log


@pytest.mark.parametrize(("scenario", "code"), [("stop_by_itself", 4), ("ignore_stop", 1)])
def test_the_loss_of_the_store_leaves_the_trainer_some_time(tmp_path: Path, scenario: str, code: int) -> None:
    """As on a node whose launcher lives when the one that hosts the store has died."""
    host = (
        "import sys, torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as store:
        assert store.stdout is not None
        variables = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "GROUP_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.stdout.readline().strip(),
            "TORCHELASTIC_RUN_ID": "lost",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        command = [sys.executable, str(SCRIPT), scenario, str(tmp_path)]
        process = subprocess.Popen(command, env={**environment(), **variables})
        wait_for_files(tmp_path, "note0.json", 1)
        store.kill()
    assert process.wait(timeout=60) == code
    log = (tmp_path / "slot0.log").read_text()
    assert "lost the control store" in log
    assert ("it did not finish after the control store was lost" in log) == (code == 1)
    assert not is_running(json.loads((tmp_path / "note0.json").read_text())["pid"])


def test_a_dead_trainer_is_started_anew_within_its_budget(tmp_path: Path) -> None:
    result = run(tmp_path, "comes_back")
    assert result.orphans == 0 and result.returncode == 0
    seen = result.note(0)
    assert not seen["early"], "the budget is spent"
    assert [record["incarnation"] for record in seen["exits"]] == [1, 2, 3]
    assert [record["generation"] for record in seen["exits"]] == [1, 0, 0], "one that was no member breaks nothing"
    assert seen["flagged"]["slot"] == 1
    assert result.note(1) == {"incarnation": 3, "cell": 0}
    assert "slot 1 is left out: its trainer has died 2 times (--respawn 1)" in result.log(1)


def test_a_drained_slot_stays_away_until_it_is_undrained(tmp_path: Path) -> None:
    result = run(tmp_path, "drained_stays_away")
    assert_clean(result, [0, 0])
    assert not result.note(0)["early"]


def test_a_parent_with_threads_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path, "with_threads", 1)
    assert_clean(result, [1])
    assert "the supervisor has 2 threads at the fork" in result.stderr


def test_a_second_start_on_the_same_store_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path, "second_supervisor", 1)
    assert_clean(result, [1])
    assert "first: 0" in result.stdout
    assert "has had a supervisor already" in result.stderr


def test_a_single_process_runs_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "alone", str(tmp_path)]
    assert subprocess.run(command, env=environment(), timeout=60, check=False).returncode == 3
    note = json.loads((tmp_path / "note0.json").read_text())
    assert note["slots"] == 1
    assert note["description"] == json.loads((tmp_path / "job.json").read_text())


def test_torchrun_survives_the_death_of_a_trainer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(SCRIPT), "kill", str(tmp_path)],
        env=environment(),
        timeout=90,
        capture_output=True,
        text=True,
        check=False,
    )
    print(result.stdout, result.stderr)
    assert result.returncode == 0
    seen = json.loads((tmp_path / "note0.json").read_text())
    killed_s = json.loads((tmp_path / "note1.json").read_text())["killed_s"]
    assert 0 <= seen["seen_s"] - killed_s < AT_ONCE_S
    assert (seen["fault"]["slot"], seen["exit"]["signal"]) == (1, "SIGKILL")
