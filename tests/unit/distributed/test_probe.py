"""What is said about NCCL on a machine, without any GPU to look at."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from nep.distributed.transports import probe
from nep.distributed.transports.probe import BROKEN, OLDEST, REQUIRED, SET, VARIABLES, Seen, look, nccl_problems, read

GOOD = Seen(cuda="13.0", nccl=True, num_devices=4, version=(2, 30, 4), nonblocking=True)


def problems(local_slots: int = 4, environment: dict[str, str] | None = None, **changes: Any) -> list[str]:
    return nccl_problems(dataclasses.replace(GOOD, **changes), local_slots=local_slots, environment=environment or {})


def test_a_machine_with_enough_gpus_will_do() -> None:
    assert problems() == []
    assert problems(environment={name: value for name, (value, _) in REQUIRED.items()}) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cuda": None, "nccl": False}, "this torch has no CUDA"),
        ({"nccl": False}, "built with CUDA 13.0, has no NCCL"),
        ({"error": "CUDA driver version is insufficient"}, "CUDA driver version is insufficient"),
        ({"num_devices": 3}, "4 processes on this node need a GPU each, and there are 3"),
        ({"nonblocking": False}, "without blocking"),
        ({"version": None}, "the version of NCCL is unknown"),
        ({"version": (2, 25, 1)}, "NCCL 2.25.1 is older than 2.26.2"),
        ({"version": (2, 28, 3)}, "NCCL 2.28.3: aborting"),
        ({"version": (2, 28, 8)}, "mended in 2.28.9"),
    ],
)
def test_each_reason_is_one_sentence(changes: dict[str, Any], named: str) -> None:
    found = problems(**changes)
    assert len(found) == 1 and named in found[0]
    assert not found[0].endswith(".") and "\n" not in found[0]


@pytest.mark.parametrize("version", [OLDEST, (2, 27, 7), (2, 28, 2), (2, 28, 9), (2, 31, 2)])
def test_versions_that_work_are_not_refused(version: tuple[int, int, int]) -> None:
    assert problems(version=version) == []


def test_broken_ranges_are_not_empty() -> None:
    assert all(OLDEST <= first < mended for first, mended, _ in BROKEN)


def test_all_reasons_come_together() -> None:
    found = problems(num_devices=1, version=(2, 28, 5), environment={"NCCL_NVLS_ENABLE": "1"})
    assert len(found) == 3


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", True),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", False),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", True),  # its old name
        ("TORCH_NCCL_BLOCKING_WAIT", "True", True),
        ("TORCH_NCCL_BLOCKING_WAIT", "no", False),
        ("NCCL_BLOCKING_WAIT", "1", True),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "yes", True),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "off", False),
        ("NCCL_COMM_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "1", True),
    ],
)
def test_variables_with_another_meaning_are_refused(name: str, value: str, refused: bool) -> None:
    found = problems(environment={name: value})
    assert bool(found) == refused
    if refused:
        assert found[0].startswith(f"{name} ({value}) must be 0 or unset: ")


def test_what_is_set_is_what_is_required() -> None:
    assert set(SET) <= set(REQUIRED) <= set(VARIABLES)


def test_this_machine_is_looked_at_without_a_gpu() -> None:
    seen = look()
    assert (seen.cuda, seen.nccl) == (torch.version.cuda, torch.distributed.is_nccl_available())
    if torch.version.cuda is None:
        assert "no CUDA" in nccl_problems(seen, local_slots=1, environment={})[0]


def test_another_process_looks_where_there_may_be_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real module, run as the real command; what torch was built with is pretended here."""
    asked: list[list[str]] = []
    run = subprocess.run

    def remembered(command: list[str], **arguments: Any) -> Any:
        asked.append(command)
        return run(command, **arguments)

    monkeypatch.setattr(probe.torch.version, "cuda", "13.0")
    monkeypatch.setattr(probe.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", remembered)
    seen = look()
    assert asked == [[sys.executable, "-m", "nep.distributed.transports.probe"]]
    # The other process is not pretended to: it has this machine's torch.
    assert seen.cuda is None or seen.num_devices == torch.cuda.device_count()


def test_what_the_other_process_says_is_read() -> None:
    built = Seen(cuda="13.0", nccl=True)
    text = "a warning of some library\n" + json.dumps(dataclasses.asdict(GOOD)) + "\n"
    assert read(text, built, 0, "") == GOOD
    failed = read("", built, 1, "Traceback\nRuntimeError: no driver\n")
    assert failed == dataclasses.replace(built, error="RuntimeError: no driver")
    assert read("", built, -11, "").error == "exit code -11"


def test_a_look_that_hangs_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], timeout: float, **arguments: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(probe.torch.version, "cuda", "13.0")
    monkeypatch.setattr(probe.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", hang)
    assert "did not answer" in nccl_problems(look(), local_slots=1, environment={})[0]
