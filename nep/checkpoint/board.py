"""How savers of different slots know of each other: a few keys of the control store for each save.

A save is of one committed step under one plan. It ends once, by compare-and-set: complete, or abandoned with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from nep.checkpoint.manifest import Chunk
from nep.checkpoint.snapshot import Part

COMPLETE = "complete"


class Board(Protocol):
    """What is needed of the control store: `nep.fault_tolerance.control_store.ControlStore` has it."""

    def get(self, key: str) -> str | None: ...

    def set(self, key: str, value: str) -> None: ...

    def compare_and_set(self, key: str, expected: str, value: str) -> str: ...

    def exists(self, keys: str | Iterable[str]) -> bool: ...

    def add(self, key: str, amount: int) -> int: ...


@dataclass(frozen=True)
class SaveKeys:
    """Keys of one save."""

    step: int
    layout: int

    @property
    def _prefix(self) -> str:
        return f"checkpoint/{self.step}.{self.layout}"

    @property
    def end(self) -> str:
        """How it ended: COMPLETE, or who abandoned it and why, see `end_save`."""
        return f"{self._prefix}/end"

    @property
    def step_is_saved(self) -> str:
        """Present: there is a checkpoint of the step, from this save or another."""
        return f"checkpoint/saved/{self.step}"

    @property
    def writer(self) -> str:
        """The slot that writes the manifest."""
        return f"{self._prefix}/writer"

    @property
    def reported(self) -> str:
        """How many files have been reported: whether anything happens at all."""
        return f"{self._prefix}/reported"

    def owned(self, part: Part) -> str:
        """The owner's file of a part."""
        return f"{self._prefix}/owned/{part.slot}/{part.index}"

    def mirrored(self, part: Part, mirror: int) -> str:
        """What a mirror has written of a dead owner's part."""
        return f"{self._prefix}/mirrored/{part.slot}/{part.index}/{mirror}"


def end_save(board: Board, keys: SaveKeys, slot: int, why: str) -> tuple[str, bool]:
    """Abandon a save, unless it has ended.

    Args:
        slot: whose wish it is.

    Returns:
        How it has ended, COMPLETE or the reason that stands, and whether that is this slot's.
    """
    mine = f"{slot}|{why}"
    ended = board.compare_and_set(keys.end, "", mine)
    return reason_of(ended), ended == mine


def reason_of(ended: str) -> str:
    """How a save has ended, without who ended it."""
    return ended if ended == COMPLETE else ended.partition("|")[2]


def report(board: Board, keys: SaveKeys, key: str, chunk: Chunk) -> None:
    """Say that a file is on the disk."""
    board.set(key, json.dumps(chunk.to_json()))
    board.add(keys.reported, 1)


def reported(board: Board, key: str) -> Chunk | None:
    """The file that was reported, or None."""
    text = board.get(key)
    return None if text is None else Chunk.from_json(json.loads(text))
