"""The stand-in for torchrun: what it passes on, how it stops the others, and that nothing is left over."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(90)


def launch(tmp_path: Path, script: str, *options: str, arguments: tuple[str, ...] = ()) -> tuple[int, Any, str]:
    """Return the launcher's exit code, its report and the rest of its output."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    result = subprocess.run(
        [sys.executable, "-m", "nep.testing.launch", "--json", *options, "--", str(path), *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    print(result.stdout, result.stderr)
    *output, report = result.stdout.splitlines()
    return result.returncode, json.loads(report), "\n".join([*output, result.stderr])


def test_workers_see_what_torchrun_shows(tmp_path: Path) -> None:
    script = """
        import json, os, sys
        import helper  # beside the script, as with `python script.py`
        import torch.distributed as dist

        rank = os.environ["RANK"]
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
        store.set(rank, "here")
        store.wait([str(other) for other in range(4)])
        with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
            leader = os.getsid(0) == os.getpid() == os.getpgid(0)
            json.dump([dict(os.environ), sys.argv, __name__, leader], file)
        sys.exit(0)
    """
    (tmp_path / "helper.py").touch()
    options = ("--nnodes", "2", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs"))
    code, report, _ = launch(tmp_path, script, *options, arguments=(str(tmp_path), "--flag"))
    assert code == 0
    assert report["exit_codes"] == [0, 0, 0, 0]
    assert report["orphans"] == 0
    assert report["timed_out"] is False
    for rank in range(4):
        environ, argv, name, leader = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {key: environ[key] for key in ("LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {
            "LOCAL_RANK": str(rank % 2),
            "GROUP_RANK": str(rank // 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
        }
        assert environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert argv == [str(tmp_path / "script.py"), str(tmp_path), "--flag"]
        assert name == "__main__"
        assert leader
        assert (tmp_path / "logs" / f"worker{rank}.log").exists()


def test_the_first_failure_stops_the_others_and_gives_the_code(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(5)
        time.sleep(60)
    """
    code, report, _ = launch(tmp_path, script, "--nproc-per-node", "3")
    assert code == 5
    assert report["exit_codes"] == [-15, 5, -15]


def test_an_exception_is_printed(tmp_path: Path) -> None:
    code, report, output = launch(tmp_path, "raise RuntimeError('out of ink')", "--nproc-per-node", "1")
    assert (code, report["exit_codes"]) == (1, [1])
    assert "out of ink" in output


def test_workers_that_ignore_sigterm_are_killed_after_the_grace(tmp_path: Path) -> None:
    script = """
        import os, signal, sys, time
        if os.environ["RANK"] == "0":
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(sys.argv[1], "w").close()
        time.sleep(60)
    """
    options = ("--nproc-per-node", "2", "--grace", "0.5")
    code, report, _ = launch(tmp_path, script, *options, arguments=(str(tmp_path / "ignores"),))
    assert code == 128 + 9
    assert report["exit_codes"] == [-9, -9]


def test_the_time_out_kills_everything(tmp_path: Path) -> None:
    script = """
        import os, time
        os.fork()
        time.sleep(60)
    """
    code, report, output = launch(tmp_path, script, "--nproc-per-node", "2", "--timeout", "1")
    assert code == 124
    assert report["timed_out"] is True
    assert report["exit_codes"] == [-9, -9]
    assert report["orphans"] == 0  # they were of the process groups that were killed
    assert "killing ranks [0, 1]" in output


def test_orphans_are_counted_and_ended(tmp_path: Path) -> None:
    script = """
        import os, sys, time
        if os.environ["RANK"] == "0" and os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with open(sys.argv[1] + ".unfinished", "w") as file:
                    file.write(str(os.getpid()))
                os.replace(file.name, sys.argv[1])
            time.sleep(60)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
    """
    pid_file = tmp_path / "pid"
    code, report, _ = launch(tmp_path, script, "--nproc-per-node", "2", arguments=(str(pid_file),))
    assert code == 0
    assert report["orphans"] == 2
    assert not Path("/proc", pid_file.read_text()).exists()
