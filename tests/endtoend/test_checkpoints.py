"""Real jobs that end and go on: after a signal, after too many losses, and when a slot dies while it saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from nep.checkpoint.folders import found_in, whole_in
from nep.checkpoint.manifest import Manifest
from tests.endtoend.conftest import SmallJob

STOPPED_JOB = Path(__file__).with_name("stopped_job.py")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param("SIGTERM@launcher", 1, marks=pytest.mark.soak),
        ("SIGKILL@launcher", -9),
        ("SIGKILL@supervisor", 1),  # torchrun sends the others SIGTERM
    ],
)
def test_what_ends_a_job_under_torchrun_costs_no_step(
    small_job: SmallJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """From four slots to one. With the agent dies the control store, and with a supervisor its trainer; in both cases
    the others write the last checkpoint without."""
    monkeypatch.setenv("NEP_TEST_SIGNAL", name)
    options = ["--checkpoint-dir", str(tmp_path / "saved")]
    stopped = small_job.run(
        4, "--replicas", "2", *options, folder=tmp_path / "1", launcher="torchrun", check=False, script=STOPPED_JOB
    )
    assert stopped.returncode == code and stopped.result is None, stopped.output
    (checkpoint,) = whole_in(tmp_path / "saved")
    assert 3 <= checkpoint.step < 6 and f"checkpoint of step {checkpoint.step}:" in stopped.output
    assert f"stopped after step {checkpoint.step}" in stopped.output
    again = small_job.run(1, *options, folder=tmp_path / "2", launcher="alone")
    assert again.result is not None and again.result["resumed_step"] == checkpoint.step
    assert f"going on from step {checkpoint.step}: {checkpoint.path}" in again.output


def test_owner_and_mirror_lost_together_go_on_from_the_checkpoint(small_job: SmallJob, tmp_path: Path) -> None:
    # Step 5 is to be saved, too, so it does not begin before the save of step 4 is done.
    options = ["--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "1"]
    failures = ["--fail", "0@5:kill@sync", "--fail", "1@5:kill@sync"]
    lost = small_job.run(3, *options, *failures, folder=tmp_path / "1", check=False)
    assert lost.returncode == 4, lost.output
    assert f"the same command goes on from step 4, in {tmp_path / 'saved'}" in lost.output
    again = small_job.run(5, "--replicas", "2", "--tp", "2", *options, folder=tmp_path / "2")
    assert again.result is not None and again.result["resumed_step"] == 4
    assert [one.step for one in whole_in(tmp_path / "saved")] == [6, 5]


@pytest.mark.parametrize("step", [2, pytest.param(6, marks=pytest.mark.soak)])
def test_a_slot_that_dies_while_it_saves_costs_neither_a_step_nor_the_checkpoint(
    small_job: SmallJob, tmp_path: Path, step: int
) -> None:
    """While training goes on, and at the end, when the members may have changed before the mirrors have written."""
    saved = tmp_path / "saved"
    options = ["--checkpoint-dir", str(saved), "--checkpoint-every", "2", "--checkpoint-keep", "9"]
    failure = f"1@{step}:kill@checkpoint"
    outcome = small_job.run(4, "--replicas", "2", *options, "--fail", failure, folder=tmp_path)
    assert outcome.result is not None and outcome.result["live_slots"] == [0, 2, 3]
    assert [(one.step, one.is_whole) for one in found_in(saved)] == [(6, True), (4, True), (2, True)]
    manifest = Manifest.read(next(one.path for one in whole_in(saved) if one.step == step))
    stood_in = any("-from-" in chunk.file for chunk in manifest.chunks)
    assert stood_in == (1 in manifest.contents.slots)
    assert stood_in or step == 6


def test_a_job_that_is_killed_while_it_saves_goes_on_from_the_checkpoint_before(
    small_job: SmallJob, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    options = ["--checkpoint-dir", str(saved), "--checkpoint-every", "2"]
    failures = ["--fail", "0@4:kill@checkpoint", "--fail", "1@4:kill@checkpoint"]
    killed = small_job.run(2, *options, *failures, folder=tmp_path / "1", check=False)
    assert killed.returncode == 1, killed.output
    assert [(one.step, one.is_whole) for one in found_in(saved)] == [(4, False), (2, True)]
    again = small_job.run(1, *options, folder=tmp_path / "2", launcher="alone")
    assert again.result is not None and again.result["resumed_step"] == 2
    assert [(one.step, one.is_whole) for one in found_in(saved)] == [(6, True), (4, True)]

    done = small_job.run(1, *options, folder=tmp_path / "3", launcher="alone")
    assert done.result is not None and done.result["resumed_step"] == 6, "nothing is left to train"
    refused = small_job.run(1, *options, "--seed", "5", folder=tmp_path / "4", launcher="alone", check=False)
    assert refused.returncode == 2
    assert "seed (5) is not the checkpoint's (0); give the same --seed" in refused.output
