"""Failures on demand: `SLOT@STEP[:KIND[@PHASE]]`, or `SLOT@STEP:flip[@PART]`.

They are real: a kill is a SIGKILL that the process sends itself, and a flip changes a bit of its state.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nep.fault_tolerance.bit_flip import PARTS
from nep.fault_tolerance.control_store import ControlStore, injected_key

KINDS = ("kill", "stop", "exit0", "exception", "flip")
PHASES = ("forward", "dispatch", "backward", "sync", "mirror", "vote", "apply", "return", "recover", "checkpoint")
_PATTERN = re.compile(r"(?P<slot>\d+)@(?P<step>\d+)(:(?P<kind>[a-z0-9]+)(@(?P<phase>[a-z]+))?)?")


class InjectedError(RuntimeError):
    """The failure of kind `exception`."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One failure to inject.

    Attributes:
        slot, step: where and in which step (counted from 1; for phase `recover` the step that is replayed, for
            `checkpoint` the one that is saved: a file of it is written and not yet reported).
        kind: kill (SIGKILL), stop (SIGSTOP), exit0 (`os._exit(0)`) or exception.
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

    def at(self, phase: str, step: int) -> None:
        """Fail here if that was asked for."""
        for index, failure in self._mine:
            if (failure.phase, failure.step) != (phase, step):
                continue
            now = f"{time.time():.6f}"
            if self._store.compare_and_set(injected_key(index), "", now) != now:
                continue  # it has fired before: this is the replay
            self._announce(f"injected failure {failure}")
            if failure.kind == "flip":
                self._announce(self.on_flip(failure))
            else:
                _fail(failure)


def _fail(failure: Failure) -> None:
    if failure.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif failure.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif failure.kind == "exit0":
        os._exit(0)
    else:
        raise InjectedError(f"injected failure {failure}")


def fired(failures: Sequence[Failure], store: ControlStore) -> dict[int, float]:
    """Index of each failure that has fired -> when (seconds since the epoch, the failed slot's clock)."""
    times = {index: store.get(injected_key(index)) for index in range(len(failures))}
    return {index: float(when) for index, when in times.items() if when is not None}
