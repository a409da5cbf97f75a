"""Options of commands: wrong ones become one sentence, help stays help."""

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
import tyro

from nep.report.command_line import parse_options


@dataclass(frozen=True, kw_only=True)
class Options:
    """A command of the tests."""

    name: Annotated[str, tyro.conf.arg(metavar="NAME")]
    """What it is called, which is a help text that is long enough to be wrapped by the box around it."""
    number: int = 3
    """How many."""
    kind: Literal["a", "b"] = "a"
    """Which."""
    loud: bool = False
    """Whether."""


def parse(*arguments: str) -> Options:
    return parse_options(Options, prog="nep test", arguments=arguments, epilog="examples:\n  nep test --name x")


def test_options_are_read() -> None:
    assert parse("--name", "x", "--number", "4", "--loud") == Options(name="x", number=4, loud=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "^--name is missing; see nep test --help$"),
        (("--name", "x", "--nmae", "y"), r"^Unrecognized options: --nmae, y; see nep test --help$"),
        (("--name", "x", "--number", "many"), r"--number.*'many'.*; see nep test --help$"),
        (("--name", "x", "--kind", "c"), r"invalid choice 'c' for argument '--kind'"),
        (("--name",), r"Missing value for argument '--name'"),
        (("--name", "x", "--no-loud"), r"--no-loud"),
        (("--name", "x", "y"), r"Unrecognized options: y"),
    ],
)
@pytest.mark.parametrize("columns", ["40", "200"])
def test_wrong_ones_are_one_sentence(
    arguments: tuple[str, ...], message: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(ValueError, match=message) as caught:
        parse(*arguments)
    assert "\n" not in str(caught.value)
    assert "│" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_ends_with_the_examples(flag: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(flag)
    assert not stop.value.code
    page = capsys.readouterr().out
    assert "--number" in page and "A command of the tests." in page
    assert page.endswith("examples:\n  nep test --name x\n")
