"""What the processes of a measured job write down: what happened when, and where each is at this moment.

A journal outlives the SIGKILL of whoever writes it: a line is one `write`, and a mark is a store into a shared mapping,
which the kernel keeps. So what the mark says after a kill is where the killed process was.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MARK = struct.Struct("<B47s16s")
Event = dict[str, Any]
Events = Mapping[int, Sequence[Event]]  # by rank


class Journal:
    """Events of one rank, appended; every process that is this rank writes to the same file.

    Args:
        folder: of the job; its processes are on one machine and share its clock.
        rank: whose.
    """

    def __init__(self, folder: Path, rank: int):
        self._file = os.open(_events_path(folder, rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.write("up", pid=os.getpid())

    def write(self, kind: str, at: float | None = None, **facts: Any) -> None:
        """One event.

        Args:
            kind: `up` (a process begins), `step` (one is committed: step, size, generation), `dropped` (a step was
                given up), `recovery` (what nep says of one).
            at: seconds since the epoch, by default now.
            facts: what else there is to say, JSON.
        """
        event = {"kind": kind, "t": time.time() if at is None else at, **facts}
        os.write(self._file, (json.dumps(event) + "\n").encode())


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where a process is.

    Attributes:
        waiting: inside a collective or an exchange, waiting for others.
        what: for what, or for what it waited last.
        phase: of the step, the last that it came by.
    """

    waiting: bool
    what: str
    phase: str


class Marks:
    """The mark of one rank, in a file that is mapped into memory: two stores, no system call."""

    def __init__(self, folder: Path, rank: int):
        path = _mark_path(folder, rank)
        with path.open("a+b") as file:
            file.truncate(_MARK.size)
            self._memory = mmap.mmap(file.fileno(), _MARK.size)

    def enter(self, what: str) -> None:
        """It waits from here on."""
        self._memory[1:48] = what.encode()[:47].ljust(47, b"\0")
        self._memory[0] = 1

    def leave(self) -> None:
        """It does not any more."""
        self._memory[0] = 0

    def come_by(self, phase: str) -> None:
        """It begins another phase of the step."""
        self._memory[48:64] = phase.encode()[:16].ljust(16, b"\0")

    @staticmethod
    def read(folder: Path, rank: int) -> Mark:
        """What was marked last."""
        waiting, what, phase = _MARK.unpack(_mark_path(folder, rank).read_bytes())
        texts = (part.rstrip(b"\0").decode(errors="replace") for part in (what, phase))
        return Mark(waiting=bool(waiting), what=next(texts), phase=next(texts))


@dataclass(kw_only=True)
class Reader:
    """Follows the journals of a job.

    Attributes:
        folder: of the job.
        events: per rank, in the order in which they were written.
    """

    folder: Path
    events: dict[int, list[Event]] = field(default_factory=dict)
    _read: dict[int, int] = field(default_factory=dict)  # bytes per rank

    def look(self) -> dict[int, list[Event]]:
        """Read what is new; returns `events`."""
        for path in self.folder.glob("events*.jsonl"):
            rank = int(path.stem.removeprefix("events"))
            with path.open("rb") as file:
                file.seek(self._read.get(rank, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[rank] = self._read.get(rank, 0) + len(whole) + len(newline)
            self.events.setdefault(rank, []).extend(json.loads(line) for line in whole.splitlines())
        return self.events

    def pid(self, rank: int) -> int:
        """Of the newest process that is this rank."""
        return int(next(event["pid"] for event in reversed(self.events[rank]) if event["kind"] == "up"))


def _events_path(folder: Path, rank: int) -> Path:
    return folder / f"events{rank}.jsonl"


def _mark_path(folder: Path, rank: int) -> Path:
    return folder / f"mark{rank}"
