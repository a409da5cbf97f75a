"""A rank of the plain job: what torch alone gives, with checkpoints; torchrun starts all ranks anew when one dies.

    torchrun --standalone --nproc-per-node N --max-restarts M nep/testing/recovery_bench/restart_worker.py FOLDER

Each rank writes what it alone has (its experts and their moments), rank 0 the rest as well; a checkpoint counts once
the name of its step is in `latest`, which rank 0 replaces after all have written.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from nep.testing.overhead.plain import PlainJob
from nep.testing.recovery_bench.journal import Journal
from nep.testing.recovery_bench.work import Work


def main(work: Work) -> int:
    """Train until the last step, from the newest checkpoint."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    journal = Journal(work.folder, rank)
    job = plain_job(work, work.batch // size)
    load(job, work.folder, rank)
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    while job.steps_done < work.steps:
        job.step()
        journal.write("step", step=job.steps_done, size=size, generation=generation)
        if job.steps_done % work.checkpoint_every == 0:
            save(job, work.folder, rank)
    return 0


def plain_job(work: Work, micro_batch_size: int) -> PlainJob:
    """This rank's part of the peer, before the first step."""
    return PlainJob(
        work.model(),
        lines=work.lines,
        initial=work.initial,
        dtype=work.dtype,
        data=work.data(),
        optimizer=work.optimizer,
        total_steps=work.steps,
        global_batch_size=work.batch,
        micro_batch_size=micro_batch_size,
    )


def save(job: PlainJob, folder: Path, rank: int) -> None:
    """Write a checkpoint. All ranks call it."""
    target = folder / f"step{job.steps_done}"
    target.mkdir(exist_ok=True)
    save_file(job.state(with_shared=rank == 0), target / f"rank{rank}.safetensors")
    dist.barrier()
    if rank == 0:
        unfinished = folder / "latest.unfinished"
        unfinished.write_text(target.name)
        os.replace(unfinished, folder / "latest")


def load(job: PlainJob, folder: Path, rank: int) -> None:
    """Go on from the newest checkpoint, if there is one."""
    latest = folder / "latest"
    if not latest.exists():
        return
    source = folder / latest.read_text()
    own = load_file(source / f"rank{rank}.safetensors")
    shared = load_file(source / "rank0.safetensors") if rank else {}
    job.load_state({**shared, **own}, int(source.name.removeprefix("step")))


if __name__ == "__main__":
    sys.exit(main(Work.read(Path(sys.argv[1]) / "work.json")))
