"""Reads a checkpoint into any layout: each slot reads the rows that it owns, mirrors or holds, and no others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from nep.checkpoint.logical import Rows, logical_rows, put
from nep.checkpoint.manifest import BadCheckpoint, Manifest
from nep.checkpoint.snapshot import entry_key
from nep.parallel.holding import CPU, Holding
from nep.parallel.state import OptimizerShard, SlotState, Tensors
from nep.planning.layout import Line, Lines, axes
from nep.planning.plan import Plan


class _Piece(NamedTuple):
    """Rows of a logical tensor in one file."""

    lo: int
    hi: int
    file: str


class Reader:
    """A checkpoint as tensors by global name and unit.

    Args:
        folder: of the checkpoint.
        manifest: read from there.
        lines: of the model that is to have it; only the size of its blocks may differ from the checkpoint's.
    """

    def __init__(self, folder: Path, manifest: Manifest, lines: Lines):
        self.folder = folder
        self.manifest = manifest
        self._lines = lines
        self._saved = manifest.contents.subject.lines
        self._pieces: dict[str, dict[str, list[_Piece]]] = {}
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.clear()

    def fill(self, kind: str, name: str, units: torch.Tensor, lo: int) -> None:
        """Read units from `lo` on of a parameter.

        Args:
            kind: `master` or a moment.
            name: of the parameter.
            units: to be filled, `[units, *unit_shape]` of any floating dtype.
            lo: its first unit.

        Raises:
            BadCheckpoint: it does not have them all.
        """
        line = self._lines[name]
        for rows in logical_rows(name, line, lo, lo + len(units)):
            put(units[rows.unit_lo - lo : rows.unit_hi - lo], rows, self._read(kind, name, rows))

    def small_tensors(self) -> dict[str, torch.Tensor]:
        """Small tensors by name.

        Raises:
            BadCheckpoint: they cannot be read.
        """
        path = self.folder / self.manifest.small.file
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise BadCheckpoint(f"{path} cannot be read: {error}") from error

    def _read(self, kind: str, name: str, rows: Rows) -> torch.Tensor:
        """The rows, put together from all files that have some of them."""
        found: list[torch.Tensor] = []
        at = rows.lo
        for piece in self._pieces_of(name).get(rows.name, ()):
            if piece.lo <= at < min(piece.hi, rows.hi):
                end = min(piece.hi, rows.hi)
                key = entry_key(kind, rows.name, piece.lo, piece.hi)
                found.append(self._slice(piece.file, key, at - piece.lo, end - piece.lo))
                at = end
        if at < rows.hi:
            raise BadCheckpoint(f"{self.folder} has no {kind} of {rows.name} rows [{at}, {rows.hi})")
        return found[0] if len(found) == 1 else torch.cat(found)

    def _slice(self, file: str, key: str, lo: int, hi: int) -> torch.Tensor:
        path = self.folder / file
        try:
            if file not in self._files:
                self._files[file] = safe_open(path, framework="pt")
            tensor: torch.Tensor = self._files[file].get_slice(key)[lo:hi]
        except (OSError, SafetensorError) as error:
            raise BadCheckpoint(f"{path} cannot be read: {error}") from error
        return tensor

    def _pieces_of(self, name: str) -> Mapping[str, list[_Piece]]:
        """Where the rows of a parameter are: logical tensor -> pieces, ascending."""
        if name not in self._pieces:
            line: Line = self._saved[name]
            pieces: dict[str, list[_Piece]] = {}
            for chunk in self.manifest.chunks:
                for lo, hi in chunk.intervals.get(line.axis, ()):
                    for rows in logical_rows(name, line, lo, hi):
                        pieces.setdefault(rows.name, []).append(_Piece(rows.lo, rows.hi, chunk.file))
            self._pieces[name] = {key: sorted(found) for key, found in pieces.items()}
        return self._pieces[name]


def load_state(
    reader: Reader, plan: Plan, slot: int, lines: Lines, dtype: torch.dtype, device: torch.device = CPU
) -> SlotState:
    """A slot's state under a plan, which need have nothing in common with the one that was saved.

    Args:
        dtype: of the parameters.
        device: where the state is to be.

    Raises:
        BadCheckpoint: a file cannot be read, or units are missing.
    """
    contents = reader.manifest.contents
    kinds = contents.subject.kinds
    state = SlotState.empty(plan, slot, lines, dtype, kinds[1:], device)
    for shard in (state.owned, state.mirrored):
        _load_shard(reader, shard, lines)
    # The parameter is the rounded master weight, as after every step.
    _load_tensors(reader, "master", state.held(), state.params, lines)
    state.mark_all(contents.step, tuple(axes(lines)))
    return state


def _load_shard(reader: Reader, shard: OptimizerShard, lines: Lines) -> None:
    for kind, tensors in shard.kinds.items():
        _load_tensors(reader, kind, shard.weights(), tensors, lines)


def _load_tensors(reader: Reader, kind: str, cut: Holding, tensors: Tensors, lines: Lines) -> None:
    for name, line in lines.items():
        offset = 0
        for lo, hi in cut.layout.intervals(line.axis, cut.slot):
            reader.fill(kind, name, tensors[name][offset : offset + hi - lo], lo)
            offset += hi - lo


def verify(folder: Path, manifest: Manifest, share: int, of: int) -> str | None:
    """Compare the content of every `of`-th file, from number `share` on, with its checksum.

    Returns:
        What is wrong, or None.
    """
    for chunk in manifest.files[share::of]:
        problem = chunk.problem(folder, content=True)
        if problem:
            return problem
    return None
