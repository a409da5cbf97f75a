"""`nep plan` as people call it: the examples of its help page, in the order in which they stand there."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nep.planning.shapes import parameter_lines, preset
from nep.planning.validation import check_plan
from nep.report.plan_command import EXAMPLES
from nep.report.readers.plan_file import read_plan


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command line that begins with `nep`."""
    words = shlex.split(command)
    assert words[0] == "nep"
    return subprocess.run(
        [sys.executable, "-m", "nep.cli", *words[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        # The checkout, for a test run where nep is not installed.
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples run, one after the other; with loads as training writes them."""
    path = tmp_path_factory.mktemp("plan")
    shape = preset("debug")
    shares = np.random.default_rng(0).dirichlet(np.ones(shape.num_experts), shape.num_layers)
    counts = np.random.default_rng(1).poisson(shares * 4096, (30, *shares.shape))
    np.savez_compressed(path / "loads.npz", counts=counts, model=np.array(shape.name), format_version=np.array(1))
    return path


@pytest.fixture(scope="module")
def ran(folder: Path) -> list[subprocess.CompletedProcess[str]]:
    return [run(command, folder) for _, command in EXAMPLES]


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_examples_of_the_help_page_run(index: int, ran: list[subprocess.CompletedProcess[str]]) -> None:
    result = ran[index]
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    for title in ("model ", "cluster ", "slots ", "step, ", "considered "):
        assert f"\n{title}" in "\n" + result.stdout


def test_the_first_plan_is_for_everybody(folder: Path, ran: list[subprocess.CompletedProcess[str]]) -> None:
    plan = read_plan(folder / "plan.json")
    check_plan(plan, parameter_lines(preset("mixtral-8x7b")))
    assert plan.slots == tuple(range(32)) and len(plan.replicas) == 2
    # Sixteen slots for eight experts, all equally busy: without loads nothing is better than half an expert each.
    assert "balance       1.0000" in ran[0].stdout


def test_the_second_goes_on_without_the_dead(folder: Path, ran: list[subprocess.CompletedProcess[str]]) -> None:
    before, after = read_plan(folder / "plan.json"), read_plan(folder / "next.json")
    check_plan(after, parameter_lines(preset("mixtral-8x7b")))
    assert after.number == before.number + 1
    assert set(after.slots) == set(before.slots) - {3, 17}
    assert after.speeds_ppm[after.slots.index(5)] == 700_000
    page = (folder / "next.html").read_text()
    assert page.startswith("<!doctype html>") and '"before":{' in page
    assert "wait for repair" in ran[1].stdout and "transfers" in ran[1].stdout


def test_the_third_says_it_as_an_object_too(folder: Path, ran: list[subprocess.CompletedProcess[str]]) -> None:
    value = json.loads(ran[2].stdout.splitlines()[-1])
    assert value["files"] == {"export": "sglang-placement.json"}
    rows = json.loads((folder / "sglang-placement.json").read_text())["physical_to_logical_map"]
    assert [len(row) for row in rows] == [12, 12]
    assert all(set(row) == set(range(8)) for row in rows)
    assert all(len(set(row[slot : slot + 3])) == 3 for row in rows for slot in range(0, 12, 3))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("nep plan", "--model is missing"),
        ("nep plan --model debug --failed 8", "failed names slots [8]; there are slots 0 to 7"),
        ("nep plan --model debug --gpus-per-node 2 --failed 0,1", ""),
        ("nep plan --model debug --memory-gib 0.001", ""),
        ("nep plan --model debug --replicas 9", ""),
        ("nep plan --model debug --current loads.npz", "loads.npz"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command: str, message: str, folder: Path) -> None:
    result = run(command, folder)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("nep: plan: ") and result.stderr.count("\n") == 1
    assert message in result.stderr


def test_equal_questions_have_equal_answers(folder: Path) -> None:
    command = "nep plan --model debug --nodes 2 --gpus-per-node 4 --loads loads.npz --failed 1 --json"
    first, second = (json.loads(run(command, folder).stdout.splitlines()[-1]) for _ in range(2))
    assert first == second
