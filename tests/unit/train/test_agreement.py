"""What a slot that joins is compared with, and what is told to whom it does not concern."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nep.planning.shapes import preset
from nep.train.agreement import agreed_settings, recorded_command
from nep.train.config import TrainConfig

SHAPE = preset("debug")
DATA: Any = SimpleNamespace(digest="abc")
CONFIG = TrainConfig()


@pytest.mark.parametrize("words", [["--on-alert", "https://hooks/T0KEN"], ["--on_alert=https://hooks/T0KEN"]])
def test_secrets_are_not_recorded(words: list[str]) -> None:
    script, *rest = recorded_command("train.py", ["--seed", "1", *words, "--tp", "2"])
    assert Path(script).is_absolute() and rest == ["--seed", "1", "--tp", "2"]
    settings = agreed_settings(dataclasses.replace(CONFIG, on_alert="https://hooks/T0KEN"), SHAPE, DATA)
    assert "T0KEN" not in str(settings)


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"seed": 1}, {"seed"}),
        ({"steps": 3, "tp": 2}, {"steps", "tp"}),
        ({"checkpoint_dir": Path("saved")}, {"checkpoint_dir"}),
        ({"run_dir": Path("elsewhere"), "json": Path("x"), "save_params": Path("y")}, set()),
    ],
)
def test_what_decides_a_step_must_be_the_same(change: dict[str, Any], differs: set[str]) -> None:
    mine, theirs = (agreed_settings(one, SHAPE, DATA) for one in (CONFIG, dataclasses.replace(CONFIG, **change)))
    assert {name for name in mine if mine[name] != theirs[name]} == differs


def test_a_folder_may_be_mounted_elsewhere() -> None:
    here, there = (dataclasses.replace(CONFIG, checkpoint_dir=Path(name)) for name in ("a", "b"))
    assert agreed_settings(here, SHAPE, DATA) == agreed_settings(there, SHAPE, DATA)
    assert agreed_settings(here, SHAPE, SimpleNamespace(digest="abd"))["data_digest"] == "abd"  # type: ignore[arg-type]
