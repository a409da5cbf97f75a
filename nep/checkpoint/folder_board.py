"""What savers use when the control store is gone: the same few keys as files in the folder of the checkpoints.

The launcher's agent hosts the store, and when it dies the job has a few seconds to write a last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path


class FolderBoard:
    """Keys and values as files; a `nep.checkpoint.board.Board`.

    Needs a file system on which a hard link is made at once or not at all, as on every local one and on NFS. Replaced
    values are kept: the value of a key is that of the last link of a chain.

    Args:
        folder: made if it does not exist; one for each job.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> str | None:
        """The value of `key`, or None."""
        path = self._last(key)
        return None if path is None else path.read_text()

    def set(self, key: str, value: str) -> None:
        """Write `key`, which nobody else writes."""
        if not self._put(self._path(key), value):
            os.replace(self._written(value), self._last(key) or self._path(key))

    def compare_and_set(self, key: str, expected: str, value: str) -> str:
        """Write `key` if it holds `expected` ("": if it is absent); what it holds now."""
        last = self._last(key)
        if last is None and not expected:
            self._put(self._path(key), value)
        elif last is not None and expected and last.read_text() == expected:
            self._put(_next(last), value)
        return self.get(key) or ""

    def exists(self, keys: str | Iterable[str]) -> bool:
        """Whether all of `keys` are present."""
        return all(self._path(key).exists() for key in ([keys] if isinstance(keys, str) else keys))

    def add(self, key: str, amount: int) -> int:
        """Add 0 or 1 to the number at `key` and return the sum."""
        folder = self._path(key).with_suffix(".count")
        folder.mkdir(exist_ok=True)
        for _ in range(amount):
            (folder / secrets.token_hex(8)).touch()
        return len(os.listdir(folder))

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "~")

    def _last(self, key: str) -> Path | None:
        path = self._path(key)
        if not path.exists():
            return None
        while _next(path).exists():
            path = _next(path)
        return path

    def _put(self, path: Path, value: str) -> bool:
        """Make a file with this content unless there is one; whether it was made."""
        written = self._written(value)
        try:
            os.link(written, path)
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(OSError):
                written.unlink()
        return True

    def _written(self, value: str) -> Path:
        path = self._folder / f".{secrets.token_hex(8)}"
        path.write_text(value)
        return path


def _next(path: Path) -> Path:
    """Where the value is that replaces the one at `path`."""
    return path.with_name(path.name + "+")
