"""Which backend runs: what `auto` takes and why, what is refused, and what a missing package says."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from nep.moe.backends import AUTO, BACKENDS, choose_backend, get_backend, megablocks, transformer_engine
from nep.moe.backends.packages import Package, _numbers
from tests.unit.moe.fake_packages import FACTS

ROOT = Path(__file__).parents[3]
PACKAGES = {"megablocks": megablocks.PACKAGE, "transformer_engine": transformer_engine.PACKAGE}
RELEASES = {
    "megablocks": "0.10.0",
    "grouped_gemm": "0.3.0",
    "stanford-stk": "0.7.1",
    "transformer_engine": "2.20.2",
    "transformer_engine_torch": "2.20.2+cu13torch2.13",
}


class Installed:
    """Pretends that distributions and compiled modules are there; the fields may be changed."""

    def __init__(self) -> None:
        self.releases: dict[str, str] = {}
        self.missing_modules: set[str] = set()

    def version(self, name: str) -> str:
        if name not in self.releases:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.releases[name]

    def find_spec(self, name: str) -> object:
        return None if name in self.missing_modules else SimpleNamespace()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Nothing, at first."""
    world = Installed()
    monkeypatch.setattr(importlib.metadata, "version", world.version)
    monkeypatch.setattr(importlib.util, "find_spec", world.find_spec)
    return world


def choose(name: str, dtype: torch.dtype = torch.bfloat16, **changes: object) -> tuple[str, str]:
    return choose_backend(name, dtype, **{"hidden_size": 64, "neuron_block": 32, "device": "cuda", **changes})


def test_auto_takes_the_first_that_can_run_and_says_what_it_passed_over(installed: Installed) -> None:
    assert choose("auto") == ("grouped_mm", BACKENDS["grouped_mm"].why)
    odd = {"hidden_size": 62}  # not a multiple of 16 bytes
    name, why = choose("auto", **odd)
    assert name == "loop"
    assert re.search(r"not grouped_mm: hidden_size \(62\).*not megablocks: megablocks is not installed", why)
    installed.releases = dict(RELEASES)
    name, why = choose("auto", **odd)
    assert name == "megablocks" and "not grouped_mm: hidden_size (62)" in why
    assert choose("auto")[0] == "grouped_mm", "what comes with torch first, whatever else is installed"
    name, why = choose("auto", torch.float64)
    assert name == "loop" and "not transformer_engine: this backend multiplies bfloat16, not torch.float64" in why


def test_auto_on_a_cpu_needs_no_package(installed: Installed) -> None:
    installed.releases = dict(RELEASES)
    assert choose("auto", torch.float32, device="cpu")[0] == "grouped_mm"
    name, why = choose("auto", torch.float64, device="cpu")
    assert name == "loop" and "megablocks runs on CUDA, not cpu" in why


def test_auto_never_changes_the_numbers() -> None:
    assert not [name for name in AUTO if "fp8" in name]
    assert AUTO[-1] == "loop"
    assert set(AUTO) | {"transformer_engine_fp8"} == set(BACKENDS)


@pytest.mark.parametrize("name", ["megablocks", "transformer_engine", "transformer_engine_fp8"])
def test_every_way_a_package_can_be_wrong_gives_the_line_that_installs_it(name: str, installed: Installed) -> None:
    package = PACKAGES[name.removesuffix("_fp8")]
    for distribution, (_, below) in package.releases.items():
        installed.releases = {key: value for key, value in RELEASES.items() if key != distribution}
        with pytest.raises(ValueError, match=f"{distribution} is not installed") as missing:
            choose(name)
        installed.releases = RELEASES | {distribution: below}
        with pytest.raises(ValueError, match=f"{distribution} {re.escape(below)} is not supported") as other:
            choose(name)
        assert str(missing.value).endswith(f": {package.install}"), "to be copied"
        assert str(other.value).endswith(f": {package.install}")
    installed.releases = dict(RELEASES)
    for module in package.compiled:
        installed.missing_modules = {module}
        with pytest.raises(ValueError, match=f"compiled module {module} is missing") as uncompiled:
            choose(name)
        assert package.install in str(uncompiled.value)
    installed.missing_modules = set()
    assert choose(name) == (name, "as asked")


@pytest.mark.parametrize("name", ["megablocks", "transformer_engine", "transformer_engine_fp8"])
def test_a_package_built_for_another_torch_gives_the_line_when_the_model_is_built(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = PACKAGES[name.removesuffix("_fp8")]

    def fail(module: str) -> ModuleType:
        raise ImportError(f"{module}: undefined symbol: _ZN3c10")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ValueError, match="undefined symbol") as broken:
        get_backend(name)
    assert package.install in str(broken.value)


def test_asking_imports_nothing(installed: Installed) -> None:
    """The processes that check options fork trainers, and CUDA does not survive a fork."""
    installed.releases = dict(RELEASES)
    for name in BACKENDS:
        choose(name)
    assert not {"megablocks", "grouped_gemm", "transformer_engine"} & set(sys.modules)


def test_sizes_that_fp8_cannot_tile_are_refused(installed: Installed) -> None:
    installed.releases = dict(RELEASES)
    with pytest.raises(ValueError, match=r"neuron_block \(16\) is not a multiple of 32.*use 'loop' or 'auto'"):
        choose("transformer_engine_fp8", neuron_block=16)
    assert choose("transformer_engine", neuron_block=16)[0] == "transformer_engine"
    with pytest.raises(ValueError, match="multiplies bfloat16"):
        choose("transformer_engine_fp8", torch.float32)


def fake_modules(monkeypatch: pytest.MonkeyPatch, mxfp8: bool, fp8: bool) -> dict[str, ModuleType]:
    names = ("megablocks.ops", "grouped_gemm.backend", "transformer_engine.pytorch", "transformer_engine.common.recipe")
    modules = {name: ModuleType(name) for name in (*names, "transformer_engine.pytorch.cpp_extensions")}
    for attribute in ("sort", "histogram", "inclusive_cumsum", "gather", "scatter"):
        setattr(modules["megablocks.ops"], attribute, attribute)
    modules["grouped_gemm.backend"].gmm = "gmm"
    engine = modules["transformer_engine.pytorch"]
    engine.GroupedLinear, engine.autocast = "GroupedLinear", "autocast"
    engine.is_mxfp8_available, engine.is_fp8_available = lambda: mxfp8, lambda: fp8
    modules["transformer_engine.pytorch.cpp_extensions"].general_grouped_gemm = "gemm"
    recipes = modules["transformer_engine.common.recipe"]
    recipes.MXFP8BlockScaling, recipes.Float8CurrentScaling = lambda: "mxfp8", lambda: "current"
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def test_loading_finds_each_function_where_the_packages_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_modules(monkeypatch, mxfp8=True, fp8=True)
    kernels = megablocks.load()
    assert kernels == ("sort", "histogram", "inclusive_cumsum", "gather", "scatter", "gmm")
    assert kernels._fields == kernels
    assert transformer_engine.load_gemm() == "gemm"
    for name in PACKAGES:
        assert get_backend(name) is BACKENDS[name].run


@pytest.mark.parametrize(("mxfp8", "fp8", "recipe"), [(True, True, "mxfp8"), (False, True, "current")])
def test_the_recipe_is_the_gpus(mxfp8: bool, fp8: bool, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_modules(monkeypatch, mxfp8=mxfp8, fp8=fp8)
    assert transformer_engine.load_fp8() == ("GroupedLinear", "autocast", recipe)


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_modules(monkeypatch, mxfp8=False, fp8=False)
    with pytest.raises(ValueError, match="this GPU has no FP8; use 'transformer_engine'"):
        get_backend("transformer_engine_fp8")


def test_tensors_that_a_backend_cannot_take_are_refused() -> None:
    rows, ids = torch.zeros(2, 64), torch.zeros(2, 1, dtype=torch.int64)
    w13, w2 = torch.zeros(1, 2, 32, 64), torch.zeros(1, 32, 64)
    for name in ("megablocks", "transformer_engine", "transformer_engine_fp8"):
        with pytest.raises(ValueError, match="runs on CUDA, not cpu"):
            BACKENDS[name].run(rows, ids, torch.ones(2, 1), w13, w2, slices=(), num_experts=1)


def test_releases_are_compared_by_their_numbers() -> None:
    assert _numbers("2.20.2+cu13torch2.13") == (2, 20, 2)
    assert _numbers("0.9.0") < _numbers("0.10") < _numbers("0.10.0rc1") < _numbers("0.11")
    assert Package(releases={}, compiled=(), needs="", install="").problem() is None


def test_extras_pin_what_the_backends_take() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    engine = transformer_engine.PACKAGE.releases["transformer_engine"]
    assert project["optional-dependencies"]["te"] == [f"transformer_engine>={engine[0]},<{engine[1]}"]
    (stk,) = project["optional-dependencies"]["megablocks"]
    assert stk in megablocks.PACKAGE.install.split()
    for package in PACKAGES.values():
        for name, release in re.findall(r"([\w-]+)(?:\[\w+\])?==([\d.]+)", package.install):
            lowest, below = package.releases[name]
            assert _numbers(lowest) <= _numbers(release) < _numbers(below)


def test_the_table_is_of_the_releases_that_the_install_lines_name() -> None:
    lines = " ".join(package.install for package in PACKAGES.values())
    for name, release in FACTS.releases.items():
        assert re.search(rf"\b{name}(\[\w+\])?=={re.escape(release['release'])}\b", lines)
