"""A supervised job for `test_supervisor`: `supervisor_job.py SCENARIO RUN_DIR`, once for each slot.

Trainers without tensors: each scenario is what the trainers do. What they saw goes to files in the run
folder, as a trainer's word must outlive it.
"""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy  # noqa: F401  with threads of its own where OMP_NUM_THREADS is not 1: they must not matter

from nep.fault_tolerance.alone import run_alone
from nep.fault_tolerance.control_store import (
    decision_key,
    end_key,
    exit_key,
    fault_key,
    fence_key,
    job_key,
    supervisor_key,
)
from nep.fault_tolerance.environment import job_from_environment, single_process_job
from nep.fault_tolerance.job import Job
from nep.fault_tolerance.requests import Request, Requests
from nep.fault_tolerance.supervisor import supervise

WAIT_S = 60.0
TIMEOUT_BASE_S = 1.0
# Where something must be found at once: whatever is found by a time-out takes half of this or longer.
LONG_BASE_S = 20.0
WATCHING = "watching"  # present: slot 0 is about to wait for the fault


def note(job: Job, **what: object) -> None:
    path = job.run_dir / f"note{job.slot}.json"
    path.with_suffix(".unfinished").write_text(json.dumps(what))
    path.with_suffix(".unfinished").replace(path)


def wait_for_notes(job: Job, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while len(list(job.run_dir.glob("note*.json"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def finish(job: Job, code: int = 0) -> int:
    """How a trainer leaves: the lowest slot that is not expected to die ends the job."""
    store = job.connect()
    if job.slot == 0:
        store.set(end_key(), str(code))
    assert store.wait(end_key(), WAIT_S)
    return code


def see_fault_and_finish(job: Job) -> int:
    """Slot 0's part wherever slot 1 goes wrong."""
    store = job.connect()
    store.set(WATCHING, "1")
    assert store.wait(fault_key(1), WAIT_S)
    seen_s = time.time()
    note(job, seen_s=seen_s, fault=store.get_json(fault_key(1)), exit=store.get_json(exit_key(1)))
    return finish(job)


def healthy(job: Job) -> int:
    status = Path("/proc", str(os.getppid()), "status").read_text()
    threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads:"))
    note(job, parent_threads=threads, slot=job.slot, num_slots=job.num_slots)
    wait_for_notes(job, job.num_slots)  # whoever comes later than the end may be too late to say anything
    return finish(job)


def kill(job: Job) -> int:
    if job.slot != 1:
        return see_fault_and_finish(job)
    # Until both are connected nothing can be told or seen: opening a connection may wait for the DNS.
    store = job.connect()
    assert store.wait(supervisor_key(1), WAIT_S) and store.wait(WATCHING, WAIT_S)
    note(job, killed_s=time.time())
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def exit_zero(job: Job) -> int:
    if job.slot != 1:
        return see_fault_and_finish(job)
    os._exit(0)


def exception(job: Job) -> int:
    if job.slot != 1:
        return see_fault_and_finish(job)
    raise RuntimeError("no more beads on the abacus")


def freeze(job: Job) -> int:
    store = job.connect()
    if job.slot == 1:
        assert store.wait(supervisor_key(1), WAIT_S)
        store.set("frozen", "1")
        os.kill(os.getpid(), signal.SIGSTOP)
        raise AssertionError("a stopped process went on")
    assert store.wait("frozen", WAIT_S)
    store.set(fence_key(1), "7")  # another incarnation
    time.sleep(0.5)
    survived = not store.exists(exit_key(1))
    fenced_s = time.time()
    store.set(fence_key(1), "1")
    assert store.wait(exit_key(1), WAIT_S)
    note(job, survived=survived, fence_s=time.time() - fenced_s, exit=store.get_json(exit_key(1)))
    return finish(job)


def parent_killed(job: Job) -> int:
    note(job, pid=os.getpid())
    if job.slot == 1:
        wait_for_notes(job, 2)
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(WAIT_S)
    return 0


def all_dead(job: Job) -> int:
    os._exit(7)


def members_dead(job: Job) -> int:
    """Slot 2 leaves generation 1; generation 2, without it, dies as a whole."""
    store = job.connect()
    if job.slot == 2:
        os._exit(1)
    if job.slot == 0:
        assert store.wait(exit_key(2), WAIT_S)
        store.set_json(decision_key(2), {"members": [0, 1]})
    assert store.wait(decision_key(2), WAIT_S)
    job.report_generation(2)
    os._exit(1)


def decided_without_knowing(job: Job, members: tuple[int, ...]) -> int:
    """Slot 1 dies in generation 1 when generations 2 and 3 have been decided."""
    store = job.connect()
    if job.slot == 1:
        assert store.wait(decision_key(3), WAIT_S)
        os._exit(1)
    store.set_json(decision_key(2), {"members": [0, 1]})
    store.set_json(decision_key(3), {"members": members})
    assert store.wait(fault_key(3 if 1 in members else 1), WAIT_S)
    time.sleep(0.5)
    note(job, flagged=[g for g in range(1, 5) if store.exists(fault_key(g))])
    return finish(job)


def decided_with(job: Job) -> int:
    return decided_without_knowing(job, (0, 1))


def decided_without(job: Job) -> int:
    return decided_without_knowing(job, (0,))


def later_generation(job: Job) -> int:
    job.report_generation(5)
    store = job.connect()
    if job.slot == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    assert store.wait(fault_key(5), WAIT_S)
    note(job, first=store.exists(fault_key(1)), exit=store.get_json(exit_key(1)))
    return finish(job)


def is_running(pid: int) -> bool:
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def ends_with_code(job: Job) -> int:
    """Slot 1 is dead when the job ends with a code of its own."""
    if job.slot == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    store = job.connect()
    assert store.wait(exit_key(1), WAIT_S)
    store.set(end_key(), "4")
    parent = store.get_json(supervisor_key(1))
    assert parent is not None
    # The first one to leave makes the launcher stop the other: this slot is not to be the first.
    deadline = time.monotonic() + WAIT_S
    while is_running(parent["pid"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return 4


def crash_after_end(job: Job) -> int:
    finish(job)
    if job.slot == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    return 0


def stuck_after_end(job: Job) -> int:
    finish(job)
    if job.slot == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    return 0


def ignore_stop(job: Job) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert job.connect().wait(supervisor_key(job.slot), WAIT_S)
    note(job, pid=os.getpid(), parent=os.getppid())
    time.sleep(3600)
    return 0


def obey_stop(job: Job) -> int:
    """Stops in an orderly way, as with a checkpoint."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    note(job, pid=os.getpid(), parent=os.getppid())
    while not told:
        time.sleep(0.01)
    (job.run_dir / f"stopped{job.slot}").touch()
    return 4


def stop_by_itself(job: Job) -> int:
    """Notices the loss of the store by itself, and has a checkpoint to write."""
    store = job.connect()
    assert store.wait(supervisor_key(job.slot), WAIT_S)
    note(job, pid=os.getpid())
    try:
        while True:
            store.get(end_key())
            time.sleep(0.01)
    except RuntimeError:
        time.sleep(0.5)
        return 4


def leave_helpers(job: Job) -> int:
    """Slot 1 leaves processes behind: an obedient and a stubborn one."""
    if job.slot != 1:
        return see_fault_and_finish(job)
    for stubborn in (False, True):
        if os.fork() == 0:
            os.setsid()
            if stubborn:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            unfinished = job.run_dir / f"unfinished{int(stubborn)}"
            unfinished.write_text(str(os.getpid()))
            unfinished.replace(job.run_dir / f"helper{int(stubborn)}")
            time.sleep(3600)
    while len(list(job.run_dir.glob("helper*"))) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def comes_back(job: Job) -> int:
    """Slot 1 dies, again and again until its budget is spent, and once more when an operator brings it back."""
    store = job.connect()
    if job.slot == 1:
        note(job, incarnation=job.incarnation, cell=job.generation_cell.get())
        os._exit(9)
    exits = [exit_key(1, incarnation) for incarnation in (1, 2, 3)]
    assert store.wait(exits[1], WAIT_S)
    time.sleep(0.5)
    early = store.exists(exits[2])
    Requests().post(store, Request(kind="undrain", slot=1))
    assert store.wait(exits[2], WAIT_S)
    note(job, early=early, exits=[store.get_json(key) for key in exits], flagged=store.get_json(fault_key(1)))
    return finish(job)


def drained_stays_away(job: Job) -> int:
    """Slot 1 leaves since it is drained, and comes when it is undrained."""
    store = job.connect()
    if job.slot == 1:
        if job.incarnation == 1:
            Requests().post(store, Request(kind="drain", slot=1))
            return 0
        store.set("back", str(job.incarnation))
        return finish(job)
    assert store.wait(exit_key(1), WAIT_S)
    time.sleep(0.5)
    early = store.exists("back")
    Requests().post(store, Request(kind="undrain", slot=1))
    assert store.wait("back", WAIT_S)
    note(job, early=early)
    return finish(job)


def second_supervisor(job: Job) -> int:
    """As if the launcher had started slot 0 once more on the same store: see `main`."""
    return finish(job)


def with_threads(job: Job) -> int:
    """Has no chance to run: see `main`."""
    return finish(job)


def alone(job: Job) -> int:
    store = job.connect()
    store.set(end_key(), "0")
    note(job, slots=job.num_slots, description=store.get_json(job_key()))
    return 3


def main() -> int:
    scenario, run_dir = globals()[sys.argv[1]], Path(sys.argv[2])
    spec = job_from_environment(run_dir=run_dir, timeout_base_s=TIMEOUT_BASE_S)
    if spec is None:
        return run_alone(scenario, spec=single_process_job(run_dir=run_dir, timeout_base_s=TIMEOUT_BASE_S))
    if scenario in (kill, freeze):
        spec = dataclasses.replace(spec, timeout_base_s=LONG_BASE_S)
    if scenario in (comes_back, drained_stays_away):
        spec = dataclasses.replace(spec, respawn=1)
    if scenario is with_threads:
        threading.Thread(target=time.sleep, args=(WAIT_S,), daemon=True).start()
    if scenario is second_supervisor:
        print("first:", supervise(scenario, spec=spec), flush=True)
    return supervise(scenario, spec=spec)


if __name__ == "__main__":
    sys.exit(main())
