"""`nep power` on simulated boards and on a fake NVML: what it shows, plans, sets and refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nep import cli
from nep.fault_tolerance import running_job
from nep.fault_tolerance.running_job import SlotStatus
from nep.planning.cluster import Cluster
from nep.planning.planner import plan_after_failure, plan_from_scratch
from nep.planning.power import PPM
from nep.planning.shapes import parameter_lines, preset
from nep.power.simulated_file import create_file, open_file
from nep.report.power_command import EXAMPLES
from nep.report.readers.curve_file import read_curve
from tests.unit.power.fake_pynvml import ERRORS, FakeBoard, FakePynvml

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> int:
    return cli.main(["power", *arguments])


def last_object(text: str) -> dict[str, Any]:
    return json.loads(text.splitlines()[-1])


@pytest.fixture
def boards(tmp_path: Path) -> Path:
    path = tmp_path / "boards.json"
    create_file(path, [{} for _ in range(8)])
    return path


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """Two replicas on two nodes of eight; slot 3 has failed and the batch is as before."""
    lines = parameter_lines(preset("debug"))
    cluster = Cluster.uniform(16, 8)
    healthy = plan_from_scratch(cluster, lines, num_replicas=2, global_batch_size=112)
    path = tmp_path / "plan.json"
    path.write_text(plan_after_failure(healthy, cluster.fail([3]), lines).canonical_json())
    return path


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--simulate", "2", "--json") == 0
    out = capsys.readouterr().out
    assert " ".join(out.splitlines()[0].split()) == "slot board limit default range W draw temp MHz slowed by"
    assert "GPU 1 (simulated b200-sxm)    700      700  200-1000   700    62" in out
    value = last_object(out)
    assert value["schema"] == 1
    assert value["boards"][1]["slot"] == 1 and value["boards"][1]["throttles"] == ["power_limit"]


def test_watching_shows_what_happens_in_between(boards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(boards.read_text())
    value["boards"][0] |= {"xids": [79]}
    value["boards"][1] |= {"lost": True}
    boards.write_text(json.dumps(value))
    arguments = ("--simulate", str(boards), "--boards", "0,1", "--first-slot", "8", "--watch", "--rounds", "2")
    assert run(*arguments, "--interval-s", "0.01", "--json") == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert [signal["value"] for signal in first["boards"][0]["signals"]] == [79]
    assert second["boards"][0]["signals"] == []
    for one in (first, second):
        assert one["boards"][1]["slot"] == 9 and one["boards"][1]["signals"][0]["kind"] == "lost"


def test_a_plan_of_watts_for_a_plan(boards: Path, plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--simulate", str(boards), "--plan", str(plan), "--budget-w", "6370", "--json") == 0
    out = capsys.readouterr().out
    value = last_object(out)
    needed = {slot["slot"]: slot["needed_ppm"] for slot in value["watts"]["slots"]}
    # 56 sequences each over 7 and over 8 slots, or what the plan made of them: together the work of 16.
    assert 3 not in needed and len(needed) == 15
    assert sum(needed.values()) == pytest.approx(16 * PPM, abs=16)
    limits = {slot["slot"]: slot["limit_w"] for slot in value["watts"]["slots"]}
    assert max(limits.values()) <= 1000 and sum(limits[slot] for slot in range(8) if slot != 3) <= 6370
    assert value["watts"]["nodes"][0]["budget_w"] == 6370
    # Only this machine's boards can be set here.
    commands = [f"sudo nvidia-smi -i {slot} -pl {limits[slot]}" for slot in range(8) if limits.get(slot, 700) != 700]
    assert value["commands"] == commands and commands
    for command in commands:
        assert command in out
    assert "boards of other nodes are taken to be like b200-sxm" in out
    # Nothing was changed.
    assert [device.limit_w() for device in open_file(boards)] == [700] * 8


def test_a_node_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--simulate", "8", "--failed", "3", "--json") == 0
    watts = last_object(capsys.readouterr().out)["watts"]
    # Eight default limits less what the dead board may draw, over seven boards.
    assert watts["nodes"][0]["budget_w"] == 8 * 700 - 100
    assert watts["nodes"][0]["bound"] == "domain budget" and 900_000 < watts["pace_ppm"] < PPM
    assert {slot["limit_w"] for slot in watts["slots"]} <= {785, 786}


def test_a_limit_that_somebody_has_chosen_is_where_a_plan_starts(
    boards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for device in open_file(boards):
        device.set_limit_w(600)
    assert run("--simulate", str(boards), "--failed", "3", "--json") == 0
    watts = last_object(capsys.readouterr().out)["watts"]
    assert watts["nodes"][0]["budget_w"] == 8 * 600 - 100
    assert {slot["default_w"] for slot in watts["slots"]} == {600}
    assert {slot["limit_w"] for slot in watts["slots"]} <= {671, 672}
    # Nothing is damaged: nothing is touched.
    assert run("--simulate", str(boards), "--failed", "8") == 0
    assert "nothing to set on this machine" in capsys.readouterr().out


def test_a_slow_slot_of_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({"nodes": 1, "gpus_per_node": 4, "slow": {"2": 0.95}}))
    assert run("--simulate", "4", "--cluster", str(cluster), "--budget-w", "2900", "--json") == 0
    watts = last_object(capsys.readouterr().out)["watts"]
    limits = [slot["limit_w"] for slot in watts["slots"]]
    assert limits[0] == limits[1] == limits[3] == 700 < limits[2] and watts["keeps_pace"]
    assert watts["slots"][2]["speed_ppm"] >= PPM


def test_a_running_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What the control store says of its slots decides who is failed."""

    class Job:
        def __init__(self, address: object) -> None:
            assert address == "the address"
            self.address = SimpleNamespace(num_slots=16)

        def slots(self) -> list[SlotStatus]:
            states = {3: "down", 9: "drained", 4: "leaving"}
            return [SlotStatus(slot=slot, state=states.get(slot, "training")) for slot in range(16)]

    monkeypatch.setattr(running_job, "RunningJob", Job)
    monkeypatch.setattr(running_job, "find_job", lambda name: {"runs/1/job.json": "the address"}[name])
    assert run("--simulate", "8", "--job", "runs/1/job.json", "--json") == 0
    watts = last_object(capsys.readouterr().out)["watts"]
    assert [slot["slot"] for slot in watts["slots"]] == [slot for slot in range(16) if slot not in (3, 9)]
    assert {slot["needed_ppm"] for slot in watts["slots"]} == {-(-8 * PPM // 7)}


def test_limits_are_set_held_and_put_back(boards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--simulate", str(boards), "--failed", "3", "--apply", "--hold-s", "0", "--json")
    assert run(*arguments, "--dry-run") == 0
    assert last_object(capsys.readouterr().out)["set_w"] == {}
    assert run(*arguments) == 0
    out = capsys.readouterr().out
    assert "slot 0: limit is 785 W" in out and "limits are as they were" in out
    assert set(last_object(out)["set_w"]) == {str(slot) for slot in range(8) if slot != 3}
    assert [device.limit_w() for device in open_file(boards)] == [700] * 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_puts_limits_back(boards: Path, number: signal.Signals) -> None:
    arguments = ["--simulate", str(boards), "--failed", "3", "--apply"]
    process = subprocess.Popen(
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        args=[sys.executable, "-u", "-m", "nep.cli", "power", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("held until"):
            break
    assert open_file(boards)[0].limit_w() == 785
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert ("limits are as they were" in rest) == (number != signal.SIGKILL)
    assert process.returncode == (-number if number == signal.SIGKILL else 0)
    for _ in range(200):
        if {device.limit_w() for device in open_file(boards)} == {700}:
            break
        time.sleep(0.1)
    assert [device.limit_w() for device in open_file(boards)] == [700] * 8


def test_without_permission_it_says_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "boards.json"
    create_file(path, [{"permitted": False}, {"permitted": False}, {"permitted": False}])
    assert run("--simulate", str(path), "--failed", "0", "--apply", "--json") == 1
    out = capsys.readouterr().out
    value = last_object(out)
    assert [one["kind"] for one in value["refused"]] == ["permission", "permission"] and value["set_w"] == {}
    assert re.search(r"administrator would type\n  sudo nvidia-smi -i 1 -pl \d+\n  sudo nvidia-smi -i 2 -pl \d+\n", out)
    assert "held" not in out


def test_nvml(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakePynvml([FakeBoard("GPU-aa"), FakeBoard("GPU-bb")])
    fake.boards[1].fails["nvmlDeviceGetPowerManagementLimit"] = ERRORS["GPU_IS_LOST"]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert run() == 0
    out = capsys.readouterr().out
    assert "GPU 0 (NVIDIA H100 80GB HBM3)    700      700  200-700   612    61  1755  power limit" in out
    assert "slot 1: fatal: GPU 1 (NVIDIA H100 80GB HBM3): reading its power limit failed: the GPU has fallen off" in out
    assert fake.users == 0
    # The default is the highest: there is nothing to raise, and it says so.
    assert run("--failed", "5") == 0
    out = capsys.readouterr().out
    assert "slots 1 do not answer and count as failed" in out
    assert "the highest limit of a board binds" in out and "nothing to set on this machine" in out


def test_a_machine_without_boards(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakePynvml([], start_fails=ERRORS["LIBRARY_NOT_FOUND"]))
    assert run() == 1
    error = capsys.readouterr().err
    assert error.startswith("nep: power: this machine: starting NVML failed: libnvidia-ml.so.1 is not there; ")
    monkeypatch.setitem(sys.modules, "pynvml", FakePynvml([]))
    assert run() == 2
    assert "no boards; on a machine without GPUs say --simulate 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--apply"], "--apply needs --plan, --cluster, --job or --failed"),
        (["--simulate", "2", "--job", "no/such"], "is no file; name the job.json"),
        (["--hold-s", "3"], "--hold-s needs --apply"),
        (["--rounds", "3"], "--rounds needs --watch"),
        (["--watch", "--apply", "--failed", "1"], "do not go together"),
        (["--simulate", "2", "--boards", "0,2"], "must be 0 to 1"),
        (["--simulate", "0"], "count (0) must be at least 1"),
        (["--simulate", "2", "--failed", "0,1"], "no slot is healthy"),
        (["--simulate", "2", "--failed", "1", "--curve", "none.csv"], "none.csv cannot be read"),
        (["--simulate", "2", "--failed", "1", "--budget-w", "300"], "must be at least 400 W"),
        (["--simulate", "none.json"], "cannot be read"),
        (["--watt"], "see nep power --help"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("nep: power: ") and error.count("\n") == 1 and why in error


def test_a_plan_of_another_job_is_refused(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--simulate", "8", "--plan", str(plan), "--failed", "5") == 2
    assert "slots [5] of the plan are failed; plan again without them" in capsys.readouterr().err


def test_curves_from_files(tmp_path: Path, data_dir: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text("limit_w,speed\n400,0.6\n500,0.8\n700,1.0\n")
    assert read_curve(path).speed(600) == pytest.approx(0.9)
    path.write_text('{"knots": [[400, 0.6], [700, 1.0]], "source": "mine"}')
    assert read_curve(path).source == "mine"
    one = read_curve(data_dir / "zeus_power" / "A40+bert-base-uncased+gpu0.csv")
    assert one.speed(150) / one.speed(300) == pytest.approx(0.607, abs=0.03)
    with pytest.raises(ValueError, match=r"times of \d+ jobs do not compare"):
        read_curve(data_dir / "zeus_power" / "summary_power_v100.csv")


def test_curve_files_of_another_form(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    for text, why in (
        ("a,b\n1,2\n", "say nothing about power and speed"),
        ("", "say nothing about power and speed"),
        ("limit_w,speed\n400,x\n500,2\n", "could not convert"),
        ('{"points": []}', "'knots' is missing"),
        ('{"knots": [[1, 2], [2, 1]]}', "must rise"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=why):
            read_curve(path)


def test_the_help_page_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    out = capsys.readouterr().out
    assert all(command in out for _, command in EXAMPLES)
    assert os.linesep.join(["examples:"]) in out
