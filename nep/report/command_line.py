"""Options of a command as a dataclass, with bad ones refused in one line."""

import contextlib
import io
import re
from collections.abc import Sequence
from typing import TypeVar

import tyro

_Options = TypeVar("_Options")


def parse_options(options: type[_Options], *, prog: str, arguments: Sequence[str], epilog: str = "") -> _Options:
    """Reads a command's options.

    Args:
        options: a dataclass; its attributes are the options, its docstrings their help.
        prog: what the command is called on its help page.
        arguments: those after the command's name.
        epilog: what stands below the options on the help page, as it is.

    Raises:
        ValueError: an option is unknown, missing or wrong.
        SystemExit: with 0, after the help page.
    """
    wants_help = any(argument in ("-h", "--help") for argument in arguments)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(options, prog=prog, args=list(arguments), config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if not stop.code:
            if wants_help and epilog:
                print(epilog)
            raise
        raise ValueError(f"{_in_one_line(complaint.getvalue())}; see {prog} --help") from None


def _in_one_line(box: str) -> str:
    """The first paragraph of what tyro says, below a title and in a box that wraps at the terminal's width."""
    words: list[str] = []
    for row in box.splitlines()[1:]:
        text = re.sub(r"\x1b\[[0-9;]*m", "", row).strip("│ ")
        if re.search(r"\w", text):
            words.append(text)
        elif words:
            break
    text = " ".join(words)
    # The rest is the option's help.
    missing = re.match(r"Missing from [^:]*: (--[\w-]+)", text)
    return f"{missing[1]} is missing" if missing else text or "options cannot be read"
