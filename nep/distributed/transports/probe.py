"""What NCCL can do here, seen without touching a GPU from this process.

A supervisor forks its trainers, and a process that has looked at CUDA cannot fork one that uses it. So a process of its
own looks; where torch has no CUDA, none is needed. Run as a module it prints what it sees.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

Version = tuple[int, int, int]

_LOOK_S = 120.0  # importing torch and waking a GPU, on a busy node
# First versions with what is needed, and versions that are known to break it; docs/nccl.md has the sources.
OLDEST: Version = (2, 26, 2)  # earlier ones hang in an abort
BROKEN: tuple[tuple[Version, Version, str], ...] = (
    ((2, 28, 3), (2, 28, 9), "aborting and making communicators anew in one process ends in a segmentation fault"),
)
# Variables that nep works with one value of only: name -> (it, why). Where the default is another one, `SET` has it.
REQUIRED: Mapping[str, tuple[str, str]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "torch's watchdog ends the process when an operation fails or is slow"),
    "TORCH_NCCL_BLOCKING_WAIT": ("0", "a wait would block, and could not be given up when a slot is lost"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": (
        "0",
        "one error anywhere leaves a mark in the store of the launcher, at which every process that sees it ends",
    ),
    "NCCL_COMM_BLOCKING": ("0", "a communicator that waits for a dead member could not be aborted"),
    "NCCL_NVLS_ENABLE": ("0", "NVLink SHARP does not survive the abort of a communicator"),
    "CUDA_LAUNCH_BLOCKING": ("0", "every launch would wait for its peers, and could not be given up"),
}
SET = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "NCCL_NVLS_ENABLE")
_FALSE = ("0", "n", "no", "f", "false", "off")
_OLD_NAMES = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What there is.

    Attributes:
        cuda: CUDA release that torch was built with, or None.
        nccl: whether torch was built with NCCL.
        num_devices: GPUs that a process can use.
        version: of NCCL at run time, or None.
        nonblocking: whether torch lets communicators be made without blocking.
        error: what went wrong while looking.
    """

    cuda: str | None
    nccl: bool
    num_devices: int = 0
    version: Version | None = None
    nonblocking: bool = False
    error: str | None = None


Look = Callable[[], Seen]


def look() -> Seen:
    """See what there is, in another process if there may be something."""
    built = Seen(cuda=torch.version.cuda, nccl=dist.is_nccl_available())
    if built.cuda is None or not built.nccl:
        return built
    command = [sys.executable, "-m", __name__ if __name__ != "__main__" else __spec__.name]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_S, check=False)
    except subprocess.TimeoutExpired:
        return dataclasses.replace(built, error=f"the GPUs did not answer in {_LOOK_S:g} s")
    return read(ended.stdout, built, ended.returncode, ended.stderr)


def read(text: str, built: Seen, returncode: int, errors: str) -> Seen:
    """What another process has printed.

    Args:
        text: its output.
        built: what is known without it.
        returncode: how it ended.
        errors: what it printed to standard error.
    """
    lines = text.strip().splitlines()
    if returncode != 0 or not lines:
        last = (errors.strip().splitlines() or [f"exit code {returncode}"])[-1]
        return dataclasses.replace(built, error=last[:200])
    fields = json.loads(lines[-1])
    if fields["version"] is not None:
        fields["version"] = tuple(fields["version"])
    return Seen(**fields)


def look_here() -> Seen:
    """See what there is, in this process, which must not fork another one afterwards."""
    built = Seen(cuda=torch.version.cuda, nccl=dist.is_nccl_available())
    if built.cuda is None or not built.nccl:
        return built
    group = dist.ProcessGroupNCCL
    version = group.get_runtime_nccl_version() if hasattr(group, "get_runtime_nccl_version") else None
    if version is None:
        version = torch.cuda.nccl.version()
    return dataclasses.replace(
        built,
        num_devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        version=(int(version[0]), int(version[1]), int(version[2])),
        nonblocking=hasattr(group.Options().config, "blocking") and hasattr(group, "eager_connect_single_device"),
    )


def nccl_problems(seen: Seen, *, local_slots: int, environment: Mapping[str, str]) -> list[str]:
    """Why a job cannot train with NCCL here, a sentence each, without a full stop.

    Args:
        seen: what there is.
        local_slots: slots of this node.
        environment: variables that are set, by name; those that matter are among `VARIABLES`.
    """
    if seen.cuda is None:
        return ["this torch has no CUDA (it was built for CPUs); install a release that was built with it"]
    if not seen.nccl:
        return [f"this torch, built with CUDA {seen.cuda}, has no NCCL; install a release that was built with it"]
    if seen.error is not None:
        return [f"looking at the GPUs failed: {seen.error}"]
    problems = []
    if seen.num_devices < local_slots:
        problems.append(
            f"{local_slots} processes on this node need a GPU each, and there are {seen.num_devices} "
            "(nvidia-smi and CUDA_VISIBLE_DEVICES say which)"
        )
    if not seen.nonblocking:
        problems.append("this torch cannot make communicators without blocking; install torch 2.10 or newer")
    if seen.version is None:
        problems.append("the version of NCCL is unknown")
    else:
        problems += _version_problems(seen.version)
    return problems + _variable_problems(environment)


def _version_problems(version: Version) -> list[str]:
    text = ".".join(map(str, version))
    if version < OLDEST:
        return [f"NCCL {text} is older than {'.'.join(map(str, OLDEST))}: aborting a communicator may hang"]
    return [
        f"NCCL {text}: {why} (from {'.'.join(map(str, first))} on, mended in {'.'.join(map(str, mended))})"
        for first, mended, why in BROKEN
        if first <= version < mended
    ]


def _variable_problems(environment: Mapping[str, str]) -> list[str]:
    problems = []
    for name, value in environment.items():
        wanted, why = REQUIRED[_OLD_NAMES.get(name, name)]
        if _plain(value) != wanted:
            problems.append(f"{name} ({value}) must be {wanted} or unset: {why}")
    return problems


def _plain(value: str) -> str:
    """Numbers and truth values as torch reads them, 0 or 1; others as they are."""
    text = value.strip().lower()
    if text in _FALSE:
        return "0"
    return "1" if text in ("1", "y", "yes", "t", "true", "on") else text


# All names that `nccl_problems` looks at.
VARIABLES = (*REQUIRED, *_OLD_NAMES)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(look_here())))
