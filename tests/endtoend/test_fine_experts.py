"""Small and shared experts, biases and counts of earlier steps, with slots that are really killed.

Every loss, parameter and bias equals the single-process reference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nep.planning.shapes import preset
from nep.testing.jobs import reference_job
from nep.testing.reference import ReferenceAux, ReferenceHyper
from tests.endtoend.conftest import BATCH, LR, SEQ_LEN, STEPS, WARMUP, SmallJob

OPTIONS = "--model debug-fine --router-bias-rate 0.01 --z-loss-coefficient 0.01 --logits-z-loss-coefficient 0.02"
OPTIONS += " --aux-loss-coefficient 0.1 --aux-loss-counts"


def job_with(small_job: SmallJob, counts: str) -> SmallJob:
    losses, params = reference_job(
        preset("debug-fine"),
        data=small_job.data,
        steps=STEPS,
        seq_len=SEQ_LEN,
        global_batch_size=BATCH,
        seed=0,
        hyper=ReferenceHyper(
            lr=LR,
            warmup_steps=WARMUP,
            steps=STEPS,
            aux=ReferenceAux(z_loss=0.01, logits_z_loss=0.02, balance_loss=0.1, balance_counts=counts, bias_rate=0.01),
        ),
    )
    assert params["layers.1.moe.router.bias"].abs().max() > 0.02, "nothing was balanced"
    return SmallJob(data=small_job.data, losses=losses, params=params)


@pytest.fixture(scope="module")
def previous(small_job: SmallJob) -> SmallJob:
    return job_with(small_job, "previous")


@pytest.mark.parametrize(
    ("num_slots", "options", "failures"),
    [
        (1, "", []),
        (4, "--replicas 2", ["2@3:kill@vote"]),
        (4, "--replicas 2 --recompute", ["0@4:kill@apply"]),
        (5, "--tp 3 --recompute", ["1@2:kill@sync", "4@5:kill@backward"]),
    ],
)
def test_biases_and_counts_survive(
    previous: SmallJob, tmp_path: Path, num_slots: int, options: str, failures: list[str]
) -> None:
    fail = [argument for failure in failures for argument in ("--fail", failure)]
    launcher = "fast" if num_slots > 1 else "alone"
    arguments = [*OPTIONS.split(), "previous", *options.split(), *fail]
    outcome = previous.run(num_slots, *arguments, folder=tmp_path, launcher=launcher)
    assert outcome.result is not None and len(outcome.result["recovery_s"]) == len(failures)


def test_the_step_stays_one_round_after_a_loss(small_job: SmallJob, tmp_path: Path) -> None:
    arguments = [*OPTIONS.split(), "step", "--replicas", "2", "--fail", "3@3:kill@mirror"]
    job_with(small_job, "step").run(4, *arguments, folder=tmp_path)


def test_half_precision_trains_alike(small_job: SmallJob, tmp_path: Path) -> None:
    """Through a kill, to the end, and near the float64 reference."""
    arguments = ["--replicas", "2", "--dtype", "bfloat16", "--fail", "1@3:kill@sync"]
    outcome = small_job.run(4, *arguments, folder=tmp_path, check=False)
    assert outcome.returncode == 0 and outcome.result is not None, outcome.output
    assert len(outcome.result["loss"]) == STEPS and outcome.result["lost_samples"] == 0
    for loss, expected in zip(outcome.result["loss"], small_job.losses, strict=True):
        assert abs(loss - expected) <= 1e-3 * expected
