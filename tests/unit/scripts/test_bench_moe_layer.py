"""The layer benchmark runs on a CPU, compares results before it times them, and says what it measured on."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("bench_moe_layer", ROOT / "scripts" / "bench_moe_layer.py")
bench = importlib.util.module_from_spec(_spec)
sys.modules["bench_moe_layer"] = bench  # its dataclasses look their module up
_spec.loader.exec_module(bench)

QUICK = ["--tokens", "24", "--repeats", "1", "--warm-up", "0", "--device", "cpu"]


def test_all_candidates_of_all_cases_are_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*QUICK, "--json"]) == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(values["cases"]) == {
        f"{shape}/{holding}" for shape in ("mixtral", "fine-grained") for holding in ("whole", "uneven")
    }
    for case in values["cases"].values():
        names = {"plain loop", "loop", "grouped_mm"}
        assert set(case["ms"]) == set(case["processor_ms"]) == set(case["speedup"]) == names
        assert case["speedup"]["plain loop"] == 1
        assert all(error < 1e-5 for error in case["error"].values())
    assert set(values["not_run"]) == {"megablocks", "transformer_engine", "transformer_engine_fp8"}
    assert values["dtype"] == "float32" and values["machine"]["torch"] == torch.__version__


def test_a_backend_that_computes_something_else_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = bench.BACKENDS["loop"]

    def wrong(*arguments: torch.Tensor, **keywords: object) -> torch.Tensor:
        return loop.run(*arguments, **keywords) * 1.001

    monkeypatch.setitem(bench.BACKENDS, "grouped_mm", dataclasses.replace(loop, run=wrong))
    assert bench.main([*QUICK, "--backends", "grouped_mm", "--shapes", "fine-grained"]) == 2
    assert "grouped_mm differs from the plain loop by 0.001" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--shapes", "huge"], "huge is not known; choose from mixtral, fine-grained"),
        (["--holdings", "half"], "half is not known; choose from whole, uneven"),
        (["--backends", "megablocks"], "megablocks runs on CUDA, not cpu"),
        (["--backends", "fast"], "choose one of auto"),
        (["--repeats", "0"], "repeats must be at least 1"),
    ],
)
def test_bad_input_ends_in_one_line(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*QUICK, *arguments]) == 2
    assert complaint in capsys.readouterr().err
