"""Waiting that can be given up: until the operation is done, the generation has a fault, or a deadline.

An operation that is given up may still write to its memory (a gloo operation cannot be cancelled). It is
therefore *parked* together with everything it may touch, and reaped when it has ended by itself, at the
latest after its process group's own finite time-out.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Fault(RuntimeError):
    """This generation cannot go on; every member has to recover.

    Args:
        kind: ``flag`` (another member saw it first), ``peer`` (error on the data path), ``deadline``
            (no progress), ``record`` (a vote that does not verify) or ``planned`` (members break it on purpose).
        detail: one sentence for people.
    """

    def __init__(self, kind: str, detail: str):
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail

    def without_frames(self) -> Fault:
        """The same, to be kept: the frames in a traceback hold groups, model and activations of the generation.

        While they live, the sockets of its groups stay open, and what still comes in on one whose operation has
        failed is never read: gloo's thread then turns without pause.
        """
        return Fault(self.kind, self.detail)


class Pending(Protocol):
    """An operation in flight."""

    def done(self) -> bool:
        """Whether it has ended, well or not."""

    def check(self) -> None:
        """Raise what went wrong; only after `done()`."""

    def ended(self) -> bool:
        """Whether nothing will touch its memory any more. A failed operation is done before it has ended."""


class PendingWork:
    """A collective of torch.distributed, which can be polled.

    Args:
        work: the torch work.
        memory: the tensors it reads and writes, kept alive as long as it is.
    """

    def __init__(self, work: Any, memory: Sequence[Any] = ()):
        self._work = work
        self._memory = memory

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def check(self) -> None:
        self._work.wait()

    def ended(self) -> bool:
        return self.done()


class FailedLaunch:
    """An operation that could not be started: it failed as if it had been waited for."""

    def __init__(self, error: Exception):
        self._error = error.with_traceback(None)  # its frames would hold the group

    def done(self) -> bool:
        return True

    def check(self) -> None:
        raise self._error

    def ended(self) -> bool:
        return True


class Nothing:
    """An operation without peers."""

    def done(self) -> bool:
        return True

    def check(self) -> None:
        return None

    def ended(self) -> bool:
        return True


class PendingCall:
    """Blocking calls that another thread makes, one after the other: sends and receives of gloo cannot be
    polled, nor can the constructor of a process group.

    The first error makes it done at once, but the remaining calls are still made, so that it has ended
    only when none of them can touch memory any more.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]], memory: Sequence[Any] = ()):
        self._calls = calls
        self._memory = memory
        self._done = threading.Event()
        self._ended = threading.Event()
        self.value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        for call in self._calls:
            try:
                self.value = call()
            except Exception as error:  # handed over to whoever waits, without a frame that holds this call
                if self._error is None:
                    self._error = error.with_traceback(None)
                self._done.set()
        self._done.set()
        self._ended.set()

    def done(self) -> bool:
        return self._done.is_set()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def ended(self) -> bool:
        return self._ended.is_set()


class WaitingThread:
    """One daemon thread that makes blocking calls, first come first served."""

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[PendingCall | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call  # its memory would live on until the next one comes

    def submit(self, calls: Sequence[Callable[[], Any]], memory: Sequence[Any] = ()) -> PendingCall:
        pending = PendingCall(calls, memory)
        self._calls.put(pending)
        return pending

    def close(self) -> None:
        """Let the thread end after the calls it already has."""
        self._calls.put(None)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()


class WaitWatch(Protocol):
    """Somebody who has to know when a slot waits."""

    def wait_begins(self) -> None:
        """From here on the slot does nothing but wait."""

    def wait_ends(self) -> None:
        """It goes on, or gives up."""


# Pauses between two looks at an operation: short first (most waits are short), then longer.
_FIRST_PAUSE_S = 2e-5
_LONGEST_PAUSE_S = 1e-3


class Waiter:
    """How one slot waits in one generation.

    Args:
        fault: returns the reason when the generation has a fault, else None. Cheap; called often.
        deadline_s: seconds one wait may take.

    Attributes:
        watches: told when a wait begins and when it ends, to count what lies between.
    """

    def __init__(self, fault: Callable[[], str | None], deadline_s: float):
        self._fault = fault
        self.deadline_s = deadline_s
        self.parked: list[Pending] = []
        self.watches: list[WaitWatch] = []

    @property
    def fault(self) -> str | None:
        """Why the generation is broken, or None."""
        return self._fault()

    def wait(self, pending: Pending, what: str, deadline_s: float | None = None) -> None:
        """Return when `pending` has ended well.

        Raises:
            Fault: it failed, the generation has a fault, or the deadline passed. `pending` is parked.
        """
        for watch in self.watches:
            watch.wait_begins()
        try:
            self._wait(pending, what, deadline_s)
        finally:
            for watch in self.watches:
                watch.wait_ends()

    def _wait(self, pending: Pending, what: str, deadline_s: float | None) -> None:
        limit_s = self.deadline_s if deadline_s is None else deadline_s
        start = time.monotonic()
        pause = _FIRST_PAUSE_S
        while not pending.done():
            reason = self._fault()
            if reason is not None:
                self.parked.append(pending)
                raise Fault("flag", f"{reason} (while waiting for {what})")
            if time.monotonic() - start > limit_s:
                self.parked.append(pending)
                raise Fault("deadline", f"{what} made no progress for {limit_s:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        try:
            pending.check()
        except Exception as error:
            self.parked.append(pending)
            # `pending` may keep the error, whose frames would keep `pending` and all that its callers hold.
            raise Fault("peer", f"{what} failed: {_first_line(error)}") from error.with_traceback(None)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
