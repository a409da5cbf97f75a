"""Jobs that change their plan by themselves: the same numbers as ever, and faster where a slot is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from nep.planning.cost.hardware import HardwareProfile
from nep.testing.jobs import LOSS_TOLERANCE, run_job
from tests.endtoend.conftest import SmallJob

SLOW_TRAIN = Path(__file__).with_name("slow_train.py")
STEPS = 24


@pytest.mark.parametrize("failure", [(), ("--fail", "2@6:kill@recover")], ids=["calm", "killed while experts move"])
def test_experts_move_to_where_there_is_time(small_job: SmallJob, tmp_path: Path, failure: tuple[str, ...]) -> None:
    """A layer at a time: proposed after step 4, in effect with step 5, the second layer one step later."""
    profile = tmp_path / "profile.json"
    profile.write_text(HardwareProfile(name="free links", flops_per_s={8: 1e9}).to_json())
    outcome = small_job.run(
        4, "--rebalance-every", "4", "--rebalance-mib", "1", "--hardware", str(profile), *failure,
        "--planner-patience-s", "10", folder=tmp_path,
    )  # fmt: skip
    assert outcome.result is not None
    assert "rebalance after step" in outcome.output
    (change,) = outcome.result["rebalances"]
    assert change["predicted_gain"] >= 0.02 and change["moved_bytes"] > 2**20
    assert (change["boundaries"], change["done_step"]) == ((0, None) if failure else (2, 6)), outcome.output
    assert len(outcome.result["recovery_s"]) == len(failure) // 2


def test_a_slow_slot_gets_less_to_do(small_job: SmallJob, tmp_path: Path) -> None:
    common = f"--dtype float64 --steps {STEPS} --seq-len 16 --global-batch-size 12 --micro-batch-size 6"
    options = [*common.split(), "--data", str(small_job.data), "--validation-sequences", "2"]
    alone = run_job(1, options, tmp_path / "alone", launcher="alone")
    slow = run_job(
        4, [*options, "--replicas", "4", "--compensate", "auto"], tmp_path / "slow", launcher="fast", script=SLOW_TRAIN
    )
    assert alone.result is not None and slow.result is not None, slow.output
    for loss, expected in zip(slow.result["loss"], alone.result["loss"], strict=True):
        assert abs(loss - expected) <= LOSS_TOLERANCE * abs(expected)
    assert "pace after step" in slow.output and "slot 1 takes" in slow.output
    (change, *_) = slow.result["compensations"]
    assert change["speeds_ppm"]["1"] < 800_000 and change["predicted_gain"] > 0.1
    assert change["done_step"] is not None, slow.output
