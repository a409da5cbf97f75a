"""A job of one slot in the process that the user has started: no launcher, no supervisor, and a store of its own."""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta

import torch.distributed as dist

from nep.distributed.timeouts import Timeouts
from nep.fault_tolerance import processes
from nep.fault_tolerance.control_store import ControlStore
from nep.fault_tolerance.forking import Trainer
from nep.fault_tolerance.job import GenerationCell, Job, JobSpec, publish_job


def run_alone(trainer: Trainer, *, spec: JobSpec) -> int:
    """Run `trainer` in this process, as the only slot of a job that hosts its own control store on loopback.

    Raises:
        ValueError: `spec` belongs to a job of several slots or to a launcher.
    """
    if spec.store_address is not None or spec.num_slots != 1:
        raise ValueError(
            f"spec (num_slots {spec.num_slots}, store_address {spec.store_address}) comes from a launcher; "
            "use supervise"
        )
    timeout = timedelta(seconds=Timeouts(base_s=spec.timeout_base_s).store_s)
    server = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
    address = f"127.0.0.1:{server.port}"
    publish_job(spec, ControlStore(server, spec.prefix), address)
    # Whoever reads the output may leave before the job ends (`| head`, a lost terminal).
    out, err = processes.LastingStream(sys.stdout), processes.LastingStream(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return trainer(Job.from_spec(spec, GenerationCell(), address))
