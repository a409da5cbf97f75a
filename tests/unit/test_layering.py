"""Imports point down only: the floors of the house as a test that walks the syntax trees."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The floor of each package; an import has to go to a lower floor, stay in its package or be in SIDEWAYS.
FLOORS = {
    "scripts": 5,
    "nep.cli": 5,
    "nep.train": 4,
    "nep.report": 4,
    "nep.fault_tolerance": 3,
    "nep.parallel": 2,
    "nep.checkpoint": 2,
    "nep.distributed": 1,
    "nep.power": 1,
    "nep.planning": 0,
    "nep.moe": 0,
    "nep.simulator": 0,
}
# Stands aside and may import anything, models included.
ASIDE = "nep.testing"
# Arrows along a floor are named one by one, and each goes one way only.
SIDEWAYS = {
    ("scripts", "nep.cli"),
    ("nep.train", "nep.report"),
    ("nep.checkpoint", "nep.parallel"),
    ("nep.moe", "nep.planning"),
    ("nep.simulator", "nep.planning"),
}
# models/ is single-device code that others may copy out of the repository; only this much comes along.
FOR_MODELS = ("torch", "nep.moe", "nep.planning.shapes", "einops", "safetensors", "models")
# What a package must leave out: planner and simulator run without torch, the layer without a job.
BANNED = {
    "nep.planning": ("torch",),
    "nep.simulator": ("torch",),
    "nep.moe": ("torch.distributed",),
}


@dataclass(frozen=True)
class Import:
    """One imported name: ``module`` is the longest dotted path the statement spells out."""

    line: int
    module: str
    level: int


def _imports(path: Path) -> Iterator[Import]:
    """All imports of a file, those inside functions and `if TYPE_CHECKING` too."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, 0)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                # The name may be a module: `from nep import planning` imports nep.planning.
                yield Import(node.lineno, ".".join(filter(None, (node.module, alias.name))), node.level)


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _package(module: str) -> str | None:
    """The package of the table that a module is of."""
    return next((package for package in FLOORS if _is_in(module, package)), None)


def _module(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _why_not(module: str, imported: Import) -> str | None:
    """Why a module may not import this, or None."""
    target = imported.module
    if imported.level:
        return "is a relative import; write the whole path"
    if _is_in(module, ASIDE):
        return None
    if _is_in(module, "models"):
        allowed = target.split(".")[0] in sys.stdlib_module_names
        allowed = allowed or any(_is_in(target, package) for package in FOR_MODELS)
        return None if allowed else f"is not for models/, which may import {', '.join(FOR_MODELS)}"
    own = _package(module)
    if own is None:
        return None if module == "nep" and not _is_in(target, "nep") else "has no floor; give its importer one"
    for package, banned in BANNED.items():
        if _is_in(module, package) and any(_is_in(target, one) for one in banned):
            return f"is banned from {package}"
    if _is_in(target, ASIDE) or _is_in(target, "tests"):
        return "is for tests and scripts" if own != "scripts" else None
    if _is_in(target, "models"):
        return None if FLOORS[own] == 5 else "is above; a model is an argument"
    other = _package(target)
    if other is None or other == own or FLOORS[other] < FLOORS[own]:
        # A bare `import nep` or `from nep import __version__` brings no floor along.
        return None
    if (own, other) in SIDEWAYS:
        return None
    return f"does not point down: {own} is on floor {FLOORS[own]}, {other} on floor {FLOORS[other]}"


def violations(root: Path) -> list[str]:
    """Every import under nep/, models/ and scripts/ that breaks a rule."""
    found = []
    for folder in ("nep", "models", "scripts"):
        for path in sorted((root / folder).rglob("*.py")):
            module = _module(path, root)
            for imported in _imports(path):
                reason = _why_not(module, imported)
                if reason:
                    where = path.relative_to(root).as_posix()
                    found.append(f"{where}:{imported.line} {'.' * imported.level}{imported.module} {reason}")
    return found


def test_imports_point_down() -> None:
    assert violations(ROOT) == []


def test_every_package_has_a_floor() -> None:
    packages = {_module(path, ROOT) for path in (ROOT / "nep").glob("*/__init__.py")}
    assert packages, "the tests look at the wrong folder"
    assert packages <= {*FLOORS, ASIDE}


BAD = {
    "nep/planning/a.py": ("import torch", "is banned from nep.planning"),
    "nep/planning/b.py": ("from nep.moe import router", "does not point down"),
    "nep/simulator/a.py": ("from torch import nn", "is banned from nep.simulator"),
    "nep/moe/a.py": ("import torch.distributed as dist", "is banned from nep.moe"),
    "nep/moe/b.py": ("from torch import distributed", "is banned from nep.moe"),
    "nep/distributed/a.py": (
        "def late():\n    from nep.parallel.transfer import launch",
        "does not point down",
    ),
    "nep/distributed/b.py": ("from nep import power", "does not point down"),
    "nep/parallel/a.py": ("import nep.checkpoint.storage", "does not point down"),
    "nep/parallel/d.py": ("from nep.fault_tolerance import vote", "does not point down"),
    "nep/parallel/b.py": ("from .transfer import launch", "is a relative import"),
    "nep/parallel/c.py": ("from nep.testing import reference", "is for tests and scripts"),
    "nep/fault_tolerance/a.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nep.train import trainer",
        "does not point down",
    ),
    "nep/train/b.py": ("from models.mixtral import MixtralModel", "is above"),
    "nep/report/a.py": ("import nep.cli", "does not point down"),
    "nep/report/b.py": ("from nep.train import config", "does not point down"),
    "nep/new/a.py": ("import json", "has no floor"),
    "models/a.py": ("from nep.planning.layout import Line", "is not for models/"),
    "models/b.py": ("import numpy", "is not for models/"),
    "models/c.py": ("from nep import parallel", "is not for models/"),
    "models/d.py": ("from . import mixtral", "is a relative import"),
    "scripts/a.py": ("from .train import main", "is a relative import"),
}
GOOD = {
    "nep/__init__.py": '__version__ = "0"',
    "nep/planning/a.py": "import json\nimport numpy as np\nfrom nep.planning.layout import Line",
    "nep/moe/a.py": "import torch\nfrom nep.planning.shapes import ModelShape",
    "nep/simulator/a.py": "from nep.planning.planner import plan_from_scratch",
    "nep/parallel/a.py": "from nep.distributed.groups import Groups\nfrom nep.planning.plan import Plan",
    "nep/train/a.py": "import nep\nfrom nep import __version__\nfrom nep.report import summary",
    "nep/cli.py": "from nep.train.trainer import Trainer\nfrom models.mixtral import MixtralModel",
    "nep/testing/a.py": "from nep.train.trainer import Trainer\nfrom models import mixtral",
    "models/a.py": "import math, torch.nn\nfrom nep.planning.shapes import preset\nfrom nep.moe import layer",
    "scripts/a.py": "from models.mixtral import MixtralModel\nfrom nep.testing import launch\nimport nep.cli",
}


def _write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


@pytest.mark.parametrize("path", BAD)
def test_the_checker_catches(path: str, tmp_path: Path) -> None:
    for good, text in GOOD.items():
        _write(tmp_path, good, text)
    text, reason = BAD[path]
    _write(tmp_path, path, text)
    found = violations(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(f"{path}:{len(text.splitlines())} ")
    assert reason in found[0]


def test_the_checker_accepts_what_points_down(tmp_path: Path) -> None:
    for path, text in GOOD.items():
        _write(tmp_path, path, text)
    assert violations(tmp_path) == []
