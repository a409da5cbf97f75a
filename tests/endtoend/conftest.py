"""A small training job in float64, its reference, and the comparison with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nep.planning.shapes import preset
from nep.testing.jobs import REPOSITORY, JobOutcome, differences, reference_job, run_job
from nep.testing.reference import ReferenceHyper
from nep.train.data import TextCorpus

STEPS, SEQ_LEN, BATCH, LR, WARMUP = 6, 16, 8, 3e-3, 2
TRAIN = REPOSITORY / "scripts" / "train.py"


@dataclass(frozen=True)
class SmallJob:
    """Runs the job and compares it with the reference.

    Attributes:
        data: generated text.
        losses, params: what the reference got.
    """

    data: Path
    losses: list[float]
    params: dict[str, torch.Tensor]

    def common(self) -> list[str]:
        """Options of every job. A slot that dies stays away, unless a test says otherwise, and copies are compared in
        every step: no failure may look like wrong bits."""
        options = f"--dtype float64 --steps {STEPS} --seq-len {SEQ_LEN} --global-batch-size {BATCH} --lr {LR}"
        options += f" --micro-batch-size 2 --warmup-steps {WARMUP} --validation-sequences 2 --data {self.data}"
        options += " --respawn 0 --state-check-every 1"
        return options.split()

    def run(
        self,
        num_slots: int,
        *arguments: str,
        folder: Path,
        launcher: str = "fast",
        check: bool = True,
        script: Path = TRAIN,
    ) -> JobOutcome:
        outcome = run_job(num_slots, [*self.common(), *arguments], folder, launcher=launcher, script=script)
        if check:
            assert outcome.returncode == 0, outcome.output
            assert not outcome.orphans, outcome.output
            self.check(outcome)
        return outcome

    def check(self, outcome: JobOutcome) -> None:
        """Every loss, every parameter, every sample."""
        assert not (wrong := differences(outcome, self.losses, self.params)), f"{wrong}: {outcome.output}"
        result = outcome.result
        assert result is not None
        assert bool(result["corruptions"]) == any(":flip@" in one["failure"] for one in result["failures"])


@pytest.fixture(scope="session")
def small_job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
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
    return SmallJob(data=data, losses=losses, params=params)
