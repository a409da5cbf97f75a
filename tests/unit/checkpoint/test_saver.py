"""Savers of several slots in one process: slots die, disks are full, the one who writes the manifest is lost."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed import DistNetworkError

from nep.checkpoint.board import COMPLETE, SaveKeys, report
from nep.checkpoint.files import Entry, write_tensors
from nep.checkpoint.folders import found_in, newest_in, whole_in
from nep.checkpoint.manifest import Manifest
from nep.checkpoint.save import Save, SaverConfig
from nep.checkpoint.snapshot import Snapshot
from nep.fault_tolerance.runtime import SlotRun
from nep.testing.memory_board import MemoryBoard
from nep.testing.parity import Training, gather
from nep.train.resume import Resumption
from tests.multirank.plans import lane_plan
from tests.multirank.saved import go_on, load, savers, snapshot_of
from tests.multirank.steps import SHAPE
from tests.multirank.training import make_training

PLAN = lane_plan([[[0], [1]], [[2], [3]]], SHAPE, [2, 1, 2, 1])
KEYS = SaveKeys(1, PLAN.number)
PART_BYTES = 10_000  # several files of each slot


@cache
def trained() -> tuple[Training, dict[int, SlotRun]]:
    """Four slots after a step."""
    training = make_training(SHAPE)
    return training, go_on(training, {slot: training.start(PLAN, slot) for slot in PLAN.slots}, 1)


def snapshots(slots: Sequence[int] = PLAN.slots) -> dict[int, Snapshot]:
    training, runs = trained()
    return {slot: snapshot_of(training, runs[slot]) for slot in slots}


def assert_whole(root: Path) -> Manifest:
    """The newest checkpoint has every bit that the four slots have."""
    training, runs = trained()
    found = newest_in(root)
    assert found is not None
    alone = load(training, Resumption(found[0].path, found[1]), lane_plan([[[0]]], SHAPE, [6]))
    for kind, tensors in alone[0].state.owned.kinds.items():
        expected = gather(PLAN.owners, {s: run.state.owned.kinds[kind] for s, run in runs.items()}, training.lines)
        for name, tensor in expected.items():
            assert torch.equal(tensors[name].view(tensor.shape), tensor), f"{kind} of {name}"
    return found[1]


class Disk:
    """Writes files, and is full or stuck where it is told to be.

    Attributes:
        full: names, by their beginning, of files for which there is no space.
        gate: names, by their beginning, that wait until they are let through.
    """

    def __init__(self, full: Sequence[str] = (), gate: Sequence[str] = ()):
        self.full = tuple(full)
        self.gate = tuple(gate)
        self.let_through = threading.Event()

    def __call__(self, path: Path, entries: Sequence[Entry]) -> tuple[int, str]:
        if self.gate and path.name.startswith(self.gate):
            assert self.let_through.wait(20)
        if self.full and path.name.startswith(self.full):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write_tensors(path, entries)


def write_all(save: Save) -> None:
    """A slot writes and reports all it owns, and does no more."""
    save.folder.mkdir(exist_ok=True)
    for part in save._parts[save.snapshot.slot]:
        report(save.board, save.keys, save.keys.owned(part), save._write_part(part, mirrored=False))


def test_every_unit_is_written_once(tmp_path: Path) -> None:
    writers = savers(tmp_path, PLAN.slots, part_bytes=PART_BYTES)
    for slot, snapshot in snapshots().items():
        writers[slot].save(snapshot)
    assert all(saver.wait(20) for saver in writers.values())
    manifest = assert_whole(tmp_path)
    assert len(manifest.chunks) > len(PLAN.slots), "more than one file each"
    for axis, line in {line.axis: line for line in trained()[0].lines.values()}.items():
        intervals = sorted(i for chunk in manifest.chunks for i in chunk.intervals.get(axis, ()))
        assert [lo for lo, _ in intervals] == [0, *(hi for _, hi in intervals[:-1])], axis
        assert intervals[-1][1] == line.num_units
    said = [line for saver in writers.values() for line in saver.messages()]
    assert len(said) == 1 and said[0].startswith("checkpoint of step 1: ")


@pytest.mark.parametrize("files", [0, 1, 2, 100])
def test_mirrors_write_what_a_dead_slot_had_not_reported(tmp_path: Path, files: int) -> None:
    """Slot 2 dies after some of its files."""
    board, dead = MemoryBoard(), set[int]()
    writers = savers(tmp_path, PLAN.slots, board, lambda: dead, part_bytes=PART_BYTES)
    taken = snapshots()
    for slot in (0, 1, 3):
        writers[slot].save(taken[slot])
    written = 0

    def dies(step: int) -> None:
        nonlocal written
        written += 1
        if written > files:
            raise RuntimeError("killed")  # written, and not reported

    config = SaverConfig(root=tmp_path, tag="ab12", stall_s=20, part_bytes=PART_BYTES, on_file=dies)
    save = Save(snapshot=taken[2], config=config, board=board, gone=set, cancelled=lambda: None)
    if files < 100:
        with pytest.raises(RuntimeError, match="killed"):
            save.run()
    else:
        write_all(save)
    dead.add(2)
    assert all(writers[slot].wait(20) for slot in (0, 1, 3))
    manifest = assert_whole(tmp_path)
    stood_in = [chunk for chunk in manifest.chunks if "-from-" in chunk.file]
    assert bool(stood_in) == (files < 100)
    assert len([chunk for chunk in manifest.chunks if chunk.slot == 2]) == min(files, len(save._parts[2]))


def test_owner_and_mirror_dead_before_they_wrote_ends_the_save(tmp_path: Path) -> None:
    board = MemoryBoard()
    writers = savers(tmp_path, PLAN.slots, board, lambda: {2, 3})
    for slot, snapshot in snapshots((0, 1)).items():
        writers[slot].save(snapshot)
    assert all(writers[slot].wait(20) for slot in (0, 1))
    said = [line for slot in (0, 1) for line in writers[slot].messages()]
    assert said == ["no checkpoint of step 1: slot 2 and its mirrors were lost before they had written all of it"]
    assert found_in(tmp_path) == [], "nothing is left behind"


def test_lost_slots_are_learnt_from_the_main_thread_too(tmp_path: Path) -> None:
    writers = savers(tmp_path, PLAN.slots)
    for slot, snapshot in snapshots((0, 1, 3)).items():
        writers[slot].save(snapshot)
        writers[slot].lose([2])
    assert all(writers[slot].wait(20) for slot in (0, 1, 3))
    assert_whole(tmp_path)


def test_a_full_disk_is_said_once_and_training_could_go_on(tmp_path: Path) -> None:
    disk = Disk()
    writers = savers(tmp_path, PLAN.slots, write=disk)

    def save_all(layout: int) -> list[str]:
        for slot, snapshot in snapshots().items():
            snapshot.plan = lane_plan([[[0], [1]], [[2], [3]]], SHAPE, [2, 1, 2, 1], number=layout)
            writers[slot]._board.values.pop(KEYS.step_is_saved, None)
            writers[slot].save(snapshot)
        assert all(saver.wait(20) for saver in writers.values())
        return [line for saver in writers.values() for line in saver.messages()]

    assert len(save_all(1)) == 1
    disk.full = ("slot-00001",)
    said = save_all(2)
    assert len(said) == 1 and said[0].startswith("no checkpoint of step 1: slot 1: [Errno 28] No space left"), said
    assert save_all(3) == [], "it is known"
    disk.full = ("small",)
    assert save_all(4) == []
    assert [one.path.name for one in found_in(tmp_path)] == ["step-00000001-ab12.1"], "the one before is still there"
    assert_whole(tmp_path)
    disk.full = ()
    assert len(save_all(5)) == 1, "space again"
    disk.full = ("slot-00003",)
    assert len(save_all(6)) == 1, "and a new trouble is said again"


def test_another_slot_writes_the_manifest_if_the_first_dies(tmp_path: Path) -> None:
    board, dead = MemoryBoard(), set[int]()
    taken = snapshots()
    config = SaverConfig(root=tmp_path, tag="ab12", stall_s=20, part_bytes=PART_BYTES)
    write_all(Save(snapshot=taken[3], config=config, board=board, gone=set, cancelled=lambda: None))
    assert board.compare_and_set(KEYS.writer, "", "3") == "3"  # wins, and is never heard of again
    writers = savers(tmp_path, (0, 1, 2), board, lambda: dead, part_bytes=PART_BYTES)
    for slot in (0, 1, 2):
        writers[slot].save(taken[slot])
    assert not writers[0].wait(0.3)
    for slot in (0, 1, 2):
        writers[slot].lose([3])
    assert all(writers[slot].wait(20) for slot in (0, 1, 2))
    assert_whole(tmp_path)
    assert board.get(KEYS.writer) != "3"


def test_a_busy_slot_ends_the_save_of_the_next_step_for_all(tmp_path: Path) -> None:
    disk = Disk(gate=["slot-00001"])
    board = MemoryBoard()
    writers = savers(tmp_path, PLAN.slots, board, write=disk)
    for slot, snapshot in snapshots().items():
        writers[slot].save(snapshot)
    writers[0].refuse(9, PLAN.number)
    disk.let_through.set()
    assert all(saver.wait(20) for saver in writers.values())
    assert_whole(tmp_path)
    ended = board.get(SaveKeys(9, PLAN.number).end)
    assert ended == "0|slot 0 was still busy with the one before"


def test_a_cancelled_save_leaves_nothing_and_says_nothing(tmp_path: Path) -> None:
    writers = savers(tmp_path, PLAN.slots)
    for slot, snapshot in snapshots((0, 1)).items():
        writers[slot].save(snapshot)
        writers[slot].cancel("the members have changed")
    assert all(writers[slot].wait(20) for slot in (0, 1))
    assert not any(writers[slot].messages() for slot in (0, 1))
    assert found_in(tmp_path) == []


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    """A slot that is neither dead nor writes: the save is given up."""
    writers = savers(tmp_path, PLAN.slots, stall_s=0.3)
    for slot, snapshot in snapshots((0, 1, 3)).items():
        writers[slot].save(snapshot)
    assert all(writers[slot].wait(20) for slot in (0, 1, 3))
    said = [line for slot in (0, 1, 3) for line in writers[slot].messages()]
    assert len(said) == 1 and "and no more within 0.3 s" in said[0]


def test_a_thread_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    disk = Disk(gate=["slot-00001"])
    writers = savers(tmp_path, PLAN.slots, MemoryBoard(), write=disk, stall_s=0.3)
    for slot, snapshot in snapshots().items():
        writers[slot].save(snapshot)
    assert not writers[1].wait() and not writers[1].wait(), "its thread is still in there"
    (message,) = writers[1].messages()
    assert message.startswith("slot 1 has been busy with one file of a checkpoint for more than 0.3 s")
    assert all(writers[slot].wait(20) for slot in (0, 2, 3)) and not whole_in(tmp_path)
    disk.let_through.set()
    deadline = time.monotonic() + 20
    while not writers[1].wait(0.05):
        assert time.monotonic() < deadline


def test_a_slot_whose_thread_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    disk, board = Disk(gate=["slot-00001"]), MemoryBoard()
    writers = savers(tmp_path, PLAN.slots, board, write=disk, stall_s=15)
    for slot, snapshot in snapshots().items():
        writers[slot].save(snapshot)
    assert not writers[0].wait(0.3), "the others wait for its file"
    began = time.monotonic()
    writers[1].withdraw(KEYS.step, KEYS.layout, board)
    assert all(writers[slot].wait(10) for slot in (0, 2, 3))
    assert time.monotonic() - began < 5
    disk.let_through.set()
    assert writers[1].wait(10)
    assert not whole_in(tmp_path)
    assert writers[0].messages() == [] and writers[0].last_step is None


def test_a_step_that_has_a_checkpoint_is_not_saved_again(tmp_path: Path) -> None:
    """Survivors of a last failure may disagree on whether the last step has been saved."""
    board = MemoryBoard()
    writers = savers(tmp_path, PLAN.slots, board)
    writers[0].save(snapshots()[0])
    board.set(KEYS.step_is_saved, "1")
    board.set(SaveKeys(1, PLAN.number + 1).end, COMPLETE)
    assert writers[0].wait(20)
    assert writers[0].messages() == []


def test_the_store_is_lost_and_the_folder_takes_its_place(tmp_path: Path) -> None:
    """For one slot while it reports, for another before it begins."""

    def broken(key: str) -> None:
        raise DistNetworkError("connection reset")

    board = MemoryBoard(broken)
    writers = savers(tmp_path, PLAN.slots, board)
    for slot, snapshot in snapshots().items():
        writers[slot].save(snapshot)
    assert all(saver.wait(20) for saver in writers.values())
    assert_whole(tmp_path)
    assert len([line for saver in writers.values() for line in saver.messages()]) == 1


@pytest.mark.parametrize("keep", [1, 3])
def test_old_ones_are_removed_once_the_new_one_is_whole(tmp_path: Path, keep: int) -> None:
    for step in range(1, 6):
        writers = savers(tmp_path, PLAN.slots, keep=keep)
        for slot, snapshot in snapshots().items():
            object.__setattr__(snapshot.contents, "step", step)
            writers[slot].save(snapshot)
        assert all(saver.wait(20) for saver in writers.values())
        assert [one.step for one in whole_in(tmp_path)] == list(range(step, max(0, step - keep), -1))
    assert len(found_in(tmp_path)) == keep
