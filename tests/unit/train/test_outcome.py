"""What a job leaves: train.json and the expert loads."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nep.fault_tolerance.control_store import injected_key
from nep.fault_tolerance.corruption import Corruption
from nep.fault_tolerance.history import Committed, History
from nep.fault_tolerance.injection import Failure
from nep.fault_tolerance.integrity import Integrity
from nep.fault_tolerance.timeline import PHASES, Recovery
from nep.planning.cluster import Cluster
from nep.planning.planner import plan_after_failure, plan_from_scratch
from nep.planning.router_statistics import RouterStatistics
from nep.planning.shapes import parameter_lines, preset
from nep.report.readers.loads_file import read_loads
from nep.train.adjustments import Adjustment
from nep.train.config import TrainConfig
from nep.train.data import expected_hash
from nep.train.outcome import SCHEMA, outcome, write_json, write_loads, write_router_stats
from nep.train.protection import Protection
from nep.train.trainer import Trainer

STEPS, BATCH = 3, 4
LINES = parameter_lines(preset("debug"))
COUNTS = [torch.arange(16).reshape(2, 8) + 100 * step for step in range(STEPS)]

CORRUPTION = Corruption(
    step=2, slot=1, part="owned", tensor="a.b", axis="a", lo=3, hi=5, kind="exp_avg", action="drain", why="so"
)


def committed(step: int) -> Committed:
    return Committed(
        step=step,
        loss=3.0 / step,
        tokens=64,
        samples=BATCH,
        sample_hash=expected_hash((step - 1) * BATCH, BATCH),
        grad_norm=0.1 * step,
        skipped=False,
    )


ADJUSTMENT = Adjustment(
    kind="rebalance",
    step=1,
    what="moves that pay",
    why="busy experts",
    predicted_gain=0.25,
    predicted_move_s=0.5,
    moved_bytes=1024,
    speeds_ppm={0: 1_000_000, 2: 500_000},
    limits_w={0: 700, 2: 800},
    before_w={0: 700, 2: 700},
    boundaries=2,
    move_s=0.75,
    done_step=2,
    before_s=3.0,
    after_s=2.0,
)


def statistics() -> RouterStatistics:
    found = RouterStatistics()
    for counts in COUNTS:
        found.update(counts.numpy())
    return found


def make_trainer(**changes: Any) -> Trainer:
    """What `outcome` reads of a trainer whose slot 1 has died and whose second failure never came."""
    cluster = Cluster.uniform(3, 3)
    plan = plan_from_scratch(cluster, LINES, num_replicas=1, global_batch_size=BATCH)
    plan = plan_after_failure(plan, cluster.fail([1]), LINES)
    keys = {injected_key(0): "1796054400.5"}
    fields: dict[str, Any] = {
        "config": TrainConfig(
            steps=STEPS, global_batch_size=BATCH, failures=(Failure(slot=1, step=2), Failure(slot=0, step=3))
        ),
        "plan": plan,
        "members": (0, 2),
        "resumed_step": 0,
        "validation_losses": [5.5, 0.75],
        "generations": [(1, 0, (0, 1, 2), "start"), (2, 1, (0, 2), "slots [1] are dead")],
        "full_size_s": [2.5],
        "protection": Protection(windows_s=[0.5]),
        "recoveries": [
            Recovery(failed_at=10.0, entered_at=10.1, agreed_at=10.2, rebuilt_at=10.4, moved_at=10.5, resumed_at=11.0)
        ],
        "data": SimpleNamespace(digest="abc"),
        "balance": SimpleNamespace(adjustments=[ADJUSTMENT], statistics=statistics(), imbalance={1: 1.5, 3: 1.25}),
        "run_state": SimpleNamespace(
            history=History(
                steps=[committed(step) for step in range(1, STEPS + 1)], counts_le=COUNTS, corruptions=[CORRUPTION]
            ),
            store=SimpleNamespace(get=keys.get),
            recipe=SimpleNamespace(lines=LINES),
            integrity=Integrity(every=2),
        ),
    }
    return SimpleNamespace(**(fields | changes))  # type: ignore[return-value]


def test_the_object_has_these_entries() -> None:
    """Readers of train.json rely on the names; a change of meaning is a new schema."""
    result = outcome(make_trainer(), "debug")
    unprotected = result.pop("unprotected_intervals")
    assert unprotected > 0, "the mirrors have not been completed"
    (phases,) = result.pop("recovery_phases_s")
    assert tuple(phases) == PHASES
    assert sum(phases.values()) == pytest.approx(1.0)
    assert result.pop("recovery_s") == [pytest.approx(1.0)]
    assert result == {
        "schema": SCHEMA,
        "model": "debug",
        "steps": 3,
        "loss": [3.0, 1.5, 1.0],
        "grad_norm": [pytest.approx(0.1 * step) for step in (1, 2, 3)],
        "validation_loss": [5.5, 0.75],
        "generations": [
            {"gen": 1, "step": 0, "slots": [0, 1, 2], "reason": "start"},
            {"gen": 2, "step": 1, "slots": [0, 2], "reason": "slots [1] are dead"},
        ],
        "lost_steps": 0,
        "lost_samples": 0,
        "repeated_samples": 0,
        "full_size_s": [2.5],
        "unprotected_s": [0.5],
        "corruptions": [
            {
                "step": 2,
                "slot": 1,
                "part": "owned",
                "tensor": "a.b",
                "axis": "a",
                "units": [3, 5],
                "kind": "exp_avg",
                "action": "drain",
                "why": "so",
            }
        ],
        "state_checks": {"every": 2, "checks": 0, "seconds": 0.0},
        "live_slots": [0, 2],
        "resumed_step": 0,
        "data_digest": "abc",
        "layout": 2,
        "compensations": [],
        "rebalances": [
            {
                "kind": "rebalance",
                "step": 1,
                "what": "moves that pay",
                "why": "busy experts",
                "predicted_gain": 0.25,
                "predicted_move_s": 0.5,
                "moved_bytes": 1024,
                "speeds_ppm": {"0": 1_000_000, "2": 500_000},
                "limits_w": {"0": 700, "2": 800},
                "before_w": {"0": 700, "2": 700},
                "boundaries": 2,
                "move_s": 0.75,
                "done_step": 2,
                "before_s": 3.0,
                "after_s": 2.0,
                "measured_gain": 0.5,
            }
        ],
        "failures": [
            {"failure": "1@2:kill@forward", "fired": True},
            {"failure": "0@3:kill@forward", "fired": False},
        ],
    }


def test_an_adjustment_is_read_back_and_says_what_came_of_it() -> None:
    assert Adjustment.from_json(json.loads(ADJUSTMENT.why_json())) == ADJUSTMENT
    assert "predicted +25.0%, measured +50.0% (3 -> 2 s a step)" in ADJUSTMENT.result
    assert "not measured" in dataclasses.replace(ADJUSTMENT, after_s=None).result


def test_router_statistics_are_what_the_planner_reads(tmp_path: Path) -> None:
    path, trainer = tmp_path / "router.npz", make_trainer()
    write_router_stats(path, trainer, "debug")
    read = read_loads(path, preset("debug"))
    assert read.num_steps == STEPS and np.array_equal(read.mean, statistics().ema)
    assert read.variance is not None and np.array_equal(read.variance, statistics().ema_variance)
    assert np.array_equal(np.load(path)["mean"], torch.stack(COUNTS).double().mean(0))
    with pytest.raises(ValueError, match="cannot be told apart"):
        read_loads(path, preset("debug"), last_steps=2)


def test_without_a_step_the_job_ends_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job that goes on from its last step, or a slot that comes after it and speaks for the job."""
    trainer = make_trainer(balance=SimpleNamespace(statistics=RouterStatistics(), imbalance={}))
    trainer.run_state.history.counts_le = []
    write_router_stats(tmp_path / "router.npz", trainer, "debug")
    write_loads(tmp_path / "loads.npz", trainer, "debug")
    assert not list(tmp_path.iterdir()) and caplog.text.count("is not written") == 2


def test_a_hole_in_the_ledger_shows() -> None:
    trainer = make_trainer()
    del trainer.run_state.history.steps[1]
    result = outcome(trainer, "debug")
    assert (result["steps"], result["lost_steps"], result["lost_samples"]) == (2, 1, BATCH)
    trainer.run_state.history.steps += [committed(2), committed(2)]
    result = outcome(trainer, "debug")
    assert (result["lost_steps"], result["lost_samples"], result["repeated_samples"]) == (0, 0, BATCH)


def test_the_file_holds_the_object_in_full_precision(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.run_state.history.steps[0] = dataclasses.replace(committed(1), loss=math.pi)
    result = outcome(trainer, "debug")
    (tmp_path / "train.json").write_text("the run before")
    write_json(tmp_path / "train.json", result)
    assert json.loads((tmp_path / "train.json").read_text()) == result
    assert [path.name for path in tmp_path.iterdir()] == ["train.json"], "nothing unfinished is left"


def test_the_file_is_json_whatever_the_losses(tmp_path: Path) -> None:
    """Not every reader takes NaN."""
    result = {"loss": [1.0, math.nan, math.inf], "nested": {"a": [-math.inf]}, "steps": 3, "name": "nan"}
    write_json(tmp_path / "train.json", result)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads((tmp_path / "train.json").read_text(), parse_constant=refuse)
    assert found == {"loss": [1.0, None, None], "nested": {"a": [None]}, "steps": 3, "name": "nan"}


def test_until_a_file_is_complete_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer may be killed while it writes."""

    def killed(source: object, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    for name, write in (
        ("train.json", lambda path: write_json(path, {"steps": 3})),
        ("loads.npz", lambda path: write_loads(path, make_trainer(), "debug")),
    ):
        path = tmp_path / name
        path.write_text("the run before")
        with pytest.raises(KeyboardInterrupt):
            write(path)
        assert path.read_text() == "the run before"


def test_loads_are_plain_numpy(tmp_path: Path) -> None:
    write_loads(tmp_path / "loads.npz", make_trainer(), "debug")
    with np.load(tmp_path / "loads.npz", allow_pickle=False) as loads:
        assert set(loads) == {"counts", "slot_imbalance", "model", "format_version"}
        assert np.array_equal(loads["slot_imbalance"], [1.5, np.nan, 1.25], equal_nan=True)
        assert loads["counts"].dtype == np.int64
        assert np.array_equal(loads["counts"], np.stack([count.numpy() for count in COUNTS]))
        assert loads["counts"].shape == (STEPS, 2, 8), "[step, layer, expert]"
        assert str(loads["model"]) == "debug"
        assert int(loads["format_version"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["loads.npz"]
