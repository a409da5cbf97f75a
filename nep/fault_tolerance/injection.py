"""Failures on demand: `SLOT@STEP[:KIND[@PHASE]]`, or `SLOT@STEP:flip[@PART]`.

They are real: a kill is a SIGKILL that the process sends itself, and a flip changes a bit of its state.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nep.fault_tolerance.bit_flip import PARTS
from nep.fault_tolerance.control_store import ControlStore, injected_key

KINDS = ("kill", "stop", "exit0", "exception", "gil", "busy", "slow", "flip")
PHASES = ("forward", "dispatch", "backward", "sync", "mirror", "vote", "apply", "return", "recover", "checkpoint")
SLOW_FACTOR, SLOW_STEPS = 3, 3  # so much longer, for so many steps
_LONG_S = 1_000_000
_PATTERN = re.compile(r"(?P<slot>\d+)@(?P<step>\d+)(:(?P<kind>[a-z0-9]+)(@(?P<phase>[a-z]+))?)?")


class InjectedError(RuntimeError):
    """The failure of kind `exception`."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One failure to inject.

    Attributes:
        slot, step: where and in which step (counted from 1; for phase `recover` the step that is replayed, for
            `checkpoint` the one that is saved: a file of it is written and not yet reported).
        kind: kill (SIGKILL), stop (SIGSTOP), exit0 (`os._exit(0)`), exception, gil (a call into C that keeps the
            interpreter's lock: no thread of the process runs any more), busy (a loop that ends never; other threads
            run) or slow (three times the computing time, in this step and the two after it; no failure),
            or flip (of a bit of its state).
        phase: which part of the step, see PHASES; a flip is in backward.
        part: flip: a bit of what the slot has owned, mirrored or held; else empty.
    """

    slot: int
    step: int
    kind: str = "kill"
    phase: str = "forward"
    part: str = ""

    @classmethod
    def parse(cls, text: str) -> Failure:
        """Read `SLOT@STEP[:KIND[@PHASE]]`.

        Raises:
            ValueError: naming what is wrong and what is possible.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"--fail {text!r} is not SLOT@STEP[:KIND[@PHASE]], for example 2@30 or 2@30:kill@vote")
        kind, phase = match["kind"] or "kill", match["phase"] or "forward"
        if kind not in KINDS:
            raise ValueError(f"--fail {text!r}: kind {kind!r} is none of {', '.join(KINDS)}")
        if kind == "flip":
            part = match["phase"] or PARTS[0]
            if part not in PARTS:
                raise ValueError(f"--fail {text!r}: {part!r} is none of {', '.join(PARTS)}")
            return cls(slot=int(match["slot"]), step=int(match["step"]), kind=kind, phase="backward", part=part)
        if phase not in PHASES:
            raise ValueError(f"--fail {text!r}: phase {phase!r} is none of {', '.join(PHASES)}")
        return cls(slot=int(match["slot"]), step=int(match["step"]), kind=kind, phase=phase)

    def __str__(self) -> str:
        return f"{self.slot}@{self.step}:{self.kind}@{self.part or self.phase}"


class Injector:
    """Fires each failure once per job; that it fired is recorded in the control store.

    Args:
        failures: of all slots, in the order of the command line.
        slot: this slot.
        store: the main thread's connection.
        announce: called with one line just before the failure.

    Attributes:
        on_flip: flips a bit, and says which.
    """

    def __init__(self, failures: Sequence[Failure], slot: int, store: ControlStore, announce: Callable[[str], None]):
        self._mine = [(index, failure) for index, failure in enumerate(failures) if failure.slot == slot]
        self._store = store
        self._announce = announce
        self.on_flip: Callable[[Failure], str] = lambda failure: "there is nothing to flip"
        self._slowness = Slowness()

    def at(self, phase: str, step: int) -> None:
        """Fail here if that was asked for."""
        self._slowness.pause(step)
        for index, failure in self._mine:
            if (failure.phase, failure.step) != (phase, step):
                continue
            now = f"{time.time():.6f}"
            if self._store.compare_and_set(injected_key(index), "", now) != now:
                continue  # it has fired before: this is the replay
            self._announce(f"injected failure {failure}")
            if failure.kind == "flip":
                self._announce(self.on_flip(failure))
            elif failure.kind == "slow":
                self._slowness.begin(step)
            else:
                fail(failure)


class Slowness:
    """Makes a slot that works take longer. Whoever is not slow yet pays for one comparison."""

    def __init__(self) -> None:
        self._until = 0
        self._used_s: dict[int, float] = {}  # thread -> processor time at its last pause

    def begin(self, step: int) -> None:
        """From here on, for SLOW_STEPS steps."""
        self._until = step + SLOW_STEPS
        self._used_s = {threading.get_ident(): time.thread_time()}

    def pause(self, step: int) -> None:
        """Sleep as long as makes what this thread has computed since the last pause take SLOW_FACTOR times as long."""
        if step >= self._until:
            return
        thread = threading.get_ident()
        time.sleep((SLOW_FACTOR - 1) * max(0.0, time.thread_time() - self._used_s.get(thread, time.thread_time())))
        self._used_s[thread] = time.thread_time()


def fail(failure: Failure) -> None:
    """Fail now, in this thread. Returns only from a kind that hangs, and never in practice.

    Raises:
        InjectedError: the failure of kind `exception`.
    """
    if failure.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif failure.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif failure.kind == "exit0":
        os._exit(0)
    elif failure.kind == "gil":
        hold_interpreter_lock(_LONG_S)
    elif failure.kind == "busy":
        while True:
            pass
    else:
        raise InjectedError(f"injected failure {failure}")


def hold_interpreter_lock(seconds: int) -> None:
    """Sleep in C without giving up the interpreter's lock, as a badly written extension does."""
    libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the lock
    while seconds := libc.sleep(seconds):
        pass  # a signal came


def fired(failures: Sequence[Failure], store: ControlStore) -> dict[int, float]:
    """Index of each failure that has fired -> when (seconds since the epoch, the failed slot's clock)."""
    times = {index: store.get(injected_key(index)) for index in range(len(failures))}
    return {index: float(when) for index, when in times.items() if when is not None}


def last_fired(failures: Sequence[Failure], store: ControlStore) -> dict[int, float]:
    """Slot -> when the last of its failures has fired: it may have failed and come back before."""
    times: dict[int, float] = {}
    for index, when in fired(failures, store).items():
        slot = failures[index].slot
        times[slot] = max(when, times.get(slot, when))
    return times
