"""The manifest: what one checkpoint is of and which files make it up. It is written last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nep.checkpoint.files import sha256_of, write_whole
from nep.checkpoint.subject import Subject
from nep.planning.intervals import Intervals

SCHEMA = 1
MANIFEST = "manifest.json"
FORMAT = "nep checkpoint"

# How randomness is made; a program that makes it otherwise has no business with the checkpoint. There is no generator
# whose state would have to be kept: everything is a function of these.
RNG = {
    "initial_values": "philox4x64 keyed by sha256(seed/name), counter = unit; Box-Muller",
    "sample_order": "philox4x64 keyed by (seed, epoch), stable argsort of raw output",
}


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be loaded: something of it is missing, truncated or damaged."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One file of a checkpoint.

    Attributes:
        file: name in the checkpoint's folder.
        size: bytes.
        sha256: of its content, hexadecimal.
        slot: who wrote it.
        intervals: axis -> units whose tensors it has, all kinds of them; empty for small tensors.
    """

    file: str
    size: int
    sha256: str
    slot: int
    intervals: Mapping[str, Intervals] = field(default_factory=dict)

    def problem(self, folder: Path, *, content: bool) -> str | None:
        """What is wrong with the file, or None.

        Args:
            folder: of the checkpoint.
            content: compare the content too, and not only the size.
        """
        path = folder / self.file
        try:
            size = path.stat().st_size
            if size != self.size:
                return f"{path} has {size} bytes instead of {self.size}"
            if content and sha256_of(path) != self.sha256:
                return f"{path} is damaged: its sha256 is not the one that was written"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        return None

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "size": self.size,
            "sha256": self.sha256,
            "slot": self.slot,
            "intervals": self.intervals,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Chunk:
        intervals = {axis: tuple((int(lo), int(hi)) for lo, hi in cut) for axis, cut in value["intervals"].items()}
        if "/" in value["file"]:
            raise ValueError(f"file ({value['file']!r}) must lie in the checkpoint's folder")
        return cls(**{**value, "intervals": intervals})


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint says beside tensors; the same on every slot that takes the snapshot.

    Attributes:
        step: the committed step that it is of.
        subject: model, data and kinds of tensors.
        num_updates: of the optimizer so far; skipped steps do not count.
        settings: what may be changed at a resume, and is worth a line then: dtype, optimizer, total steps.
        plan_digest, layout, slots: of the plan in force.
        loss: of the step.
        validation_losses: before the first step.
    """

    step: int
    subject: Subject
    num_updates: int
    settings: Mapping[str, Any]
    plan_digest: str
    layout: int
    slots: tuple[int, ...]
    loss: float
    validation_losses: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole checkpoint.

    Attributes:
        contents: see there.
        small: file of small tensors by name (history, routing).
        chunks: files of master weights and moments; together they have every unit.
    """

    contents: Contents
    small: Chunk
    chunks: tuple[Chunk, ...]

    @property
    def files(self) -> tuple[Chunk, ...]:
        return (self.small, *self.chunks)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(chunk.size for chunk in self.files)

    def to_json(self) -> str:
        contents = self.contents
        value: dict[str, Any] = {
            "format": FORMAT,
            "schema": SCHEMA,
            "step": contents.step,
            "next_sample": contents.step * contents.subject.global_batch_size,
            "loss": contents.loss,
            "num_updates": contents.num_updates,
            "validation_losses": contents.validation_losses,
            "plan": {"digest": contents.plan_digest, "number": contents.layout, "slots": contents.slots},
            "settings": contents.settings,
            "rng": RNG,
            "subject": contents.subject.to_json(),
            "small": self.small.to_json(),
        }
        chunks = ",\n  ".join(json.dumps(chunk.to_json()) for chunk in self.chunks)
        value["sha256"] = _digest({**value, "chunks": [chunk.to_json() for chunk in self.chunks]})
        fields = [f" {json.dumps(key)}: {json.dumps(field)}" for key, field in value.items()]
        # A line for each field and file: people read it, too.
        return "{\n" + ",\n".join([*fields, f' "chunks": [\n  {chunks}\n ]']) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads what `to_json` wrote.

        Raises:
            BadCheckpoint: it is damaged, or of a version that this program does not read.
        """
        try:
            value = json.loads(text)
            stored = value.pop("sha256")
            if value["format"] != FORMAT:
                raise BadCheckpoint(f"format ({value['format']!r}) is not {FORMAT!r}")
            if value["schema"] != SCHEMA:
                raise BadCheckpoint(
                    f"schema ({value['schema']}) is not the {SCHEMA} that this program reads; use the version of nep "
                    "that wrote it"
                )
            if stored != _digest(value):
                raise BadCheckpoint("it is damaged: its sha256 is not the one that was written")
            if value["rng"] != RNG:
                raise BadCheckpoint("it was made with another scheme of random numbers; use the version that wrote it")
            contents = Contents(
                step=value["step"],
                subject=Subject.from_json(value["subject"]),
                num_updates=value["num_updates"],
                settings=value["settings"],
                plan_digest=value["plan"]["digest"],
                layout=value["plan"]["number"],
                slots=tuple(value["plan"]["slots"]),
                loss=value["loss"],
                validation_losses=tuple(value["validation_losses"]),
            )
            chunks = tuple(Chunk.from_json(chunk) for chunk in value["chunks"])
            return cls(contents=contents, small=Chunk.from_json(value["small"]), chunks=chunks)
        except BadCheckpoint:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadCheckpoint(f"it is no manifest ({error!r})") from error

    def write(self, folder: Path) -> None:
        """Make the checkpoint whole.

        Raises:
            OSError: it is not.
        """
        write_whole(folder / MANIFEST, [memoryview(self.to_json().encode())])

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a checkpoint's manifest, and see whether its files are there.

        Raises:
            BadCheckpoint: saying what is wrong.
        """
        path = folder / MANIFEST
        try:
            manifest = cls.from_json(path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise BadCheckpoint(f"{path} cannot be read: {error}") from error
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{path}: {error}") from error
        for chunk in manifest.files:
            problem = chunk.problem(folder, content=False)
            if problem:
                raise BadCheckpoint(problem)
        return manifest


def _digest(value: Mapping[str, Any]) -> str:
    """sha256 of everything that a manifest says."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
