"""New tensors say where they are: what a slot computes with must not fall back to the CPU.

Walks the syntax trees of the packages that handle a slot's tensors. A call that makes a tensor either has `device=`, or
is moved at once (`.to(...)`), or is one of those that are named here, since its tensor belongs to the host.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("nep/distributed", "nep/moe", "nep/parallel", "models")
FACTORIES = {
    "arange", "empty", "eye", "frombuffer", "from_numpy", "full", "linspace", "ones", "rand", "randint", "randn",
    "randperm", "tensor", "zeros",
}  # fmt: skip
# File and function -> why the host is right. docs/nccl.md has the same list for people.
ON_HOST = {
    ("nep/distributed/collectives.py", "all_gather_bytes"): "a record as bytes; all_gather takes it to the device",
    ("nep/moe/backends/megablocks.py", "_sizes"): "sizes that are read by Python",
    ("nep/moe/routing_state.py", "load"): "bytes, copied to the device by copy_",
    ("nep/parallel/copies.py", "__init__"): "numpy's, used with the one below",
    ("nep/parallel/copies.py", "narrow"): "made on the host with numpy, moved before it is indexed with tokens",
    ("nep/parallel/state_hash.py", "units_of"): "numbers of units; hashes are compared on the host",
    ("nep/parallel/tensor_parallel.py", "local_rows"): "moved by who asks for it",
}


def made_without_a_device(path: Path) -> Iterator[tuple[str, int]]:
    """Function and line of each such call in a file."""
    tree = ast.parse(path.read_text(), filename=str(path))
    moved = {
        id(node.func.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to"
    }
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "torch"
                and node.func.attr in FACTORIES
                and id(node) not in moved
                and not any(keyword.arg == "device" for keyword in node.keywords)
            ):
                yield function.name, node.lineno


def test_new_tensors_say_where_they_are() -> None:
    found, used = [], set()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for function, line in made_without_a_device(path):
                if (name, function) in ON_HOST:
                    used.add((name, function))
                else:
                    found.append(f"{name}:{line} in {function}: give device=, or name it in ON_HOST with a reason")
    assert found == []
    assert used == set(ON_HOST), "some are gone"


def test_the_checker_sees_them(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "def f(x):\n"
        "    torch.zeros(3)\n"
        "    torch.zeros(3, device=x.device)\n"
        "    torch.from_numpy(x).to(d)\n"
        "    x.new_zeros(3)\n"
        "    def g():\n"
        "        return torch.arange(4)[2:]\n"
    )
    assert sorted(set(made_without_a_device(path))) == [("f", 2), ("f", 7), ("g", 7)]
