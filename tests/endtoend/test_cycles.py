"""A slot that fails and comes back again and again leaves nothing behind in those that stay."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nep.fault_tolerance.requests import incarnation_of
from nep.fault_tolerance.running_job import RunningJob, find_job
from nep.testing.jobs import REPOSITORY
from tests.endtoend.conftest import TRAIN, SmallJob
from tests.endtoend.test_random_kills import parent_of, trainer_pids

NUM_SLOTS = 3
WARM_CYCLES = 3  # pools and caches fill in the first
MEBIBYTE = 2**20


@pytest.fixture
def folder(small_job: SmallJob, tmp_path: Path) -> Iterator[Path]:
    """Of a job that trains until the test is over."""
    command = [sys.executable, "-m", "nep.testing.launch", "--nproc-per-node", str(NUM_SLOTS), "--timeout", "1000"]
    options = f"--steps 1000000 --respawn 1000 --run-dir {tmp_path}/runs"
    job = subprocess.Popen(
        [*command, "--", str(TRAIN), *small_job.common(), *options.split()],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield tmp_path
    job.send_signal(signal.SIGTERM)
    job.wait(60)


def wait_for(look: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def use_of(pid: int) -> tuple[int, int, float]:
    """File descriptors, threads and resident MiB of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    threads = len(os.listdir(f"/proc/{pid}/task"))
    return len(os.listdir(f"/proc/{pid}/fd")), threads, pages * os.sysconf("SC_PAGESIZE") / MEBIBYTE


def is_protected(running: RunningJob) -> bool:
    """Whether a step was committed under mirrors that were whole: the first step after a return still tells of those
    that the return has left. What is told of a step comes a little later, so an older one says nothing."""
    decision, told = running.decision(), running.progress()
    assert decision is not None
    return told.get("step", 0) >= decision.committed + 2 and told["unprotected"] is None


def play(folder: Path, cycles: int) -> list[dict[str, tuple[int, int, float]]]:
    """Kill slots 1 and 2 by turns; after each return, what slot 0 and the supervisors use."""
    wait_for(lambda: list(folder.glob("runs/*/job.json")))
    running = RunningJob(find_job(str(next(folder.glob("runs/*/job.json")))))
    wait_for(lambda: running.progress().get("step", 0) > 1)
    supervisors = {slot: parent_of(pid) for slot, pid in trainer_pids(folder).items()}
    assert len(supervisors) == NUM_SLOTS
    used = []
    for cycle in range(cycles):
        slot, incarnation = 1 + cycle % 2, 2 + cycle // 2
        wait_for(lambda slot=slot: trainer_pids(folder).keys() >= {0, slot})  # type: ignore[misc]
        pids = trainer_pids(folder)
        os.kill(pids[slot], signal.SIGKILL)

        def is_back(slot: int = slot, incarnation: int = incarnation) -> bool:
            decision = running.decision()
            assert decision is not None
            return slot in decision.members and incarnation_of(decision.incarnations, slot) == incarnation

        wait_for(is_back)
        wait_for(lambda: is_protected(running))  # the next loss must not need a checkpoint
        found = {"trainer 0": use_of(pids[0])}
        found |= {f"supervisor {slot}": use_of(pid) for slot, pid in supervisors.items()}
        used.append(found)
    return used


def check_handles(used: list[dict[str, tuple[int, int, float]]]) -> None:
    """File descriptors and threads are what they were once the first cycles had filled the pools."""
    for who in used[0]:
        for part, name in ((0, "file descriptors"), (1, "threads")):
            before = max(found[who][part] for found in used[: WARM_CYCLES + 1])
            after = max(found[who][part] for found in used[-3:])
            assert after <= before + 2, f"{who}: {name} {[found[who][part] for found in used]}"


def check_memory(used: list[dict[str, tuple[int, int, float]]]) -> None:
    """It goes up and down with what is under way, by tens of MiB, so medians over many cycles are compared."""
    for who in used[0]:
        sizes = [found[who][2] for found in used]
        before, after = statistics.median(sizes[5:15]), statistics.median(sizes[-10:])
        assert after <= before + 32, f"{who}: MiB {sizes}"


@pytest.mark.timeout(300)
def test_ten_failures_and_returns_leave_nothing_open(folder: Path) -> None:
    check_handles(play(folder, 10))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_fifty_failures_and_returns_leave_nothing_behind(folder: Path) -> None:
    used = play(folder, 50)
    check_handles(used)
    check_memory(used)
