"""Training on GPUs with NCCL, and what is left of it when slots are killed: `pytest -m gpu tests/gpu/test_nccl.py`.

Every job is a real one: scripts/train.py under torchrun, one process to a GPU. Losses and parameters are compared with
the single-process reference on the CPU. Nobody has run this yet (docs/nccl.md); whoever does, please say what happened.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nep.distributed.transports.probe import look, look_here, nccl_problems
from nep.fault_tolerance.environment import nccl_variables
from nep.planning.shapes import preset
from nep.testing.jobs import JobOutcome, differences, reference_job, run_job
from nep.testing.reference import ReferenceHyper
from nep.train.data import TextCorpus

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
# At most four: what is tested does not grow with more.
SLOTS = min(NUM_GPUS, 4)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 1, reason="needs GPU"),
    pytest.mark.timeout(600),  # CUDA contexts, and communicators for every generation
]
several = pytest.mark.skipif(NUM_GPUS < 2, reason="needs GPUs, at least two")

STEPS, SEQ_LEN, BATCH, LR, WARMUP = 6, 16, 8, 3e-3, 2
BACKEND = "nccl"
# float64 on another device: sums in another order, and index_add_ in no fixed one.
LOSS_TOLERANCE, TENSOR_TOLERANCE = 1e-10, 1e-8
TIMEOUT_BASE_S = 10.0


@dataclass(frozen=True)
class GpuJob:
    """A small job, and what the reference got for it."""

    data: Path
    losses: list[float]
    params: dict[str, torch.Tensor]

    def run(self, num_slots: int, folder: Path, *arguments: str, backend: str = BACKEND) -> JobOutcome:
        options = f"--dtype float64 --steps {STEPS} --seq-len {SEQ_LEN} --global-batch-size {BATCH} --lr {LR}"
        options += f" --micro-batch-size 2 --warmup-steps {WARMUP} --validation-sequences 2 --data {self.data}"
        options += f" --backend {backend} --timeout-base-s {TIMEOUT_BASE_S}"
        return run_job(
            num_slots,
            [*options.split(), *arguments],
            folder,
            launcher="torchrun" if num_slots > 1 else "alone",
            timeout_s=300.0,
        )

    def check(self, outcome: JobOutcome) -> None:
        """Every loss, every parameter, every sample."""
        assert outcome.returncode == 0, outcome.output
        wrong = differences(outcome, self.losses, self.params, of_loss=LOSS_TOLERANCE, of_tensor=TENSOR_TOLERANCE)
        assert not wrong, f"{wrong}: {outcome.output}"


@pytest.fixture(scope="module")
def gpu_job(tmp_path_factory: pytest.TempPathFactory) -> GpuJob:
    data = tmp_path_factory.mktemp("data") / "text.txt"
    data.write_bytes(TextCorpus.generated(seed=1, num_bytes=200_000).text.tobytes())
    losses, params = reference_job(
        preset("debug"),
        data=data,
        steps=STEPS,
        seq_len=SEQ_LEN,
        global_batch_size=BATCH,
        seed=0,
        hyper=ReferenceHyper(lr=LR, warmup_steps=WARMUP, steps=STEPS),
    )
    return GpuJob(data=data, losses=losses, params=params)


def test_the_probe_sees_the_gpus_from_another_process() -> None:
    seen = look()
    assert seen.error is None
    assert (seen.num_devices, seen.version) == (NUM_GPUS, look_here().version)
    assert nccl_problems(seen, local_slots=NUM_GPUS, environment=nccl_variables()) == []
    too_many = nccl_problems(seen, local_slots=NUM_GPUS + 1, environment={})
    assert len(too_many) == 1 and f"there are {NUM_GPUS}" in too_many[0]


def test_one_slot_trains(gpu_job: GpuJob, tmp_path: Path) -> None:
    """No group is made; everything else is on the GPU."""
    gpu_job.check(gpu_job.run(1, tmp_path))


def test_a_checkpoint_written_on_a_gpu_loads_on_the_cpu(gpu_job: GpuJob, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    outcome = gpu_job.run(1, tmp_path / "first", "--checkpoint-dir", str(folder), "--checkpoint-every", "3")
    gpu_job.check(outcome)
    (last,) = folder.glob(f"step-{STEPS:08d}-*")
    shutil.rmtree(last)
    again = gpu_job.run(1, tmp_path / "second", "--checkpoint-dir", str(folder), backend="gloo")
    assert "going on from step 3" in again.output
    gpu_job.check(again)


@several
@pytest.mark.parametrize(
    "cut", [("--replicas", "1"), ("--replicas", "2"), ("--replicas", "1", "--tp", "2")], ids=" ".join
)
def test_several_slots_train(gpu_job: GpuJob, tmp_path: Path, cut: tuple[str, ...]) -> None:
    gpu_job.check(gpu_job.run(SLOTS, tmp_path, *cut))


@several
@pytest.mark.parametrize("phase", ["forward", "dispatch", "backward", "sync", "mirror", "vote", "apply", "return"])
def test_a_killed_slot_costs_nothing(gpu_job: GpuJob, tmp_path: Path, phase: str) -> None:
    """SIGKILL in each phase; the survivors abort, make new communicators and go on without it."""
    last = SLOTS - 1
    replicas = "1" if phase == "dispatch" else "2"
    outcome = gpu_job.run(SLOTS, tmp_path, "--replicas", replicas, "--respawn", "0", "--fail", f"{last}@3:kill@{phase}")
    gpu_job.check(outcome)
    assert outcome.result is not None
    assert outcome.result["live_slots"] == list(range(last))
    assert len(outcome.result["recovery_s"]) == 1


@several
def test_a_frozen_slot_is_fenced(gpu_job: GpuJob, tmp_path: Path) -> None:
    """Its kernels may still run while it is stopped, and end with it."""
    outcome = gpu_job.run(SLOTS, tmp_path, "--replicas", "2", "--respawn", "0", "--fail", "1@3:stop@backward")
    gpu_job.check(outcome)


@several
def test_a_killed_slot_comes_back(gpu_job: GpuJob, tmp_path: Path) -> None:
    """Its successor uses the same GPU, and generations change twice."""
    outcome = gpu_job.run(SLOTS, tmp_path, "--replicas", "2", "--respawn", "1", "--fail", "1@2:kill@backward")
    gpu_job.check(outcome)


@several
def test_two_failures_one_after_the_other(gpu_job: GpuJob, tmp_path: Path) -> None:
    """Down to one slot if there are two GPUs of three: communicators are made anew every time."""
    failures = [f"{SLOTS - 1}@2:kill@sync"] + ([f"{SLOTS - 2}@4:kill@vote"] if SLOTS > 2 else [])
    options = [part for failure in failures for part in ("--fail", failure)]
    outcome = gpu_job.run(SLOTS, tmp_path, "--replicas", "2", "--respawn", "0", *options)
    gpu_job.check(outcome)
    assert outcome.result is not None
    assert len(outcome.result["recovery_s"]) == len(failures)
