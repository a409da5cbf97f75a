"""Limits are put back by another process when their controller is gone, whatever ended it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nep.power import restorer
from nep.power.controller import PowerController
from nep.power.restorer import Guard, Held
from nep.power.simulated_file import create_file, open_file
from nep.power.source import DeviceSource

ROOT = Path(__file__).parents[3]
STARTED: list[subprocess.Popen[str]] = []
# Sets limits, says so with the restoring process's number, and stays; or leaves as its last argument says.
HOLDER = """
import sys, time, os, signal
sys.path.insert(0, {root!r})
from nep.power.controller import PowerController
from nep.power.simulated_file import open_file
from nep.power.source import DeviceSource
from pathlib import Path
path = {path!r}
controller = PowerController(dict(enumerate(open_file(Path(path)))), source=DeviceSource(kind="simulated", path=path))
assert controller.set_limits({{0: 900, 1: 500}}).complete
if {fork}:
    if os.fork() == 0:
        time.sleep(300)  # a child that has the pipe's end as well
        os._exit(0)
print(controller.guard_pid, flush=True)
{end}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "boards.json"
    create_file(path, [{}, {"limit_w": 650}, {}])
    return path


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Also where a test fails, no process outlives it."""
    yield
    for process in STARTED:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    STARTED.clear()


def limits(path: Path) -> list[float]:
    return [device.limit_w() for device in open_file(path)]


def start(path: Path, end: str, *, fork: bool = False) -> tuple[subprocess.Popen[str], int]:
    """A process with a controller, when its limits are set, and the number of its restoring process."""
    program = HOLDER.format(root=str(ROOT), path=str(path), end=end, fork=fork)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    STARTED.append(process)
    assert process.stdout is not None
    guard = int(process.stdout.readline())
    return process, guard


def wait_for_end(pid: int, seconds: float = 60.0) -> None:
    """Until the restoring process, which is not our child, is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], seconds)[0], "the restoring process did not end"
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_controller(path: Path, number: signal.Signals) -> None:
    process, guard = start(path, "time.sleep(300)")
    assert limits(path) == [900, 500, 700]
    process.send_signal(number)
    assert process.wait(timeout=60) == -number
    wait_for_end(guard)
    assert limits(path) == [700, 650, 700]
    assert process.stderr is not None and process.stdout is not None
    assert f"nep: process {process.pid} is gone; its power limits were put back" in process.stderr.read()


def test_the_whole_group_is_killed(path: Path) -> None:
    """Launchers signal process groups: the restoring process is in none of theirs."""
    process, guard = start(path, "time.sleep(300)")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    wait_for_end(guard)
    assert limits(path) == [700, 650, 700]


def test_a_child_that_lives_on_does_not_hold_it_up(path: Path) -> None:
    process, guard = start(path, "time.sleep(300)", fork=True)
    process.kill()
    process.wait(timeout=60)
    wait_for_end(guard)
    assert limits(path) == [700, 650, 700]


@pytest.mark.parametrize("end", ["controller.restore()", "raise SystemError('crash')"])
def test_an_ordinary_end_needs_no_help(path: Path, end: str) -> None:
    process, guard = start(path, end)
    _, errors = process.communicate(timeout=60)
    wait_for_end(guard)
    assert limits(path) == [700, 650, 700]
    assert "is gone" not in errors


def test_an_exit_without_handlers(path: Path) -> None:
    process, guard = start(path, "os._exit(0)")
    process.communicate(timeout=60)
    wait_for_end(guard)
    assert limits(path) == [700, 650, 700]


def test_somebody_elses_limit_is_left_alone(path: Path) -> None:
    process, guard = start(path, "time.sleep(300)")
    open_file(path)[0].set_limit_w(555)
    process.kill()
    _, errors = process.communicate(timeout=60)
    wait_for_end(guard)
    assert limits(path) == [555, 650, 700]
    assert "its limit is 555 W, which somebody else has set; left as it is" in errors


def test_the_restoring_process_is_asked_to_go(path: Path) -> None:
    """Then limits are as they were at once: nobody could restore them later."""
    process, guard = start(path, "time.sleep(300)")
    os.kill(guard, signal.SIGTERM)
    wait_for_end(guard)
    assert limits(path) == [700, 650, 700]
    process.kill()
    process.communicate(timeout=60)


def test_a_second_call_is_guarded_as_well_and_a_lost_guard_is_refused(path: Path) -> None:
    source = DeviceSource(kind="simulated", path=str(path))
    controller = PowerController(dict(enumerate(open_file(path))), source=source)
    assert controller.set_limits({0: 800}).complete
    first = controller.guard_pid
    assert first is not None and controller.set_limits({2: 600}).complete
    assert controller.guard_pid == first
    os.kill(first, signal.SIGKILL)
    wait_for_end(first)
    refused = controller.set_limits({0: 900}).refused
    assert [refusal.slot for refusal in refused] == [0] and "no limit is changed without it" in refused[0].text
    assert limits(path) == [800, 650, 600]
    # The next call has a new process, which knows everything that was changed.
    assert controller.set_limits({0: 850}).complete
    assert controller.guard_pid not in (None, first)
    controller.restore()
    assert limits(path) == [700, 650, 700]


def test_where_processes_have_no_descriptors(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restorer, "_process_descriptor", lambda pid: -1)
    guard = Guard(DeviceSource(kind="simulated", path=str(path)))
    guard.hold([Held(board=0, original_w=700, set_w=[900])])
    open_file(path)[0].set_limit_w(900)
    stream = guard._process.stdin
    assert stream is not None
    stream.close()  # what a dead controller leaves behind
    guard._process.wait(timeout=60)
    assert limits(path) == [700, 650, 700]
    assert guard._process.stdout is not None
    guard._process.stdout.close()


def test_the_supervisors_way_of_clearing_up_leaves_time(path: Path) -> None:
    """A supervisor adopts what its dead trainer left, sends it SIGTERM and a little later SIGKILL."""
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from nep.fault_tolerance import processes
processes.become_subreaper()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
reading, writing = os.pipe()
trainer = os.fork()
if trainer == 0:
    from pathlib import Path
    from nep.power.controller import PowerController
    from nep.power.simulated_file import open_file
    from nep.power.source import DeviceSource
    path = {str(path)!r}
    source = DeviceSource(kind="simulated", path=path)
    controller = PowerController(dict(enumerate(open_file(Path(path)))), source=source)
    assert controller.set_limits({{0: 900, 1: 500}}).complete
    os.write(writing, b"x")
    signal.pause()
os.read(reading, 1)
os.kill(trainer, signal.SIGKILL)
processes.end_descendants(5.0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert limits(path) == [700, 650, 700]


def test_boards_that_the_restoring_process_cannot_open_stay_as_they_are(path: Path) -> None:
    """Here because its source says another file than the controller's boards."""
    source = DeviceSource(kind="simulated", path=str(path.with_name("none.json")))
    controller = PowerController(dict(enumerate(open_file(path))), source=source)
    (refusal,) = controller.set_limits({0: 900}).refused
    assert "boards [0] cannot be opened there" in refusal.text and "no limit is changed without it" in refusal.text
    assert limits(path) == [700, 650, 700] and controller.guard_pid is None


def test_a_source_is_a_value() -> None:
    for source in (DeviceSource(), DeviceSource(kind="simulated", path="a.json")):
        assert DeviceSource.from_json(source.to_json()) == source
    with pytest.raises(ValueError, match="goes with simulated devices"):
        DeviceSource(path="a.json")
    with pytest.raises(ValueError, match="has kind and path"):
        DeviceSource.from_json("{}")


def test_the_restoring_process_is_small() -> None:
    """It lives beside every job: it must not load what training loads."""
    program = "import sys, nep.power.restorer; print(sorted({'torch', 'numpy', 'scipy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
