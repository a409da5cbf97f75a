"""Holds tests/golden/backend_packages.json, the signatures that the experts' backends rely on, against sources.

Examples:
    python scripts/check_backend_facts.py megablocks-0.10.0/ grouped_gemm-0.3.0/ transformer_engine-2.20.2/
    python scripts/check_backend_facts.py --write FOLDER...     # the table says what these sources say
    python scripts/check_backend_facts.py                       # the packages that are installed here

A folder is an unpacked sdist or wheel, or a checkout. Nothing of it is imported.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from nep.report.command_line import parse_options
from nep.testing.package_facts import Fact, find_source, read_facts

TABLE = Path(__file__).resolve().parent.parent / "tests" / "golden" / "backend_packages.json"
UNFIT, BAD_INPUT = 1, 2


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare the table of signatures with sources."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Sources; by default the installed packages."""
    write: bool = False
    """Rewrite the table's parameters instead of comparing them."""


def main(arguments: list[str] | None = None) -> int:
    """Compares.

    Returns:
        0 the backends' calls fit, 1 one does not, 2 bad input.
    """
    try:
        options = parse_options(
            Options, prog="check_backend_facts.py", arguments=sys.argv[1:] if arguments is None else arguments
        )
    except ValueError as error:
        print(f"check_backend_facts: {error}", file=sys.stderr)
        return BAD_INPUT
    facts = read_facts(TABLE)
    folders = list(options.folders) or installed_folders(facts.facts)
    found, unfit = [], False
    for fact in facts.facts:
        source = find_source(fact, folders)
        now = fact if source is None else fact.in_source(source)
        found.append(now)
        if source is None:
            print(f"{'not here':<20}{fact.name}")
            continue
        verdict = "the same" if now == fact else "changed, still fits" if now.takes_what_is_passed() else "DOES NOT FIT"
        unfit |= not now.takes_what_is_passed()
        print(f"{verdict:<20}{fact.name}({', '.join(now.parameters)})")
    if options.write:
        _write(found)
        return 0
    return UNFIT if unfit else 0


def installed_folders(facts: tuple[Fact, ...]) -> list[Path]:
    """Where the installed packages lie, without importing them."""
    folders = []
    for name in sorted({fact.file.split("/")[0] for fact in facts}):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folders.append(Path(spec.origin).parent.parent)
    return folders


def _write(facts: list[Fact]) -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    table["facts"] = [
        {field: value for field, value in dataclasses.asdict(fact).items() if value not in (False, ())}
        for fact in facts
    ]
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
