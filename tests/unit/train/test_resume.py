"""Which checkpoint the slots of a job go on from: the newest whose every byte is right, and the same on all."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from nep.checkpoint.folders import whole_in
from nep.checkpoint.manifest import Manifest
from nep.fault_tolerance.control_store import exit_key
from nep.fault_tolerance.history import Committed, History
from nep.testing.memory_board import MemoryBoard
from nep.testing.parity import Training
from nep.train.resume import (
    Disagreement,
    Resumption,
    agree_on_checkpoint,
    check_resume,
    require_same_settings,
    small_tensors,
    subject_of,
)
from tests.multirank.plans import lane_plan
from tests.multirank.saved import go_on, savers, snapshot_of
from tests.multirank.steps import SHAPE
from tests.multirank.training import make_training

PLAN = lane_plan([[[0], [1]]], SHAPE, [4, 2])


@cache
def training() -> Training:
    return make_training(SHAPE)


@pytest.fixture
def saved(pristine: Path, tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2, to be damaged."""
    return shutil.copytree(pristine, tmp_path / "saved")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    runs = {slot: training().start(PLAN, slot) for slot in PLAN.slots}
    writers = savers(folder, PLAN.slots, part_bytes=1000)
    for step in (1, 2):
        runs = go_on(training(), runs, step)
        for slot, run in runs.items():
            writers[slot].save(snapshot_of(training(), run))
        assert all(saver.wait(20) for saver in writers.values())
    return folder


def resume(
    root: Path, slots: int = 3, board: MemoryBoard | None = None, absent: tuple[int, ...] = (), **changes: Any
) -> tuple[list[Resumption | ValueError | None], list[str]]:
    """What each slot finds, and what is said."""
    config = dataclasses.replace(training().config, checkpoint_dir=root, **changes)
    subject = subject_of(config, training().data, training().shape, training().lines)
    store: Any = MemoryBoard() if board is None else board
    said: list[str] = []
    found: dict[int, Any] = {}

    def act(slot: int) -> None:
        try:
            found[slot] = agree_on_checkpoint(store, slot, slots, config, subject, said.append if slot == 0 else _quiet)
        except ValueError as error:
            found[slot] = error

    threads = [threading.Thread(target=act, args=(slot,)) for slot in range(slots) if slot not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == slots - len(absent)
    return [found[slot] for slot in sorted(found)], said


def _quiet(line: str) -> None:
    return None


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "corrupt chunk": (flip, "slot-00001.1.safetensors", "is damaged: its sha256 is not the one that was written"),
    "corrupt small tensors": (flip, "small.safetensors", "is damaged"),
    "truncated chunk": (truncate, "slot-00000.0.safetensors", "bytes instead of"),
    "missing chunk": (Path.unlink, "slot-00000.0.safetensors", "cannot be read: No such file or directory"),
    "corrupt manifest": (flip, "manifest.json", "manifest.json: it is "),
    "truncated manifest": (truncate, "manifest.json", "no manifest"),
}


def test_the_newest(saved: Path) -> None:
    found, said = resume(saved)
    assert all(isinstance(one, Resumption) and one.step == 2 for one in found) and said == []
    assert resume(saved / "missing") == ([None, None, None], [])


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_is_taken(saved: Path, damage: str, slots: int) -> None:
    spoil, name, message = DAMAGES[damage]
    newest = whole_in(saved)[0].path
    spoil(newest / name)
    found, said = resume(saved, slots)
    assert all(isinstance(one, Resumption) and one.step == 1 for one in found)
    assert len(said) == 1 and newest.name in said[0] and name in said[0] and message in said[0]
    assert [one.step for one in whole_in(saved)] == [1], "or the next ones would be removed before it"


def test_none_left(saved: Path) -> None:
    for one in whole_in(saved):
        flip(one.path / "small.safetensors")
    found, said = resume(saved)
    assert len(said) == 2
    assert all(isinstance(one, ValueError) and "no checkpoint in" in str(one) for one in found)


def test_the_share_of_a_slot_that_died_is_looked_at_by_the_others(saved: Path) -> None:
    newest = whole_in(saved)[0].path
    second = Manifest.read(newest).files[1]  # of three slots, slot 1 would look at it
    board = MemoryBoard()
    board.set(exit_key(1), "{}")
    flip(newest / second.file)
    found, said = resume(saved, 3, board, absent=(1,))
    assert all(isinstance(one, Resumption) and one.step == 1 for one in found)
    assert second.file in said[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 4}, "seed (4) is not the checkpoint's (3); give the same --seed"),
        ({"global_batch_size": 12}, "global_batch_size (12) is not the checkpoint's (6)"),
        ({"steps": 1}, "steps (1) lie behind the checkpoint's (2); give a larger --steps"),
    ],
)
def test_another_job_is_refused_before_and_when_it_starts(saved: Path, changes: dict[str, Any], message: str) -> None:
    config = dataclasses.replace(training().config, checkpoint_dir=saved, **changes)
    subject = subject_of(config, training().data, training().shape, training().lines)
    with pytest.raises(ValueError) as caught:
        check_resume(config, subject)
    assert message in str(caught.value) and str(whole_in(saved)[0].path) in str(caught.value)
    found, _ = resume(saved, 2, **changes)
    assert all(isinstance(one, ValueError) and message in str(one) for one in found)


def test_what_has_changed_is_said(saved: Path) -> None:
    found, _ = resume(saved, 1)
    assert isinstance(found[0], Resumption)
    optimizer = dataclasses.replace(training().config.optimizer, lr=0.5)
    config = dataclasses.replace(training().config, optimizer=optimizer)
    lines = found[0].text(config)
    assert lines[1:] == ["optimizer.lr is 0.5 from here on, and was 0.003"]


def test_history_keeps_every_bit() -> None:
    history = History(num_updates=1)
    for step, sample_hash in ((1, 2**64 - 1), (2, 2**63), (3, 5)):
        entry = Committed(
            step=step, loss=1 / 3, tokens=7, samples=2, sample_hash=sample_hash, grad_norm=2 / 7, skipped=step == 2
        )
        history.steps.append(entry)
        history.counts_le.append(torch.full((2, 3), step))
    now = small_tensors(history, None)
    history.steps.append(entry)  # what comes later is not in it
    tensors = now()
    assert tensors["history.loss"].tolist() == [1 / 3] * 3
    assert [value % 2**64 for value in tensors["history.sample_hash"].tolist()] == [2**64 - 1, 2**63, 5]
    assert tensors["history.counts_le"].shape == (3, 2, 3)


def test_slots_with_different_data_or_settings_are_both_named() -> None:
    board = MemoryBoard()
    settings = {"data_digest": "a" * 64, "lr": "0.003"}
    for slot in (2, 0):
        require_same_settings(board, slot, settings)  # type: ignore[arg-type]
    with pytest.raises(Disagreement, match=r"slots 2 and 1 have different data \(digests a{12} and b{12}\)"):
        require_same_settings(board, 1, {**settings, "data_digest": "b" * 64})  # type: ignore[arg-type]
    with pytest.raises(Disagreement, match=r"slots 2 and 3 .* different settings: lr \(0.003 and 0.001\); give all"):
        require_same_settings(board, 3, {**settings, "lr": "0.001"})  # type: ignore[arg-type]
