"""A bit flips in a slot's memory while a job runs: the slot is named and leaves, and the numbers stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.endtoend.conftest import SmallJob
from tests.endtoend.test_return import reasons


@pytest.mark.parametrize("part", ["owned", "mirrored", "held"])
def test_the_slot_is_named_and_drained(small_job: SmallJob, tmp_path: Path, part: str) -> None:
    launcher = "torchrun" if part == "owned" else "fast"
    options = f"--replicas 2 --state-check-every 1 --fail 2@3:flip@{part}".split()
    outcome = small_job.run(4, *options, folder=tmp_path, launcher=launcher)
    assert outcome.result is not None
    (one,) = outcome.result["corruptions"]
    assert (one["step"], one["slot"], one["part"], one["action"]) == (3, 2, part, "drain")
    assert one["units"][0] < one["units"][1] and "step 3: slot 2 had wrong bits" in outcome.output
    assert reasons(outcome) == ["start", "slots [2] are drained"]
    assert outcome.result["live_slots"] == [0, 1, 3] and outcome.result["recovery_s"] == []


def test_a_slot_dies_while_wrong_bits_are_looked_for(small_job: SmallJob, tmp_path: Path) -> None:
    """The check is repeated by the survivors."""
    options = ["--replicas", "2", "--state-check-every", "1", "--fail", "2@3:flip@held", "--fail", "1@3:kill@recover"]
    outcome = small_job.run(4, *options, folder=tmp_path)
    assert outcome.result is not None
    print(outcome.result["corruptions"], reasons(outcome))
    assert 1 not in outcome.result["live_slots"]
