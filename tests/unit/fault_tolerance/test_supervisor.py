"""Parts of the supervisor that need no launcher; the rest is in tests/endtoend/test_supervisor.py."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from nep.distributed.timeouts import SupervisorTimeouts
from nep.fault_tolerance.alone import run_alone
from nep.fault_tolerance.control_store import ControlStore, discover_job, end_key
from nep.fault_tolerance.environment import single_process_job
from nep.fault_tolerance.job import GenerationCell, Job, JobSpec
from nep.fault_tolerance.supervisor import supervise


def spec(run_dir: Path, **changes: object) -> JobSpec:
    return dataclasses.replace(single_process_job(run_dir=run_dir, timeout_base_s=2.0), **changes)  # type: ignore[arg-type]


def test_every_timeout_derives_from_the_base() -> None:
    small, large = SupervisorTimeouts.from_base(0.1), SupervisorTimeouts.from_base(10.0)
    for field in dataclasses.fields(SupervisorTimeouts):
        assert 0 < getattr(small, field.name) < getattr(large, field.name)


def test_a_stop_leaves_time_before_torchrun_kills() -> None:
    # torchrun sends SIGKILL 30 s after SIGTERM: by then the trainer must be gone and its helpers too.
    huge = SupervisorTimeouts.from_base(1e6)
    assert huge.grace_s + huge.helper_s <= 30
    assert huge.poll_s <= 0.05  # a fence is obeyed within milliseconds whatever the base


def test_the_generation_outlives_the_child_that_reported_it() -> None:
    cell = GenerationCell()
    assert cell.get() == 1
    pid = os.fork()
    if pid == 0:
        cell.set(2**40 + 7)
        os._exit(0)
    os.waitpid(pid, 0)
    assert cell.get() == 2**40 + 7


def test_run_alone(tmp_path: Path) -> None:
    jobs: list[Job] = []

    def trainer(job: Job) -> int:
        jobs.append(job)
        job.report_generation(2)
        store = job.connect()
        store.set(end_key(), "0")
        description = json.loads((tmp_path / "run" / "job.json").read_text())
        assert discover_job(description["store_address"], 5.0) == description
        by_file = ControlStore.connect(description["store_address"], description["prefix"], 5.0)
        assert by_file.get(end_key()) == "0"
        assert by_file.get_json("job") == description
        assert (description["schema"], description["pid"], description["num_slots"]) == (1, os.getpid(), 1)
        return 4

    assert run_alone(trainer, spec=spec(tmp_path / "run")) == 4
    (job,) = jobs
    assert (job.slot, job.num_slots, job.slots_per_node, job.incarnation) == (0, 1, 1, 1)
    assert job.generation_cell.get() == 2
    assert job.log_path == tmp_path / "run" / "slot0.log"


def test_attempts_do_not_share_keys(tmp_path: Path) -> None:
    first, second = spec(tmp_path), spec(tmp_path, attempt=1)
    assert first.prefix.startswith("nep/alone/")
    assert first.prefix != second.prefix


def test_the_wrong_entry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use run_alone"):
        supervise(lambda job: 0, spec=spec(tmp_path))
    with pytest.raises(ValueError, match="use supervise"):
        run_alone(lambda job: 0, spec=spec(tmp_path, store_address="127.0.0.1:1"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot": 1}, r"slot \(1\)"),
        ({"slot": -1}, r"slot \(-1\)"),
        ({"local_index": 1}, r"local_index \(1\)"),
        ({"timeout_base_s": 0.0}, r"timeout_base_s \(0\.0\)"),
        ({"timeout_base_s": float("nan")}, r"timeout_base_s \(nan\)"),
    ],
)
def test_impossible_specs_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(tmp_path, **changes)
