"""The process that puts power limits back when their controller has disappeared, SIGKILL included.

A power limit outlives the process that set it. So before the first limit is set the controller starts this small
process, tells it what the limits were and which ones it is going to set, and waits for the answer. It holds a pipe's
end and a descriptor of the controller's process: when either says that the controller is gone, limits that are still
the controller's are put back. A limit that somebody else has set meanwhile is left alone.

It is in no process group of a launcher's, since launchers signal whole groups. It opens the boards before it promises
anything, so that restoring takes milliseconds: the supervisor of a dead trainer sends what is left of it SIGTERM, and
SIGKILL some seconds later.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from nep.power.device import PowerDevice, PowerError
from nep.power.source import DeviceSource

# Starting Python on a busy machine takes a while; one that does not answer by then will not.
_START_S = 60.0
_END_S = 10.0
# Where processes have no descriptors (old kernels, some sandboxes) the parent's number is looked at so often.
_LOOK_MS = 500


@dataclass
class Held:
    """What is to be restored on one board.

    Attributes:
        board: its number or UUID in its source.
        original_w: the limit that it had.
        set_w: limits that the controller has set or is about to set.
    """

    board: int | str
    original_w: float
    set_w: list[float] = field(default_factory=list)

    def to_value(self) -> dict[str, Any]:
        return {"board": self.board, "original_w": self.original_w, "set_w": self.set_w}


def put_back(device: PowerDevice, held: Held) -> str | None:
    """Restore one board if its limit is one that we set.

    Returns:
        What was left alone and why; None if the limit is what it was.

    Raises:
        PowerError: the device does not obey.
    """
    now = device.limit_w()
    if abs(now - held.original_w) < 0.5:
        return None
    if not any(abs(now - ours) < 0.5 for ours in held.set_w):
        return f"{device.name}: its limit is {now:g} W, which somebody else has set; left as it is"
    device.set_limit_w(held.original_w)
    return None


def put_all_back(devices: Mapping[int | str, PowerDevice], held: Sequence[Held]) -> list[str]:
    """Restore all boards, those first whose limit goes down, so that a domain is never above its budget.

    Returns:
        Sentences about boards that are not as they were.
    """
    trouble = []

    def rise(one: Held) -> float:
        try:
            return one.original_w - devices[one.board].limit_w()
        except PowerError:
            return 0.0

    for one in sorted(held, key=rise):
        try:
            left = put_back(devices[one.board], one)
        except PowerError as error:
            left = str(error)
        if left is not None:
            trouble.append(left)
    return trouble


class Guard:
    """The controller's end of the restoring process.

    Args:
        source: where the process finds the devices.

    Raises:
        RuntimeError: it cannot be started.
    """

    def __init__(self, source: DeviceSource):
        root = str(Path(__file__).resolve().parents[2])
        program = f"import sys; sys.path.insert(0, {root!r}); from nep.power.restorer import main; sys.exit(main())"
        descriptor = _process_descriptor(os.getpid())
        arguments = [source.to_json(), str(os.getpid()), str(descriptor)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # what could not be sent to a dead process is not tried again when the pipe is closed
                pass_fds=[] if descriptor < 0 else [descriptor],
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"the process that restores power limits cannot be started ({error})") from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        self._owner = os.getpid()
        self._expect("ready")

    @property
    def pid(self) -> int:
        """Of the restoring process."""
        return self._process.pid

    def hold(self, held: Sequence[Held]) -> None:
        """Tell it what to restore. When this returns it knows.

        Raises:
            RuntimeError: it is gone.
        """
        self._send({"held": [one.to_value() for one in held]})
        self._expect("held")

    def close(self) -> None:
        """Everything is restored already: it may go. In a fork of the controller this does nothing."""
        if os.getpid() != self._owner:
            return
        try:
            self._send({"done": True})
            self._process.wait(timeout=_END_S)
        except (RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        stream = self._process.stdin
        assert stream is not None
        unsent = json.dumps(message).encode() + b"\n"
        try:
            while unsent:
                unsent = unsent[stream.write(unsent) :]
        except OSError as error:
            raise RuntimeError(
                f"the process that restores power limits ({self.pid}) is gone; no limit is changed without it"
            ) from error

    def _expect(self, answer: str) -> None:
        stream = self._process.stdout
        assert stream is not None
        ready, _, _ = select.select([stream], [], [], _START_S)
        line = (stream.readline() if ready else b"").decode(errors="replace").strip()
        if line != answer:
            self._process.kill()
            self._process.wait()
            raise RuntimeError(
                f"the process that restores power limits is not ready ({line or 'no answer'}); no limit is changed "
                "without it"
            )


def _process_descriptor(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 where there is no such thing."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1
    os.set_inheritable(descriptor, True)
    return descriptor


@dataclass
class _Watch:
    """What the process itself knows."""

    source: DeviceSource
    parent: int
    held: list[Held] = field(default_factory=list)
    devices: dict[int | str, PowerDevice] = field(default_factory=dict)
    done: bool = False
    stopped: bool = False
    unread: bytes = b""

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Self:
        return cls(source=DeviceSource.from_json(arguments[0]), parent=int(arguments[1]))

    def read(self) -> bool:
        """Take what the controller has sent. False: its end of the pipe is closed."""
        data = os.read(0, 65536)
        self.unread += data
        *lines, self.unread = self.unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message.get("done"):
                self.done = True
            else:
                self._hold([Held(**one) for one in message["held"]])
        return bool(data)

    def _hold(self, held: list[Held]) -> None:
        new = [one.board for one in held if one.board not in self.devices]
        try:
            if new:
                self.devices |= zip(new, self.source.open(new), strict=True)
        except (PowerError, ValueError) as error:
            _answer(f"boards {new} cannot be opened there: {error}")
            return
        self.held = held
        _answer("held")

    def restore(self) -> None:
        if not self.held:
            return
        trouble = put_all_back(self.devices, self.held)
        for sentence in trouble:
            _say(f"power limit not restored: {sentence}")
        if len(trouble) < len(self.held):
            _say(f"process {self.parent} is gone; its power limits were put back")


def main(arguments: Sequence[str] | None = None) -> int:
    """The restoring process.

    Args:
        arguments: source of devices, the controller's process number, its descriptor or -1.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    watch, descriptor = _Watch.of(arguments), int(arguments[2])

    def stop(number: int, frame: object) -> None:
        watch.stopped = True

    # Being asked to go is the end as well: the limits as they were are always safe.
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for number in ends:
        signal.signal(number, stop)
    # The mask is inherited, and a supervisor's blocks these.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
    # A signal that arrives just before a wait must end it.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    poller = select.poll()
    for one in (0, reading, *([] if descriptor < 0 else [descriptor])):
        poller.register(one, select.POLLIN)
    _answer("ready")
    gone = False
    while not (gone or watch.done or watch.stopped):
        ready = dict(poller.poll(None if descriptor >= 0 else _LOOK_MS))
        if 0 in ready:
            gone = not watch.read()
        # Its last words first: a controller that said "done" and went needs no help.
        elif descriptor in ready or (descriptor < 0 and os.getppid() != watch.parent):
            gone = True
    if not watch.done:
        watch.restore()
    return 0


def _answer(text: str) -> None:
    # The controller may be gone; what has to be done then is found out from its descriptor.
    try:
        os.write(1, text.encode() + b"\n")
    except OSError:
        return


def _say(text: str) -> None:
    try:
        os.write(2, f"nep: {text}\n".encode())
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main())
