"""scripts/train.py, but its channels are those of NCCL on a stand-in for a GPU (`nep.testing.fake_nccl`).

So a lost peer is never seen on the data path, and a generation ends by aborting its communicators.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from models.mixtral import build
from nep.distributed.timeouts import Timeouts
from nep.distributed.transports.base import Transport
from nep.distributed.transports.nccl import NcclTransport
from nep.fault_tolerance.job import Job
from nep.testing.fake_nccl import FakeNccl
from nep.train import make_run
from nep.train.main import main


def fake_transport(backend: str, job: Job, timeouts: Timeouts) -> Transport:
    calls = FakeNccl(lambda call: print(f"nccl: {call}", flush=True) if call in ("abort", "synchronize") else None)
    return NcclTransport(torch.device("cpu"), abandon_timeout_s=timeouts.wait_s, calls=calls)


if __name__ == "__main__":
    make_run.make_transport = fake_transport
    sys.exit(main(build))
