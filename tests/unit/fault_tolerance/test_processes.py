"""Process primitives, with real processes in a fresh interpreter (this one must adopt nobody)."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nep.fault_tolerance import processes


def run(script: str) -> str:
    prelude = "import os, signal, sys, time\nfrom nep.fault_tolerance import processes\n"
    result = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_descendants_and_their_end() -> None:
    output = run(
        """
        processes.become_subreaper()
        reading, writing = os.pipe()
        if os.fork() == 0:  # child, grandchild (stubborn), great-grandchild
            os.fork() == 0 and (signal.signal(signal.SIGTERM, signal.SIG_IGN), os.fork())
            os.write(writing, b"x")
            time.sleep(60)
        for _ in range(3):
            os.read(reading, 1)
        spared = os.fork()
        if spared == 0:
            time.sleep(60)
        found = processes.descendants(os.getpid())
        start = time.monotonic()
        ended = processes.end_descendants(0.2, spare={spared})
        took = time.monotonic() - start
        left = processes.descendants(os.getpid())
        processes.end_descendants(0.0)
        print(len(found), ended, left == {spared}, 0.2 <= took < 30, processes.descendants(os.getpid()))
        """
    )
    assert output == "4 3 True True set()"


def test_reap_tells_signals_from_codes() -> None:
    output = run(
        """
        assert processes.reap() == {}
        pids = []
        for what in ("kill", "exit", "run"):
            pid = os.fork()
            if pid == 0:
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "exit":
                    os._exit(3)
                time.sleep(60)
            pids.append(pid)
        codes = {}
        while len(codes) < 2:
            codes |= processes.reap()
        print([codes.get(pid) for pid in pids])
        processes.send_signal(pids[2], signal.SIGKILL)
        os.waitpid(pids[2], 0)
        processes.send_signal(pids[2], signal.SIGKILL)  # gone: nothing happens
        """
    )
    assert output == "[-9, 3, None]"


def test_the_parent_death_signal_arrives() -> None:
    output = run(
        """
        processes.become_subreaper()
        reading, writing = os.pipe()
        if os.fork() == 0:
            pid = os.fork()
            if pid == 0:
                processes.set_parent_death_signal(signal.SIGKILL)
                os.write(writing, b"x")
                time.sleep(60)
            os.read(reading, 1)
            os._exit(0)
        codes = []
        while len(codes) < 2:
            codes += processes.reap().values()
        print(sorted(codes))
        """
    )
    assert output == "[-9, 0]"


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (40, "signal 40")])
def test_signal_name(number: int, name: str) -> None:
    assert processes.signal_name(number) == name


def test_a_stream_without_a_reader_takes_everything() -> None:
    output = run(
        """
        reading, writing = os.pipe()
        stream = processes.LastingStream(os.fdopen(writing, "w", buffering=16))
        stream.write("heard\\n")
        stream.flush()
        os.close(reading)
        for _ in range(100):
            stream.write("said to nobody" * 50)
            stream.flush()
        print(stream.fileno() == writing, stream.isatty())
        """
    )
    assert output == "True False"


def test_hosts_are_looked_up_in_files() -> None:
    """In a child: it cannot be taken back."""
    pid = os.fork()
    if pid == 0:
        found = processes.look_up_hosts_in_files()
        start = time.monotonic()
        socket.getnameinfo(("::ffff:192.0.2.1", 80, 0, 0), 0)  # of no host: the DNS would be asked
        os._exit(0 if not found or time.monotonic() - start < 3.0 else 1)  # a resolver gets 5 s
    assert os.waitpid(pid, 0)[1] == 0
