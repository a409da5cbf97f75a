"""Failures in places where little is left to do, or where another change is under way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nep.testing.jobs import LOSS_TOLERANCE, REPOSITORY, TENSOR_TOLERANCE
from tests.endtoend.conftest import TRAIN, SmallJob
from tests.endtoend.test_random_kills import pairs_to_spare


def test_mirrors_are_completed_when_a_kill_has_interrupted_that(small_job: SmallJob, tmp_path: Path) -> None:
    """The layout that was not committed and the one that recovery makes have the same number."""
    first, second = pairs_to_spare(5, 2)[0]
    # Phase `recover` of step 4 is the move that completes the mirrors, after step 3 and before step 4.
    failures = ["--fail", f"{second}@3:kill@backward", "--fail", f"{first}@4:kill@recover"]
    outcome = small_job.run(5, "--replicas", "2", *failures, folder=tmp_path)
    assert outcome.result is not None
    assert len(outcome.result["live_slots"]) == 3
    assert outcome.result["unprotected_intervals"] == 0


def test_the_only_step_is_interrupted_after_its_vote(small_job: SmallJob, tmp_path: Path) -> None:
    """Nothing is left to be replayed: recovery leads straight to the end."""
    arguments = ["--steps", "1", "--fail", "1@1:kill@return"]
    outcome = small_job.run(3, *arguments, folder=tmp_path, check=False)
    result = outcome.result
    assert outcome.returncode == 0 and result is not None, outcome.output
    assert (result["lost_steps"], result["lost_samples"], result["repeated_samples"]) == (0, 0, 0)
    assert result["live_slots"] == [0, 2] and len(result["recovery_s"]) == 1
    (loss,) = result["loss"]
    assert abs(loss - small_job.losses[0]) <= LOSS_TOLERANCE * small_job.losses[0]
    assert [entry["step"] for entry in result["generations"]] == [0, 1]


def test_mirrors_in_host_memory_save_a_job_too(small_job: SmallJob, tmp_path: Path) -> None:
    """On a CPU they are where they always are."""
    arguments = ["--redundancy", "host", "--replicas", "2", "--fail", "2@3:kill@apply"]
    outcome = small_job.run(4, *arguments, folder=tmp_path)
    assert outcome.result is not None and outcome.result["unprotected_intervals"] == 0


def test_sgd_goes_on_after_a_kill(small_job: SmallJob, tmp_path: Path) -> None:
    """Its one moment is moved as AdamW's two are: the job with a kill is the job without."""
    arguments = ["--optimizer", "sgd", "--lr", "0.1", "--replicas", "2"]
    alone = small_job.run(2, *arguments, folder=tmp_path / "alone", check=False)
    killed = small_job.run(4, *arguments, "--fail", "1@3:kill@return", folder=tmp_path / "killed", check=False)
    assert alone.result is not None and killed.result is not None, alone.output + killed.output
    assert killed.result["lost_steps"] == 0 and len(killed.result["recovery_s"]) == 1
    for loss, expected in zip(killed.result["loss"], alone.result["loss"], strict=True):
        assert abs(loss - expected) <= LOSS_TOLERANCE * expected
    assert alone.params is not None and killed.params is not None
    for name, expected in alone.params.items():
        assert (killed.params[name] - expected).abs().max() <= TENSOR_TOLERANCE * expected.abs().max(), name


def test_a_slot_that_comes_up_late_is_waited_for(small_job: SmallJob, tmp_path: Path) -> None:
    """Later than building groups and their first use may take together (4.5 s), and sooner than a start may (10 s)."""
    script = tmp_path / "late.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, runpy, time
            time.sleep(5.0 if os.environ["RANK"] == "1" else 0.0)
            runpy.run_path({str(TRAIN)!r}, run_name="__main__")
            """
        )
    )
    outcome = small_job.run(3, "--timeout-base-s", "1", folder=tmp_path / "job", script=script)
    assert outcome.result is not None
    assert outcome.result["live_slots"] == [0, 1, 2] and not outcome.result["recovery_s"]


LAUNCH_TWO = ["-m", "nep.testing.launch", "--nproc-per-node", "2", "--timeout", "60", "--"]


@pytest.mark.parametrize(
    "launcher", [pytest.param([], id="alone"), pytest.param(LAUNCH_TWO, id="two", marks=pytest.mark.soak)]
)
def test_a_job_outlives_the_reader_of_its_output(launcher: list[str], small_job: SmallJob, tmp_path: Path) -> None:
    result = tmp_path / "train.json"
    command = [sys.executable, *launcher, str(TRAIN)]
    command += [*small_job.common(), "--json", str(result), "--run-dir", str(tmp_path / "runs")]
    job = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert job.stdout is not None
    job.stdout.close()
    assert job.wait(timeout=80) == 0
    assert json.loads(result.read_text())["lost_steps"] == 0
