"""Watts in a running job, with boards in a file: raised for a damaged replica, and put back whatever happens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nep.planning.cost.hardware import HardwareProfile
from nep.planning.shapes import preset
from nep.power.simulated_file import create_file
from nep.testing.jobs import LOSS_TOLERANCE, TENSOR_TOLERANCE, reference_job, run_job
from nep.testing.reference import ReferenceHyper
from tests.endtoend.conftest import LR, WARMUP, SmallJob
from tests.endtoend.watts_train import SEEN

WATTS_TRAIN = Path(__file__).with_name("watts_train.py")
STEPS, SLOTS, DEFAULT_W = 15, 4, 700


@contextmanager
def watched(path: Path) -> Iterator[list[tuple[float, ...]]]:
    """Limits of all boards in the file, every time that they change."""
    seen: list[tuple[float, ...]] = []
    over = threading.Event()

    def look() -> None:
        limits = limits_in(path)
        if not seen or seen[-1] != limits:
            seen.append(limits)
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(limits))
            unfinished.replace(path.with_suffix(SEEN))

    def watch() -> None:
        while not over.wait(0.01):
            look()

    look()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        look()


def limits_in(path: Path) -> tuple[float, ...]:
    return tuple(board.get("limit_w", DEFAULT_W) for board in json.loads(path.read_text())["boards"])


def test_watts_go_to_the_damaged_replica_and_back(small_job: SmallJob, tmp_path: Path) -> None:
    """Slot 3 dies, and slot 2 has the work of two. Then slot 2 is killed, so it cannot put its limit back."""
    profile, file = tmp_path / "profile.json", tmp_path / "boards.json"
    profile.write_text(HardwareProfile(name="free links", flops_per_s={8: 1e9}).to_json())
    create_file(file, [{}] * SLOTS)
    common = f"--dtype float64 --steps {STEPS} --seq-len 16 --global-batch-size 6 --micro-batch-size 2"
    common += f" --lr {LR} --warmup-steps {WARMUP}"
    options = [*common.split(), "--data", str(small_job.data), "--validation-sequences", "2"]
    losses, params = reference_job(
        preset("debug"), data=small_job.data, steps=STEPS, seq_len=16, global_batch_size=6, seed=0,
        hyper=ReferenceHyper(lr=LR, warmup_steps=WARMUP, steps=STEPS),
    )  # fmt: skip
    options += ["--fail", "3@3:kill", "--fail", "2@12:kill", "--hold", "11:2", "--replicas", "2", "--respawn", "0"]
    options += ["--compensate", "auto", "--planner-patience-s", "10", "--hardware", str(profile)]
    options += ["--power", "apply", "--power-source", f"simulated:{file}"]
    with watched(file) as seen:
        outcome = run_job(SLOTS, options, tmp_path / "job", launcher="fast", script=WATTS_TRAIN)
    assert outcome.returncode == 0 and outcome.result is not None and outcome.params is not None, outcome.output
    assert limits_in(file) == (DEFAULT_W,) * SLOTS, "as they were"
    for loss, expected in zip(outcome.result["loss"], losses, strict=True):
        assert abs(loss - expected) <= LOSS_TOLERANCE * abs(expected)
    for name, tensor in params.items():
        assert (outcome.params[name] - tensor).abs().max() <= TENSOR_TOLERANCE * tensor.abs().max(), name

    (change,) = outcome.result["compensations"]
    limits = {int(slot): limit for slot, limit in change["limits_w"].items()}
    assert (change["what"], limits.keys()) == ("power", {0, 1, 2}), outcome.output
    assert limits[0] == limits[1] == DEFAULT_W < limits[2], "the other replica is whole"
    assert change["before_w"] == dict.fromkeys(change["limits_w"], DEFAULT_W)
    assert change["speeds_ppm"]["2"] > 1_000_000 and change["predicted_gain"] > 0.02
    assert f"slot 2 {DEFAULT_W} -> {limits[2]} W" in outcome.output
    assert [now[2] for now in seen] == [DEFAULT_W, limits[2], DEFAULT_W], (seen, outcome.output)
    assert max(sum(now[:3]) for now in seen) <= SLOTS * DEFAULT_W - 150, "what the dead board may draw is left to it"
    assert "its power limits were put back" in outcome.output, "at once, by the process that is there for this"
