"""Reading a launcher's environment."""

import dataclasses
from pathlib import Path

import pytest

from nep.fault_tolerance.environment import (
    environment_to_join,
    job_from_environment,
    nccl_variables,
    prepare_nccl,
    single_process_job,
    speaks,
)

# As torchrun 2.13 sets it for the second of two nodes with two workers each.
TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29511",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_torchrun(tmp_path: Path) -> None:
    spec = job_from_environment(run_dir=tmp_path, timeout_base_s=3.0, environ=TORCHRUN)
    assert spec is not None
    assert (spec.slot, spec.num_slots, spec.slots_per_node, spec.node, spec.local_index) == (3, 4, 2, 1, 1)
    assert (spec.store_address, spec.run_id, spec.attempt) == ("node-a:29511", "abc", 2)
    assert (spec.run_dir, spec.timeout_base_s, spec.incarnation) == (tmp_path, 3.0, 1)


def test_the_process_environment_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert job_from_environment(run_dir=tmp_path) == job_from_environment(run_dir=tmp_path, environ=TORCHRUN)
    monkeypatch.delenv("RANK")
    assert job_from_environment(run_dir=tmp_path) is None


def test_no_launcher(tmp_path: Path) -> None:
    assert job_from_environment(run_dir=tmp_path, environ={"MASTER_ADDR": "left over"}) is None
    spec = single_process_job(run_dir=tmp_path)
    assert (spec.slot, spec.num_slots, spec.store_address) == (0, 1, None)


def test_missing_variables_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"without LOCAL_RANK, .*TORCHELASTIC_RUN_ID.*; start the job with torchrun"):
        job_from_environment(run_dir=tmp_path, environ={"RANK": "0", "WORLD_SIZE": "1"})


@pytest.mark.parametrize("agent_store", [None, "False"])
def test_a_store_inside_a_worker_is_refused(tmp_path: Path, agent_store: str | None) -> None:
    environ = {key: value for key, value in TORCHRUN.items() if key != "TORCHELASTIC_USE_AGENT_STORE"}
    if agent_store is not None:
        environ["TORCHELASTIC_USE_AGENT_STORE"] = agent_store
    with pytest.raises(ValueError, match=r"use torchrun .* unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        job_from_environment(run_dir=tmp_path, environ=environ)


def test_malformed_numbers_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'WORLD_SIZE \("four"\) must be an integer'):
        job_from_environment(run_dir=tmp_path, environ={**TORCHRUN, "WORLD_SIZE": "four"})


def test_a_slot_that_is_brought_back_has_the_place_that_it_had(tmp_path: Path) -> None:
    environ = environment_to_join(3, num_slots=4, slots_per_node=2, run_id="abc", attempt=2, address="[::1]:29511")
    spec = job_from_environment(run_dir=tmp_path, environ=environ)
    assert spec is not None and spec.joins and speaks(environ)
    first = job_from_environment(run_dir=tmp_path, environ={**TORCHRUN, "MASTER_ADDR": "::1"})
    assert first is not None and not first.joins and not speaks(TORCHRUN)
    assert dataclasses.replace(spec, joins=False) == first


def test_nccl_is_told_what_is_not_set_yet() -> None:
    environ = {"NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "7"}
    prepare_nccl(nonblocking_timeout_s=1.2, environ=environ)
    assert environ == {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "7",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    }
    fresh: dict[str, str] = {}
    prepare_nccl(nonblocking_timeout_s=1.2, environ=fresh)
    assert fresh["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "2", "torch counts whole seconds"


def test_nccl_variables_are_those_that_matter() -> None:
    environ = {"NCCL_DEBUG": "INFO", "NCCL_BLOCKING_WAIT": "1", "HOME": "/root"}
    assert nccl_variables(environ) == {"NCCL_BLOCKING_WAIT": "1"}
