"""Reading and writing files with errors that say which file, what is wrong and what to do."""

import json
import os
from pathlib import Path
from typing import Any


def read_text(path: Path, what: str) -> str:
    """The file's text.

    Args:
        path: where it is.
        what: what it should be, for the message: `a plan`.

    Raises:
        ValueError: it cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text ({error.reason}); give {what} in JSON") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give the path of {what}") from error


def read_json(path: Path, what: str) -> Any:
    """What the JSON file says.

    Raises:
        ValueError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(read_text(path, what))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); give {what}") from error


def write_text(path: Path, text: str) -> None:
    """Writes a file at once or not at all.

    Raises:
        ValueError: it cannot be written.
    """
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}); give a path in a folder that exists") from error


def check_version(value: Any, path: Path, *, newest: int, key: str = "schema") -> None:
    """Refuses a file whose format is newer than this version knows.

    Raises:
        ValueError: it is, or its version is no number.
    """
    version = value.get(key, newest) if isinstance(value, dict) else newest
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= newest:
        raise ValueError(
            f"{key} ({version!r}) of {path} must be 1 to {newest}, which this nep reads; use the version that wrote it"
        )
