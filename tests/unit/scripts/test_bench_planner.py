"""The benchmark of planners as a command: output, and what it refuses."""

import dataclasses
import json
from pathlib import Path

import pytest

import scripts.bench_planner as bench
from nep.testing.planner_bench.cases import Case, synthetic_cases


def small(case: Case) -> Case:
    """Three windows of two layers."""
    shape = dataclasses.replace(case.shape, num_layers=2)
    return dataclasses.replace(case, shape=shape, windows=case.windows[:3, :2])


def test_one_object_keyed_by_case_and_planner_is_the_last_line(monkeypatch, capsys, tmp_path: Path) -> None:
    cases = [small(case) for case in synthetic_cases() if "hot" in case.name or "61" in case.name]
    monkeypatch.setattr(bench, "synthetic_cases", lambda: iter(cases))
    (tmp_path / "eplb.py").write_text(
        "import torch\n"
        "def rebalance_experts(weight, physical, groups, nodes, gpus):\n"
        "    return (torch.arange(physical) % weight.shape[1]).repeat(weight.shape[0], 1), None, None\n"
    )
    assert bench.main(["--repeats", "1", "--eplb", str(tmp_path), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    value = json.loads(lines[-1])
    assert set(value) == {case.name for case in cases}
    prime = value["synthetic/61-experts-13-slots"]
    assert {"none", "nep whole", "nep cuts", "nep copies", "EPLB global"} <= set(prime)
    assert prime["nep cuts"]["planned"] > prime["none"]["planned"]
    assert prime["EPLB hierarchical"] == "13 slots are no multiple of 2 nodes"
    assert "EPLB hierarchical: 13 slots are no multiple of 2 nodes" in lines
    assert "cores, load" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing like it"], "no case has 'nothing like it' in its name"),
        (["--repeats", "0"], "at least 1"),
        (["--windows", "2"], "windows (2) must be at least 3"),
        (["--hardware", "V100"], "hardware (V100)"),
        (["--data", "none"], "none has neither"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, capsys) -> None:
    assert bench.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
