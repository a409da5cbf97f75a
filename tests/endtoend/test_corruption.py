"""A bit flips in a slot's memory while a job runs: the slot is named and leaves, and the numbers stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.endtoend.conftest import SmallJob
from tests.endtoend.test_return import reasons

OTHER_DATA = Path(__file__).with_name("other_data_train.py")


@pytest.mark.parametrize(
    ("part", "launcher"),
    [
        ("owned", "torchrun"),
        pytest.param("mirrored", "fast", marks=pytest.mark.soak),
        pytest.param("held", "fast", marks=pytest.mark.soak),
    ],
)
def test_the_slot_is_named_and_drained(small_job: SmallJob, tmp_path: Path, part: str, launcher: str) -> None:
    options = f"--replicas 2 --fail 2@3:flip@{part}".split()
    outcome = small_job.run(4, *options, folder=tmp_path, launcher=launcher)
    assert outcome.result is not None
    (one,) = outcome.result["corruptions"]
    assert (one["step"], one["slot"], one["part"], one["action"]) == (3, 2, part, "drain")
    assert one["units"][0] < one["units"][1] and "step 3: slot 2 had wrong bits" in outcome.output
    assert reasons(outcome) == ["start", "slots [2] are drained"]
    assert outcome.result["live_slots"] == [0, 1, 3] and outcome.result["recovery_s"] == []


@pytest.mark.parametrize("part", ["held", pytest.param("owned", marks=pytest.mark.soak)])
def test_a_slot_dies_while_wrong_bits_are_looked_for(small_job: SmallJob, tmp_path: Path, part: str) -> None:
    """Slot 1 dies, and the survivors go on from the step before."""
    options = f"--replicas 2 --corruption-action resync --fail 2@3:flip@{part} --fail 1@3:kill@recover".split()
    outcome = small_job.run(4, *options, folder=tmp_path)
    assert outcome.result is not None
    assert {(one["step"], one["slot"], one["action"]) for one in outcome.result["corruptions"]} == {(3, 2, "resync")}
    assert reasons(outcome) == ["start", "slots [1] are dead"]
    assert outcome.result["generations"][1]["step"] == 2, "a refused vote commits nothing"


def test_slots_with_different_data_refuse(small_job: SmallJob, tmp_path: Path) -> None:
    outcome = small_job.run(3, folder=tmp_path, check=False, script=OTHER_DATA)
    assert outcome.returncode == 2 and outcome.result is None
    (line,) = [line for line in outcome.output.splitlines() if line.startswith("train: ")]
    assert "different data" in line and ("slots 0 and 1" in line or "slots 2 and 1" in line or "slots 1 and" in line)
    assert "give the same --data" in line
