"""One save on one slot, from its snapshot to the manifest. Everything here runs in the saver's thread."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from nep.checkpoint.board import COMPLETE, Board, SaveKeys, end_save, reason_of, report, reported
from nep.checkpoint.files import Entry, write_tensors
from nep.checkpoint.folders import folder_name, prune
from nep.checkpoint.manifest import MANIFEST, Chunk, Manifest
from nep.checkpoint.snapshot import Part, Snapshot, parts_of, without

log = logging.getLogger(__name__)

_POLL_S = 0.01
_LOOK_AROUND_S = 0.2
_SLOTS = 8  # more slots than these ask the store less often, for its sake
_LONGEST_POLL_S = 1.0
_LONGEST_LOOK_S = 10.0


HAS_ONE = "the step has a checkpoint already"


class Abandoned(Exception):
    """The save ends without a checkpoint; says why."""


class WriteTensors(Protocol):
    """`nep.checkpoint.files.write_tensors`, or what a test puts in its place."""

    def __call__(self, path: Path, entries: Sequence[Entry]) -> tuple[int, str]: ...


@dataclass(frozen=True, kw_only=True)
class SaverConfig:
    """How the savers of a job work.

    Attributes:
        root: folder of the checkpoints, which all slots see.
        keep: so many whole checkpoints are kept.
        tag: of the job, hexadecimal, the same on all slots.
        stall_s: a save is abandoned when nobody has reported a file for so long.
        part_bytes: what a file is filled up to.
        on_file: called when a file is written and not yet reported, with the step (failure injection).
        write: how files are written.
    """

    root: Path
    keep: int = 2
    tag: str
    stall_s: float
    part_bytes: int = 256 << 20
    on_file: Callable[[int], None] = lambda step: None
    write: WriteTensors = write_tensors


@dataclass(kw_only=True)
class Save:
    """One slot's part of a save.

    Args:
        snapshot: the slot's.
        board: this thread's connection to the control store.
        gone: which slots have ended, or were left behind.
        cancelled: why the save is not wanted any more, or None.
    """

    snapshot: Snapshot
    config: SaverConfig
    board: Board
    gone: Callable[[], Collection[int]]
    cancelled: Callable[[], str | None]
    _written: list[Path] = field(default_factory=list)
    _gone: set[int] = field(default_factory=set)
    _looked_at: float = 0.0

    def __post_init__(self) -> None:
        snapshot = self.snapshot
        self.keys = SaveKeys(snapshot.step, snapshot.plan.number)
        self.folder = self.config.root / folder_name(snapshot.step, self.config.tag, snapshot.plan.number)
        sizes = snapshot.unit_bytes()
        self._parts = {
            slot: parts_of(snapshot.plan, slot, snapshot.lines, sizes, self.config.part_bytes)
            for slot in snapshot.plan.slots
        }

    def run(self) -> Manifest | None:
        """Save.

        Returns:
            The manifest, if this slot wrote it.

        Raises:
            Abandoned: the save has ended otherwise, for all slots.
            OSError: a file cannot be written; nobody knows yet.
            RuntimeError: the control store is gone.
        """
        if self.board.exists(self.keys.step_is_saved):
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        for part in self._parts[self.snapshot.slot]:
            self._check_end()
            chunk = self._write_part(part, mirrored=False)
            report(self.board, self.keys, self.keys.owned(part), chunk)
        log.info("checkpoint of step %d: wrote and reported in %.3f s", self.snapshot.step, time.monotonic() - started)
        return self._wait_for_all()

    def abandon(self, why: str) -> tuple[str, bool]:
        """End the save for everybody, unless it has ended.

        Returns:
            How it has ended, COMPLETE or the reason that stands, and whether that is this slot's.
        """
        return end_save(self.board, self.keys, self.snapshot.slot, why)

    def tidy_up(self) -> None:
        """Remove this slot's files of a save that was abandoned."""
        for path in self._written:
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # the last one to leave succeeds

    # Files.

    def _write_part(self, part: Part, *, mirrored: bool) -> Chunk:
        """An owner's file, or what this slot mirrors of it."""
        slot = self.snapshot.slot
        name = f"slot-{part.slot:05d}.{part.index}"
        if mirrored:
            name += f"-from-{slot:05d}"
        path = self.folder / f"{name}.safetensors"
        size, digest = self.config.write(path, self.snapshot.entries(part.cut, mirrored=mirrored))
        self._written.append(path)
        self.config.on_file(self.snapshot.step)
        log.info("checkpoint of step %d: %s, %d bytes", self.snapshot.step, path.name, size)
        return Chunk(file=path.name, size=size, sha256=digest, slot=slot, intervals=part.cut)

    # The others.

    def _wait_for_all(self) -> Manifest | None:
        keys = self.keys
        pause = min(_LONGEST_POLL_S, _POLL_S * self._crowd)
        expected = [keys.owned(part) for parts in self._parts.values() for part in parts]
        count, since = -1, time.monotonic()
        while True:
            if self._check_end():
                return None
            gone = self._look_around()
            found = self.board.add(keys.reported, 0)
            if found != count:
                count, since = found, time.monotonic()
            elif time.monotonic() - since > self.config.stall_s:
                raise Abandoned(
                    f"{found} of {len(expected)} files were written, and no more within {self.config.stall_s:g} s"
                )
            if found >= len(expected) and self.board.exists(expected):
                chunks = [_require(reported(self.board, key)) for key in expected]
            elif gone:
                self._stand_in(gone)
                chunks = self._collect(gone)
            else:
                chunks = []
            if chunks and self._may_finish(gone):
                return self._finish(chunks)
            time.sleep(pause)

    @property
    def _crowd(self) -> float:
        return max(1.0, len(self._parts) / _SLOTS)

    def _check_end(self) -> bool:
        """Whether the save is complete.

        Raises:
            Abandoned: it has ended otherwise.
        """
        ended = self.board.get(self.keys.end)
        if ended == COMPLETE:
            return True
        if ended is not None:
            raise Abandoned(reason_of(ended))
        why = self.cancelled()
        if why is not None:
            raise Abandoned(why)
        return False

    def _look_around(self) -> set[int]:
        """Slots of the plan that are gone; looked up now and then."""
        now = time.monotonic()
        if now - self._looked_at >= min(_LONGEST_LOOK_S, _LOOK_AROUND_S * self._crowd):
            self._looked_at = now
            self._gone |= set(self.gone()) & set(self.snapshot.plan.slots) - {self.snapshot.slot}
            if self.board.exists(self.keys.step_is_saved) and not self._check_end():
                raise Abandoned(HAS_ONE)
        return self._gone

    def _stand_in(self, gone: Collection[int]) -> None:
        """Write and report what this slot mirrors of what the dead had not reported.

        Raises:
            Abandoned: units had neither a live owner nor a live mirror.
        """
        live = [slot for slot in self.snapshot.plan.slots if slot not in gone]
        for part in self._unreported(gone):
            key = self.keys.mirrored(part, self.snapshot.slot)
            if not self.board.exists(key):
                mine = self.snapshot.mirrored_of(part, live)
                if mine:
                    log.warning("checkpoint of step %d: standing in for slot %d", self.snapshot.step, part.slot)
                    chunk = self._write_part(Part(part.slot, part.index, mine), mirrored=True)
                    report(self.board, self.keys, key, chunk)
            left = part.cut
            for slot in self.snapshot.plan.slots:
                mirrored = {axis: self.snapshot.plan.mirrors.intervals(axis, slot) for axis in left}
                if slot in live or self.board.exists(self.keys.mirrored(part, slot)):
                    left = without(left, mirrored)
            if left:
                raise Abandoned(f"slot {part.slot} and its mirrors were lost before they had written all of it")

    def _unreported(self, gone: Collection[int]) -> list[Part]:
        """Parts of dead slots that they had not reported."""
        return [
            part for slot in sorted(gone) for part in self._parts[slot] if not self.board.exists(self.keys.owned(part))
        ]

    def _collect(self, gone: Collection[int]) -> list[Chunk]:
        """Every file that is needed, or nothing if some are still to come."""
        chunks = []
        for slot, parts in self._parts.items():
            for part in parts:
                owned = reported(self.board, self.keys.owned(part))
                if owned is not None:
                    chunks.append(owned)
                    continue
                if slot not in gone:
                    return []
                left = part.cut
                for mirror in self.snapshot.plan.slots:
                    chunk = reported(self.board, self.keys.mirrored(part, mirror))
                    if chunk is not None and without(left, chunk.intervals) != left:
                        chunks.append(chunk)
                        left = without(left, chunk.intervals)
                if left:
                    return []
        return chunks

    # The manifest.

    def _may_finish(self, gone: Collection[int]) -> bool:
        """Whether this slot is the one that writes the manifest; another takes over when it dies."""
        me = str(self.snapshot.slot)
        writer = self.board.compare_and_set(self.keys.writer, "", me)
        if writer != me and int(writer) in gone:
            writer = self.board.compare_and_set(self.keys.writer, writer, me)
        return writer == me

    def _finish(self, chunks: list[Chunk]) -> Manifest | None:
        """Write the small tensors and then the manifest; the save is complete when the store says so too."""
        small_path = self.folder / "small.safetensors"
        entries = [Entry.of(name, tensor) for name, tensor in self.snapshot.small().items()]
        size, digest = self.config.write(small_path, entries)
        self._written.append(small_path)
        small = Chunk(file=small_path.name, size=size, sha256=digest, slot=self.snapshot.slot)
        manifest = Manifest(contents=self.snapshot.contents, small=small, chunks=tuple(chunks))
        for chunk in manifest.files:
            problem = chunk.problem(self.folder, content=False)
            if problem:
                raise Abandoned(f"slot {self.snapshot.slot}: {problem}; all slots must see the same --checkpoint-dir")
        self._check_end()
        manifest.write(self.folder)
        ended = self.board.compare_and_set(self.keys.end, "", COMPLETE)
        if ended != COMPLETE:
            (self.folder / MANIFEST).unlink()
            raise Abandoned(reason_of(ended))
        self.board.set(self.keys.step_is_saved, "1")
        # Nobody else writes now: whoever begins the next save has learnt that this one is complete.
        for path in prune(self.config.root, keep=self.config.keep, tag=self.config.tag):
            log.info("removed %s", path)
        return manifest


def _require(chunk: Chunk | None) -> Chunk:
    assert chunk is not None, "it was there a moment ago"
    return chunk
