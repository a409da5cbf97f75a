"""The checkpoints of a folder: one subfolder each, whole once it has a manifest."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from nep.checkpoint.manifest import MANIFEST, BadCheckpoint, Manifest

_NAME = re.compile(r"step-(?P<step>\d+)-(?P<tag>[0-9a-f]+)\.(?P<layout>\d+)")


def folder_name(step: int, tag: str, layout: int) -> str:
    """Name of a checkpoint's folder.

    Args:
        step: committed step.
        tag: of the job; a job that resumed from an earlier step may come to this step again.
        layout: number of the plan that the state was under.
    """
    return f"step-{step:08d}-{tag}.{layout}"


@dataclass(frozen=True)
class Found:
    """A subfolder that is named like a checkpoint's."""

    path: Path
    step: int
    tag: str

    @property
    def is_whole(self) -> bool:
        return (self.path / MANIFEST).exists()


def found_in(root: Path) -> list[Found]:
    """What is there, whole or not, newest step first; of equal steps the one finished last."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found.append(Found(path, int(match["step"]), match["tag"]))
    return sorted(found, key=lambda one: (one.step, _finished_at(one.path), one.path.name), reverse=True)


def whole_in(root: Path) -> list[Found]:
    """Those that have a manifest, newest first."""
    return [one for one in found_in(root) if one.is_whole]


def newest_in(root: Path) -> tuple[Found, Manifest] | None:
    """The newest one whose files are all there, by their sizes; None if the folder has none at all.

    Raises:
        BadCheckpoint: there are some, and none of them can be loaded.
    """
    problems = []
    for one in whole_in(root):
        try:
            return one, Manifest.read(one.path)
        except BadCheckpoint as error:
            problems.append(str(error))
    if problems:
        raise none_left(root, problems)
    return None


def none_left(root: Path, problems: Collection[str]) -> BadCheckpoint:
    """To be raised when no checkpoint of a folder can be loaded."""
    return BadCheckpoint(
        f"no checkpoint in {root} can be loaded: {'; '.join(problems)}; mend that, or start anew with another "
        "--checkpoint-dir"
    )


def set_aside(folder: Path) -> None:
    """Let a checkpoint that cannot be loaded no longer count as one; it goes when the job has come further.

    A job that goes on from an earlier one would otherwise keep it as its newest.
    """
    with contextlib.suppress(OSError):
        (folder / MANIFEST).rename(folder / f"{MANIFEST}.bad")


def store_name(tag: str) -> str:
    """Name of the folder that stands in for a job's control store, see `nep.checkpoint.folder_board`."""
    return f".store-{tag}"


def prune(root: Path, *, keep: int, tag: str = "") -> list[Path]:
    """Remove whole checkpoints beyond the newest `keep`, and what was never finished up to the newest step.

    Nothing else may be writing a checkpoint of these steps.

    Args:
        root: folder of the checkpoints.
        keep: how many to leave.
        tag: of this job; what others left in place of a control store is removed too.

    Returns:
        What was removed.
    """
    found = found_in(root)
    whole = [one for one in found if one.is_whole]
    if not whole:
        return []
    kept = whole[:keep]
    removed = [path for path in root.glob(store_name("*")) if path.name != store_name(tag)]
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    for one in found:
        if one in kept or (one.step > whole[0].step and not one.is_whole):
            continue
        with contextlib.suppress(OSError):
            (one.path / MANIFEST).unlink(missing_ok=True)  # first, so that half a checkpoint never looks whole
        shutil.rmtree(one.path, ignore_errors=True)
        removed.append(one.path)
    return removed


def _finished_at(path: Path) -> float:
    try:
        return (path / MANIFEST).stat().st_mtime
    except OSError:
        return 0.0
