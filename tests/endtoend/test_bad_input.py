"""Bad input ends in one line that says what to do, exit code 2, and nothing was started.

Most cases call the command line's `main` in this process, with everything that could start something forbidden.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from models.mixtral import build
from nep.fault_tolerance import supervisor
from nep.train import main as command_line

REPOSITORY = Path(__file__).parents[2]
Run = Callable[..., str]


class Started(AssertionError):
    """Something was started although the input is bad."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Run]:
    """Runs main on bad input; returns its one line on standard error."""

    def forbid(what: str) -> Callable[..., object]:
        def refuse(*_: object, **__: object) -> object:
            raise Started(what)

        return refuse

    for name in list(os.environ):
        if name.startswith(("RANK", "WORLD_SIZE", "TORCHELASTIC")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "fork", forbid("a process"))
    monkeypatch.setattr(dist, "TCPStore", forbid("a store"))
    monkeypatch.setattr(dist, "ProcessGroupGloo", forbid("a process group"))
    monkeypatch.setattr(supervisor, "supervise", forbid("a supervisor"))
    monkeypatch.setattr(command_line, "supervise", forbid("a supervisor"))
    monkeypatch.setattr(command_line, "run_alone", forbid("a trainer"))
    empty = tmp_path / "here"
    empty.mkdir()
    monkeypatch.chdir(empty)

    def act(*arguments: str, slots: int = 1) -> str:
        if slots > 1:
            launched(monkeypatch, slots)
        assert command_line.main(build, arguments) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.endswith("\n") and err.count("\n") == 1, f"one line, not: {err}"
        return err.removesuffix("\n")

    yield act
    assert not list(empty.iterdir()), "nothing was written"


def launched(monkeypatch: pytest.MonkeyPatch, slots: int, rank: int = 0) -> None:
    """As if a launcher had started this process with others."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": slots,
        "LOCAL_WORLD_SIZE": slots,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
        "TORCHELASTIC_RUN_ID": "a-test",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


# Arguments, and what the line has to name: the value, and what helps.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "counts that depend on the layout": (
        "--aux-loss-coefficient 0.1 --aux-loss-counts micro-batch",
        ["aux_loss_counts ('micro-batch')", "sequence, previous, step"],
    ),
    "counts of a step of several rounds": (
        "--aux-loss-coefficient 0.1 --aux-loss-counts step",
        ["aux_loss_counts ('step')", "--micro-batch-size 16", "--aux-loss-counts previous"],
    ),
    "biases that run away": ("--router-bias-rate inf", ["router_bias_rate (inf)"]),
    "unknown preset": ("--model mixtral-9x9b", ("'mixtral-9x9b'", "debug, debug-fine, mixtral-1b, mixtral-8x7b")),
    "more replicas than ranks": ("--replicas 2", ("replicas (2)", "there are 1", "--replicas")),
    "missing data folder": ("--data nowhere/at/all", ("nowhere/at/all", "does not exist", "--data")),
    "a failure of no slot": ("--fail 3@2", ("3@2", "slot 3 does not exist", "0 to 0")),
    "a failure in no step": ("--fail 0@61", ("0@61", "step 61", "1 to 60")),
    "a failure of no kind": ("--fail 0@2:drop", ("'drop'", "kill, stop, exit0, exception")),
    "a failure in no phase": ("--fail 0@2:kill@lunch", ("'lunch'", "forward, dispatch")),
    "a failure that cannot be read": ("--fail yes", ("'yes'", "SLOT@STEP")),
    "a plan that is not there": ("--plan nowhere.json", ("nowhere.json", "cannot be read", "nep plan --out")),
    "zero steps": ("--steps 0", ("steps (0)", "--steps")),
    "negative batch": ("--global-batch-size -4", ("global_batch_size (-4)", "--global-batch-size")),
    "auxiliary loss": ("--aux-loss-coefficient -0.01", ("aux_loss_coefficient (-0.01)", "at least 0")),
    "tensor parallelism": ("--tp 2", ("tp (2)",)),
    "nccl": ("--backend nccl", ("'nccl'", "'gloo'")),
    "momentum": ("--optimizer sgd --momentum 1", ("momentum (1.0)", "[0, 1)")),
    "sequence longer than the model's": ("--seq-len 513", ("seq_len (513)", "512", "--seq-len")),
    "a learning rate that is none": ("--lr nan", ("lr (nan)", "--lr")),
    "no time": ("--timeout-base-s 0", ("timeout_base_s (0.0)",)),
    "endless time": ("--timeout-base-s inf", ("timeout_base_s (inf)",)),
    "a seed that is none": ("--seed -1", ("seed (-1)",)),
    "slots of a dry run without one": ("--dry-run-slots 8 --replicas 4", ("dry_run_slots (8)", "--dry-run")),
    "a dry run without slots": ("--dry-run --dry-run-slots 0", ("dry_run_slots (0)",)),
    "predictions for nobody": ("--hardware H200", ("hardware (H200)", "--compensate auto", "--rebalance-every N")),
    "a dry run that is bad": ("--dry-run --dry-run-slots 3 --replicas 4", ("replicas (4)",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_exit_code_2(run: Run, case: str) -> None:
    arguments, named = CASES[case]
    line = run(*arguments.split())
    assert line.startswith("train: ")
    assert [part for part in named if part not in line] == [], line


def test_all_that_is_wrong_is_in_the_line(run: Run) -> None:
    wrong = "--steps 0 --backend nccl --lr 0 --fail 7@1 --json nowhere/a.json --replicas 9"
    line = run(*wrong.split(), slots=4)
    for named in ("steps (0)", "'nccl'", "lr (0.0)", "slot 7", "nowhere/a.json", "replicas (9)", "there are 4"):
        assert named in line


# What does nothing without another option: the option, and what it needs.
ALONE = {
    "--hardware H200": "--compensate auto or --rebalance-every N",
    "--planner-patience-s 2": "--compensate auto or --rebalance-every N",
    "--rebalance-mib 9": "--compensate auto or --rebalance-every N",
    "--power-source simulated": "--power advise or --power apply",
    "--power-budget-w 900": "--power advise or --power apply",
    "--power-failed-draw-w 0": "--power advise or --power apply",
    "--checkpoint-every 5": "--checkpoint-dir",
    "--checkpoint-keep 3": "--checkpoint-dir",
    "--state-check-every 0 --corruption-action report": "--state-check-every",
    "--health-every-s 5": "--health-check",
    "--aux-loss-counts previous": "--aux-loss-coefficient",
    "--momentum 0.5": "--optimizer sgd",
    "--router-bias-to-speed": "--router-bias-rate",
    "--power advise": "--compensate auto",
}


@pytest.mark.parametrize("alone", ALONE)
def test_an_option_that_does_nothing_by_itself_is_refused(run: Run, alone: str) -> None:
    *_, option = [word for word in alone.split() if word.startswith("--")]
    line = run(*alone.split())
    assert option[2:].replace("-", "_").removeprefix("router_") in line and ALONE[alone] in line


def test_with_what_they_need_they_are_no_mistake(run: Run) -> None:
    """The only mistake here is the number of steps."""
    together = "--hardware H200 --rebalance-mib 9 --rebalance-every 5 --optimizer sgd --momentum 0.5 --steps 0"
    line = run(*together.split(), "--checkpoint-dir", "saved", "--checkpoint-keep", "3", "--redundancy", "device")
    assert line.strip() == "train: steps (0) must be at least 1; give --steps a positive number"


def test_what_degrees_overrule_is_refused(run: Run) -> None:
    line = run("--degrees", "TP2xEP2", "--replicas", "4", "--tp", "2", slots=8)
    assert "replicas (4) is overruled by --degrees, which says 2; leave --replicas out" in line and "tp (2)" not in line


def test_the_number_of_slots_is_the_launchers(run: Run) -> None:
    assert "this job has slots 0 to 3" in run("--fail", "4@1", slots=4)


@pytest.mark.parametrize("option", ["--json", "--save-params", "--loads-out", "--run-dir"])
def test_an_output_folder_that_cannot_be_written_to(run: Run, option: str, unwritable: Path) -> None:
    line = run(option, str(unwritable / "new"))
    assert f"{option[2:].replace('-', '_')} ({unwritable / 'new'})" in line and "cannot be written to" in line


@pytest.mark.parametrize("option", ["--json", "--save-params", "--loads-out"])
def test_an_output_without_a_folder(run: Run, option: str) -> None:
    assert "the folder nowhere does not exist" in run(option, "nowhere/file")


def test_a_run_folder_that_is_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    assert "taken is no folder" in run("--run-dir", str(tmp_path / "taken"))


def test_data_that_is_too_short(run: Run, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(b"too short " * 50)
    line = run("--data", str(tmp_path / "short.txt"))
    assert "500 bytes" in line and "too short for seq_len (128)" in line and "8256 bytes" in line


@pytest.mark.parametrize("content", [None, b""])
def test_data_without_text(run: Run, tmp_path: Path, content: bytes | None) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    if content is not None:
        (folder / "empty.txt").write_bytes(content)
    line = run("--data", str(folder))
    assert str(folder) in line and "--data" in line


def test_data_is_bytes_in_any_encoding(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Text that is not UTF-8 is no bad input: a token is a byte. Nor is a file name that is none."""
    path = Path(os.fsdecode(os.fsencode(tmp_path / "caf") + b"\xe9.txt"))
    path.write_bytes("Ça déjà vu à Genève ".encode("latin-1") * 1000)
    assert command_line.main(build, ["--data", str(path), "--dry-run"]) == 0
    assert "debug" in capfd.readouterr().out
    with pytest.raises(Started, match="a trainer"):
        command_line.main(build, ["--data", str(path)])
    # It can be named in a message, too.
    path.write_bytes(b"\xe9")
    assert "1 bytes" in run("--data", str(path))


@pytest.fixture
def unwritable() -> Iterator[Path]:
    """A folder that this process cannot write to (root can, so it becomes somebody else)."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the command line has waited; it does not really."""
    waits: list[float] = []
    monkeypatch.setattr(command_line.time, "sleep", waits.append)
    return waits


@pytest.mark.parametrize("arguments", [["--steps", "many"], ["--stepz", "3"], ["--dtype", "int8"]])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_no_option_is_said_by_one_process(
    arguments: list[str],
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    slept: list[float],
) -> None:
    launched(monkeypatch, 2, rank)
    with pytest.raises(SystemExit) as caught:
        command_line.main(build, arguments)
    assert caught.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert (arguments[0] in err) if rank == 0 else err == ""
    # The launcher stops all when the first one ends: who says nothing must not be the first.
    assert bool(slept) is (rank == 1)


def test_the_other_processes_say_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], slept: list[float]
) -> None:
    launched(monkeypatch, 2, rank=1)
    assert command_line.main(build, ["--steps", "0"]) == 2
    assert capfd.readouterr() == ("", "")
    assert slept and slept[0] >= 5


def test_a_launched_job_says_it_once(tmp_path: Path) -> None:
    """Two real workers; a supervisor would have made the run folder before anything else."""
    command = [sys.executable, "-m", "nep.testing.launch", "--nproc-per-node", "2", "--timeout", "60", "--"]
    command += [str(REPOSITORY / "scripts" / "train.py"), "--replicas", "3", "--run-dir", str(tmp_path / "runs")]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("train: replicas (3)") and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "runs").exists()
