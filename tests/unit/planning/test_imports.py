"""The planning floor runs where there is no torch, and takes values only: no files, no network."""

import ast
import subprocess
import sys
from pathlib import Path

import nep.planning

FOLDER = Path(nep.planning.__file__).parent
MODULES = sorted(
    ".".join(("nep", "planning", *path.relative_to(FOLDER).with_suffix("").parts))
    for path in FOLDER.rglob("*.py")
    if path.stem != "__init__"
)
IO_MODULES = {"io", "os", "pathlib", "shutil", "socket", "subprocess", "tempfile", "urllib"}


def test_planning_leaves_torch_out() -> None:
    assert {"nep.planning.layout", "nep.planning.planner", "nep.planning.shapes"} <= set(MODULES)
    program = f"import sys, {', '.join(MODULES)}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=FOLDER.parents[1], check=False)
    assert done.returncode == 0


def test_planning_reads_and_writes_nothing() -> None:
    found = []
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = ["io"] if node.func.id in ("open", "print", "input") else []
            else:
                continue
            found += [f"{path.name}:{node.lineno} {name}" for name in names if name.split(".")[0] in IO_MODULES]
    assert found == []
