"""Process primitives of Linux that the supervisor and the test launcher share. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn, TextIO

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36

NOTICE = signal.SIGUSR1  # a preemption notice: the machine of this process will be taken away soon


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        raise RuntimeError(f"platform ({sys.platform}) has no prctl; recovery from failures needs Linux")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def set_parent_death_signal(signum: int) -> None:
    """Ask the kernel to send `signum` to this process when the thread that forked it ends.

    It is cleared in children made by `fork`. A child calls it first and then compares `os.getppid()` with the
    pid it expects: a parent that died in between sends nothing.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signum))


def become_subreaper() -> None:
    """Make this process adopt its orphaned descendants (instead of init), so that none of them is lost."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def look_up_hosts_in_files() -> bool:
    """Let this process and those that it forks look up hosts in /etc/hosts only, never in the DNS.

    torch's store server asks for the name of every peer that connects, with the store standing still meanwhile: for
    five seconds at a time where an answer is lost. For processes that talk to their own machine only.

    Returns:
        Whether the C library can do that (glibc).
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    return configure is not None and configure(b"hosts", b"files") == 0


class LastingStream:
    """A text stream whose reader may leave: what nobody reads any more is dropped, and the process goes on.

    Args:
        stream: one with a file descriptor, such as `sys.stdout`.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream does; never fails."""
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            self._drop()
            return len(text)

    def flush(self) -> None:
        """As the stream does; never fails."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._drop()

    def _drop(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._stream.flush()  # what is buffered since then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def leave(exit_code: int) -> NoReturn:
    """End this process at once, with what was printed.

    The interpreter's own end stops daemon threads wherever they are; one that is inside a call of the control store
    then aborts the process.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def num_threads() -> int:
    """Number of threads of this process, those started by C and C++ libraries included."""
    return len(os.listdir("/proc/self/task"))


def _parents() -> dict[int, int]:
    """pid -> parent's pid of every process that is visible here."""
    parents = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue  # it ended while we were looking
        # The second field is the command in parentheses and may hold spaces and parentheses itself.
        parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    return parents


def descendants(pid: int) -> set[int]:
    """All processes below `pid`, zombies included.

    /proc/<pid>/task/<tid>/children would be cheaper, but kernels are often built without it.
    """
    parents = _parents()
    found: set[int] = set()
    newest = {pid}
    while newest:
        newest = {child for child, parent in parents.items() if parent in newest} - found - {pid}
        found |= newest
    return found


def send_signal(pid: int, signum: int) -> None:
    """`os.kill` for a child that may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def signal_name(signum: int) -> str:
    """SIGKILL for 9; real-time signals have numbers only."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def reap() -> dict[int, int]:
    """Collect the children that have ended, without waiting.

    Returns:
        pid -> exit code, negative for the signal that ended it (as `subprocess` counts).
    """
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def end_descendants(grace_s: float, spare: Collection[int] = ()) -> int:
    """SIGTERM to every descendant, SIGKILL to those that are left after `grace_s`, until all are reaped.

    The caller must be a subreaper. SIGTERM comes first because a helper process may have something to
    restore.

    Args:
        grace_s: seconds between the two signals; descendants that ended before it is over are not killed.
        spare: pids to leave alone.

    Returns:
        The number of processes that had to be told to end.
    """
    told: set[int] = set()
    deadline_s = time.monotonic() + grace_s
    while True:
        reap()
        left = descendants(os.getpid()) - set(spare)
        if not left:
            return len(told)
        late = time.monotonic() >= deadline_s
        for pid in left if late else left - told:
            send_signal(pid, signal.SIGKILL if late else signal.SIGTERM)
        told |= left
        time.sleep(0.01)
