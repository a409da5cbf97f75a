"""What optional packages' sources say about the functions that backends call: read without importing them.

The packages cannot be imported where their compiled parts are missing, so tests hold the backends against a table of
signatures, and `scripts/check_backend_facts.py` holds the table against sources.
"""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY
_ANY = inspect.Parameter.POSITIONAL_OR_KEYWORD


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A function as a release defines it.

    Attributes:
        package: Key of the release in the table.
        name: Where a caller finds it, `module.name`.
        file: Path of its definition below the package's root.
        defined: The definition in that file: `function` or `Class.method`. The first parameter of a method is left out.
        applied: It is called as a torch.autograd.Function's `apply`, which takes no keywords.
        parameters: Names in order.
        optional: Those that have a default.
        passed: Those that the backends pass, in the order in which they do.
    """

    package: str
    name: str
    file: str
    defined: str
    applied: bool = False
    parameters: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()

    @property
    def signature(self) -> inspect.Signature:
        """To bind calls to; a default is shown as None."""
        kind = _POSITIONAL if self.applied else _ANY
        return inspect.Signature(
            [
                inspect.Parameter(name, kind, default=None if name in self.optional else inspect.Parameter.empty)
                for name in self.parameters
            ]
        )

    def takes_what_is_passed(self) -> bool:
        """Whether the backends' calls fit, whatever else has changed."""
        required = set(self.parameters) - set(self.optional)
        in_order = not self.applied or self.passed == self.parameters[: len(self.passed)]
        return in_order and required <= set(self.passed) <= set(self.parameters)

    def in_source(self, text: str) -> Fact:
        """The same function as another source defines it.

        Raises:
            ValueError: the source does not define it.
        """
        function = _definition(ast.parse(text), self.defined)
        if function is None:
            raise ValueError(f"{self.file} does not define {self.defined}")
        arguments = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        optional = arguments[len(arguments) - len(function.args.defaults) :]
        for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
            arguments.append(argument.arg)
            if default is not None:
                optional.append(argument.arg)
        if "." in self.defined:
            arguments = arguments[1:]
        return replace(self, parameters=tuple(arguments), optional=tuple(optional))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The table.

    Attributes:
        releases: What was read, by package: version and origin.
        facts: Of the functions.
    """

    releases: dict[str, dict[str, str]]
    facts: tuple[Fact, ...]

    def of(self, name: str) -> Fact:
        """The fact of `module.name`."""
        (fact,) = (fact for fact in self.facts if fact.name == name)
        return fact


def read_facts(path: Path) -> Facts:
    """The table of a file."""
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    facts = [
        Fact(**{key: tuple(value) if isinstance(value, list) else value for key, value in fact.items()})
        for fact in table["facts"]
    ]
    return Facts(releases=table["releases"], facts=tuple(facts))


def find_source(fact: Fact, folders: list[Path]) -> str | None:
    """The text of the file that defines it, from the first folder that has that path."""
    for folder in folders:
        path = folder / fact.file
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def _definition(module: ast.Module, dotted: str) -> ast.FunctionDef | None:
    nodes: list[ast.stmt] = module.body
    found: ast.stmt | None = None
    for name in dotted.split("."):
        found = next(
            (node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name), None
        )
        nodes = found.body if isinstance(found, ast.ClassDef) else []
    return found if isinstance(found, ast.FunctionDef) else None
