"""The comparison of a job with the reference finds each thing that can be wrong, alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nep.testing.jobs import JobOutcome, differences

LOSSES = [2.0, 1.5]
PARAMS = {"a": torch.tensor([4.0, 1.0], dtype=torch.float64)}


def an_outcome(**changes: Any) -> JobOutcome:
    result = {"lost_steps": 0, "lost_samples": 0, "repeated_samples": 0, "loss": list(LOSSES), "failures": []}
    params = {name: tensor.clone() for name, tensor in PARAMS.items()}
    return JobOutcome(returncode=0, result={**result, **changes}, params=params, output="", seconds=0.0)


def test_what_is_equal_up_to_rounding_is_no_difference() -> None:
    near = an_outcome(loss=[2.0 * (1 + 1e-13), 1.5])
    assert near.params is not None
    near.params["a"][1] += 3e-11  # of the maximum, 4, less than 1e-11
    assert differences(near, LOSSES, PARAMS) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lost_steps": 1}, "1 lost_steps"),
        ({"lost_samples": 2}, "2 lost_samples"),
        ({"repeated_samples": 3}, "3 repeated_samples"),
        ({"loss": [2.0]}, "1 losses of 2 steps"),
        ({"loss": [2.0, 1.5 * (1 + 1e-11)]}, "step 2: loss"),
        ({"loss": [float("nan"), 1.5]}, "step 1: loss nan"),
        ({"failures": [{"failure": "0@1:kill@vote", "fired": False}]}, "0@1:kill@vote has not fired"),
    ],
)
def test_each_difference_of_the_result_is_named(changes: dict[str, Any], said: str) -> None:
    (found,) = differences(an_outcome(**changes), LOSSES, PARAMS)
    assert found.startswith(said)


def test_each_difference_of_the_weights_is_named() -> None:
    far = {"a": PARAMS["a"] + torch.tensor([0.0, 1e-9])}
    assert differences(replace(an_outcome(), params=far), LOSSES, PARAMS) == ["a differs"]
    assert differences(replace(an_outcome(), params={"a": PARAMS["a"] * float("nan")}), LOSSES, PARAMS) == ["a differs"]
    assert differences(replace(an_outcome(), params={}), LOSSES, PARAMS) == ["other parameters: ['a']"]
    assert "did not write" in differences(replace(an_outcome(), params=None), LOSSES, PARAMS)[0]
