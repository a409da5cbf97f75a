"""Which device a slot computes on, and what carries its messages: decided here and nowhere else."""

from __future__ import annotations

import torch

from nep.distributed.timeouts import Timeouts
from nep.distributed.transports.base import Transport
from nep.distributed.transports.gloo import GlooTransport
from nep.distributed.transports.nccl import NcclTransport
from nep.distributed.transports.probe import Look, look, nccl_problems
from nep.fault_tolerance.environment import nccl_variables, prepare_nccl
from nep.fault_tolerance.job import Job


def device_type_for(backend: str) -> str:
    """`cpu` or `cuda`."""
    return "cuda" if backend == "nccl" else "cpu"


def device_for(backend: str, local_index: int) -> torch.device:
    """Where all tensors of a slot are: state, gradients, messages, batches.

    Args:
        backend: of the job.
        local_index: of the slot on its node.
    """
    if backend == "nccl":
        return torch.device("cuda", local_index)
    return torch.device("cpu")


def board_of(backend: str, local_index: int) -> int | str:
    """The board of a slot as NVML finds it; called in its trainer.

    CUDA may show only some of a machine's GPUs, and in another order: then the number means another board there.

    Args:
        backend: of the job.
        local_index: of the slot on its node.
    """
    if backend == "nccl":
        return str(torch.cuda.get_device_properties(local_index).uuid)
    return local_index


def make_transport(backend: str, job: Job, timeouts: Timeouts) -> Transport:
    """What carries the messages of a slot; called in its trainer, before any group is made."""
    if backend != "nccl":
        return GlooTransport(job.listen_on)
    prepare_nccl(nonblocking_timeout_s=timeouts.rebuild_s)
    return NcclTransport(device_for(backend, job.local_index), abandon_timeout_s=timeouts.wait_s)


def backend_problems(backend: str, *, redundancy: str, local_slots: int, see: Look = look) -> list[str]:
    """Why a job cannot use a backend on this machine, a sentence each. Starts nothing, and leaves GPUs alone.

    Args:
        backend: gloo or nccl.
        redundancy: of the job.
        local_slots: its slots on this node.
        see: looks at torch, NCCL and the GPUs.
    """
    if backend != "nccl":
        return []
    problems = [
        f"backend 'nccl': {reason}; use 'gloo' (CPU), or mend that"
        for reason in nccl_problems(see(), local_slots=local_slots, environment=nccl_variables())
    ]
    if redundancy == "host":
        problems.append(
            "redundancy 'host': with backend 'nccl' mirrors are kept on devices only; use --redundancy device"
        )
    return problems
