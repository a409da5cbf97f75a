"""What the launcher says through the environment, and what torch's NCCL is told by it. No other module reads it for a
job's shape."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from nep.distributed.transports.probe import REQUIRED, SET, VARIABLES
from nep.fault_tolerance.job import DEFAULT_TIMEOUT_BASE_S, JobSpec

JOIN = "NEP_JOIN"  # 1: the job runs, and this process brings its slot back
_REQUIRED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


def job_from_environment(
    *,
    run_dir: Path,
    timeout_base_s: float = DEFAULT_TIMEOUT_BASE_S,
    environ: Mapping[str, str] | None = None,
) -> JobSpec | None:
    """Read torchrun's variables.

    Args:
        run_dir: the job's folder, the same for every slot.
        timeout_base_s: seconds from which every time-out is derived.
        environ: used in place of the process's environment.

    Returns:
        This process's place in the job, or None when no launcher started it: a single process.

    Raises:
        ValueError: a launcher whose agent does not host the store, or variables that are missing or
        malformed.
    """
    environ = os.environ if environ is None else environ
    if "RANK" not in environ:
        return None
    missing = [name for name in _REQUIRED if name not in environ]
    if missing:
        raise ValueError(
            f"RANK ({environ['RANK']}) is set without {', '.join(missing)}; "
            "start the job with torchrun, or unset RANK to run as a single process"
        )
    agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE", "")
    if agent_store != "True":
        # Otherwise the worker of rank 0 would host the store, and the store would die with it.
        raise ValueError(
            f"TORCHELASTIC_USE_AGENT_STORE ({agent_store or 'not set'}) must be "
            "True, since the control store must live in the launcher's agent and not in a worker; use "
            "torchrun (for one node with --standalone) and unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
        )
    return JobSpec(
        slot=_integer(environ, "RANK"),
        num_slots=_integer(environ, "WORLD_SIZE"),
        slots_per_node=_integer(environ, "LOCAL_WORLD_SIZE"),
        node=_integer(environ, "GROUP_RANK"),
        local_index=_integer(environ, "LOCAL_RANK"),
        run_id=environ["TORCHELASTIC_RUN_ID"],
        attempt=_integer(environ, "TORCHELASTIC_RESTART_COUNT"),
        store_address=f"{environ['MASTER_ADDR']}:{_integer(environ, 'MASTER_PORT')}",
        run_dir=run_dir,
        timeout_base_s=timeout_base_s,
        joins=environ.get(JOIN) == "1",
    )


def environment_to_join(
    slot: int, *, num_slots: int, slots_per_node: int, run_id: str, attempt: int, address: str
) -> dict[str, str]:
    """The variables with which `nep join` starts the process of a slot: as the first launcher's, but for `JOIN`."""
    host, _, port = address.rpartition(":")
    known = {
        "RANK": slot,
        "LOCAL_RANK": slot % slots_per_node,
        "GROUP_RANK": slot // slots_per_node,
        "WORLD_SIZE": num_slots,
        "LOCAL_WORLD_SIZE": slots_per_node,
        "MASTER_ADDR": host.removeprefix("[").removesuffix("]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        JOIN: "1",
    }
    return {"OMP_NUM_THREADS": "1", **os.environ} | {name: str(value) for name, value in known.items()}


def speaks(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process says what is wrong before a job begins: all find the same, one of them says it."""
    environ = os.environ if environ is None else environ
    return environ.get("RANK", "0") == "0" or JOIN in environ


def single_process_job(
    *, run_dir: Path, run_id: str = "alone", timeout_base_s: float = DEFAULT_TIMEOUT_BASE_S
) -> JobSpec:
    """The job of a process that no launcher started: one slot, and a control store of its own."""
    return JobSpec(
        slot=0,
        num_slots=1,
        slots_per_node=1,
        run_id=run_id,
        store_address=None,
        run_dir=run_dir,
        timeout_base_s=timeout_base_s,
    )


def nccl_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that matter for NCCL and are set."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in VARIABLES if name in environ}


def prepare_nccl(*, nonblocking_timeout_s: float, environ: MutableMapping[str, str] | None = None) -> None:
    """Set what torch and NCCL read when the first group of a process is made. What is set already stays.

    Args:
        nonblocking_timeout_s: how long torch waits inside a call for a communicator that is not ready: while it is
            made, or connects a pair of ranks for the first time. torch counts whole seconds.
    """
    environ = os.environ if environ is None else environ
    for name in SET:
        environ.setdefault(name, REQUIRED[name][0])
    environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(nonblocking_timeout_s)))
    # Kernels of two communicators then run in the order in which they were launched, the same on all slots.
    environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    # The watchdog sleeps four times this after an error, and whoever drops the group waits for it.
    environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0")


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f'{name} ("{environ[name]}") must be an integer; start the job with torchrun') from None
