"""Everything that is wrong with a job is told at once, before anything starts."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nep.fault_tolerance.injection import Failure
from nep.moe.aux_losses import AuxLosses
from nep.parallel.optimizer import OptimizerConfig
from nep.planning.cluster import Cluster
from nep.planning.planner import plan_after_failure
from nep.planning.shapes import parameter_lines, preset
from nep.train.config import TrainConfig

SHAPE = preset("debug")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def problems(num_slots: int = 4, **changes: Any) -> str:
    with pytest.raises(ValueError) as caught:
        TrainConfig(**changes).check(SHAPE, num_slots)
    return str(caught.value)


def test_the_defaults_are_a_job(run_dir: Path) -> None:
    TrainConfig(run_dir=run_dir).check(SHAPE, 1)
    TrainConfig(run_dir=run_dir, replicas=4, failures=(Failure(slot=3, step=60),)).check(SHAPE, 4)
    assert not run_dir.exists(), "a check makes nothing"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "bucket_mib": ({"bucket_mib": float("nan")}, "bucket_mib (nan)"),
    "bucket_mib beyond reason": ({"bucket_mib": 1e303}, "bucket_mib (1e+303)"),
    "steps": ({"steps": 0}, "steps (0)"),
    "replicas": ({"replicas": -1}, "replicas (-1)"),
    "replicas beyond slots": ({"replicas": 5}, "replicas (5)"),
    "global_batch_size": ({"global_batch_size": 0}, "global_batch_size (0)"),
    "micro_batch_size": ({"micro_batch_size": 0}, "micro_batch_size (0)"),
    "seq_len": ({"seq_len": 0}, "seq_len (0)"),
    "seq_len beyond the model's": ({"seq_len": SHAPE.max_seq_len + 1}, f"seq_len ({SHAPE.max_seq_len + 1})"),
    "validation_sequences": ({"validation_sequences": -1}, "validation_sequences (-1)"),
    "timeout_base_s": ({"timeout_base_s": 0.0}, "timeout_base_s (0.0)"),
    "timeout_base_s not a number": ({"timeout_base_s": math.nan}, "timeout_base_s (nan)"),
    "timeout_base_s without end": ({"timeout_base_s": math.inf}, "timeout_base_s (inf)"),
    "aux_loss_coefficient": ({"aux_losses": AuxLosses(balance=-1.0)}, "aux_loss_coefficient (-1.0)"),
    "logits_z_loss_coefficient": ({"aux_losses": AuxLosses(logits_z=-2.0)}, "logits_z_loss_coefficient (-2.0)"),
    "counts of a slot": ({"aux_losses": AuxLosses(counts="slot")}, "aux_loss_counts ('slot')"),
    "counts of a step in rounds": (
        {"aux_losses": AuxLosses(balance=0.1, counts="step"), "global_batch_size": 17},
        "aux_loss_counts ('step')",
    ),
    "router_bias_rate": ({"router_bias_rate": -1.0}, "router_bias_rate (-1.0)"),
    "router_bias_rate without biases": ({"router_bias_rate": 0.5}, "router_bias_rate (0.5)"),
    "backend": ({"backend": "nccl"}, "'nccl'"),
    "optimizer's algorithm": ({"optimizer": OptimizerConfig(algorithm="adam")}, "algorithm ('adam')"),  # type: ignore[arg-type]
    "optimizer": ({"optimizer": OptimizerConfig(lr=-1.0)}, "lr (-1.0)"),
    "a failure of no slot": ({"failures": (Failure(slot=4, step=1),)}, "4@1:kill@forward"),
    "a failure in no step": ({"failures": (Failure(slot=0, step=61),)}, "0@61:kill@forward"),
    "a failure before the first step": ({"failures": (Failure(slot=0, step=0),)}, "0@0:kill@forward"),
}


@pytest.mark.parametrize("what", WRONG)
def test_each_problem_is_one_sentence_that_names_the_value(what: str, run_dir: Path) -> None:
    changes, named = WRONG[what]
    text = problems(run_dir=run_dir, **changes)
    assert text.startswith(named) or text.startswith(f"--fail {named}") or named in text[:20]
    assert text.count(named) == 1 and "\n" not in text


def test_all_problems_come_in_one_error(run_dir: Path, tmp_path: Path) -> None:
    text = problems(
        run_dir=run_dir,
        steps=0,
        micro_batch_size=0,
        backend="nccl",
        aux_losses=AuxLosses(balance=-0.5),
        optimizer=OptimizerConfig(lr=0.0, clip_norm=-1.0),
        json=tmp_path / "missing" / "train.json",
        failures=(Failure(slot=9, step=1), Failure(slot=0, step=7)),
    )
    expected = (
        "steps (0)", "micro_batch_size (0)", "'nccl'", "aux_loss_coefficient (-0.5)", "lr (0.0)",
        "clip_norm (-1.0)", "json (", "slot 9 does not exist", "step 7",
    )  # fmt: skip
    assert [named for named in expected if named not in text] == []


@pytest.mark.parametrize("option", ["json", "save_params", "loads_out"])
def test_files_must_have_a_folder(option: str, run_dir: Path, tmp_path: Path) -> None:
    assert f"{option} ({tmp_path / 'missing' / 'file'})" in problems(
        run_dir=run_dir, **{option: tmp_path / "missing" / "file"}
    )
    TrainConfig(run_dir=run_dir, **{option: tmp_path / "file"}).check(SHAPE, 1)
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("option", ["json", "save_params", "loads_out"])
def test_a_folder_is_no_file_to_write(option: str, run_dir: Path, tmp_path: Path) -> None:
    assert f"{option} ({tmp_path})" in problems(run_dir=run_dir, **{option: tmp_path})


@pytest.mark.parametrize("below", ["", "runs", "a/b/c"])
def test_a_run_folder_below_a_file_cannot_be_made(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert f"run_dir ({tmp_path / 'file' / below})" in problems(run_dir=tmp_path / "file" / below)


@pytest.fixture
def unwritable() -> Iterator[Path]:
    """A folder that this process cannot write to (root can, so it becomes somebody else)."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.parametrize("option", ["json", "save_params", "loads_out"])
def test_a_folder_that_cannot_be_written_to(option: str, unwritable: Path) -> None:
    text = problems(run_dir=Path(tempfile.gettempdir()) / "runs", **{option: unwritable / "file"})
    assert f"{option} ({unwritable / 'file'})" in text and "cannot be written" in text


def test_a_run_folder_that_cannot_be_made(unwritable: Path) -> None:
    assert f"run_dir ({unwritable / 'a' / 'b'})" in problems(run_dir=unwritable / "a" / "b")


def test_counts_of_a_step_make_it_one_round_whatever_is_lost(run_dir: Path) -> None:
    config = TrainConfig(run_dir=run_dir, aux_losses=AuxLosses(balance=0.1, counts="step"))
    config.check(SHAPE, 4)  # four lanes of four sequences, and as many per round
    lines, cluster = parameter_lines(SHAPE), Cluster.uniform(4, 4)
    plan = config.first_plan(cluster, lines)
    assert config.sequences_per_round(plan) == 4
    after = plan_after_failure(plan, cluster.fail([2]), lines)
    assert config.sequences_per_round(after) == max(lane.num_sequences for lane in after.lanes) > 4
    assert TrainConfig().sequences_per_round(after) == 4, "only if a loss needs it"


def test_biases_need_a_model_that_has_them(run_dir: Path) -> None:
    TrainConfig(run_dir=run_dir, router_bias_rate=1e-3).check(preset("debug-fine"), 4)


def test_dtypes_by_name() -> None:
    assert TrainConfig(dtype="bfloat16").torch_dtype is torch.bfloat16
    assert TrainConfig(dtype="float64").torch_dtype is torch.float64


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().steps = 3  # type: ignore[misc]


def test_spares_do_not_train() -> None:
    shape = preset("debug")
    TrainConfig(replicas=2, spares=1).check(shape, 3)
    with pytest.raises(ValueError, match=r"replicas \(3\) need at least as many slots, and there are 2"):
        TrainConfig(replicas=3, spares=1).check(shape, 3)
    with pytest.raises(ValueError, match=r"spares \(3\) must be at least 0 and leave one of 3 slots"):
        TrainConfig(spares=3).check(shape, 3)
    TrainConfig(spares=1, failures=(Failure(slot=2, step=3),)).check(shape, 3)
