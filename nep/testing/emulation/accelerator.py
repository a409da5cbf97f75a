"""The time line of one emulated accelerator: a host, a stream of kernels, and links.

As on a GPU the host launches kernels and goes on; they run one after the other. A message is ready when the kernels
before it have run, and a link carries one message after the other. What the host itself takes (Python, real
arithmetic, the interpreter lock of 16 ranks) does not move the time line as long as it is over before the
time line gets there: every wait lasts until the time line's moment on the wall clock, so delays do not add up. How far
the wall clock was ever behind is measured.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Speed = Callable[[int, int, float], float]
"""Relative speed of computing: (slot, step, emulated seconds since the start) -> 1.0 for full speed.

It is asked when a kernel starts, so a model of power and temperature can answer.
"""


class WallClock:
    """Emulated seconds on the wall clock.

    Args:
        pace: wall seconds of an emulated second. 0: nothing is slept, time is the time lines' alone.
    """

    def __init__(self, pace: float):
        self.pace = pace
        self.start()

    def start(self) -> None:
        """Emulated time is 0 now."""
        self._zero = time.monotonic()
        self._processor_zero = time.process_time()

    def used_s(self) -> tuple[float, float]:
        """Processor seconds and wall seconds of this process since the start."""
        return time.process_time() - self._processor_zero, time.monotonic() - self._zero

    def left_s(self, moment: float) -> float:
        """Wall seconds until the time line's `moment`; negative if it has passed, 0 without a pace."""
        return self._zero + moment * self.pace - time.monotonic() if self.pace else 0.0

    def now(self) -> float:
        """Emulated seconds that have passed on the wall clock."""
        return (time.monotonic() - self._zero) / self.pace if self.pace else 0.0


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One slot's side of a message exchange, in emulated seconds.

    Attributes:
        start: when its links began with it, or its kernels were ready if it has nothing to carry.
        ends: link -> when that link has carried all that the slot sends and gets.
        busy: how long that takes.
    """

    start: float
    ends: Mapping[str, float]
    busy: float

    @property
    def end(self) -> float:
        return max(self.ends.values(), default=self.start)


@dataclass(kw_only=True)
class Accounts:
    """Seconds of one slot by kind.

    Attributes:
        busy: kernels and links.
        stalled: host waits for messages of a kind while no kernel runs.
    """

    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    stalled: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def minus(self, earlier: Accounts) -> Accounts:
        """What has been added since."""

        def less(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
            return {kind: value - before.get(kind, 0.0) for kind, value in now.items()}

        return Accounts(busy=less(self.busy, earlier.busy), stalled=less(self.stalled, earlier.stalled))

    def copy(self) -> Accounts:
        return Accounts(busy=dict(self.busy), stalled=dict(self.stalled))


class Accelerator:
    """One slot's time line; used by the slot's own thread alone.

    Args:
        slot: whose it is.
        clock: of the whole job.
        speed: see `Speed`.

    Attributes:
        step: the one that runs, for `speed`.
        host: how far the host has come.
        behind_s: wall seconds that the host was late at most.
    """

    def __init__(self, slot: int, clock: WallClock, speed: Speed):
        self.slot = slot
        self.clock = clock
        self.step = 0
        self.host = 0.0
        self.behind_s = 0.0
        self.accounts = Accounts()
        self._speed = speed
        self._kernels = 0.0
        self._compute_s = 0.0
        self._links: dict[str, float] = defaultdict(float)

    @property
    def compute_s(self) -> float:
        """Seconds of all kernels so far; links and waits are not in it."""
        return self._compute_s

    @property
    def idle_from(self) -> float:
        """When everything that was launched so far has run."""
        return max(self.host, self._kernels)

    def restart(self) -> None:
        """The clock is at 0 again and nothing runs; accounts stay."""
        self.host = self._kernels = self.behind_s = 0.0
        self._links.clear()

    def compute(self, kind: str, seconds: float) -> None:
        """Launch a kernel.

        Args:
            kind: for the accounts.
            seconds: at full speed.
        """
        start = self.idle_from
        taken = seconds / self._speed(self.slot, self.step, start)
        self._kernels = start + taken
        self._compute_s += taken
        self.accounts.busy[kind] += taken

    def carry(self, seconds: Mapping[str, float]) -> Leg:
        """Launch a message exchange behind the kernels so far; each link takes so many seconds for it."""
        ready = self.idle_from
        starts = {link: max(ready, self._links[link]) for link in seconds}
        ends = {link: starts[link] + taken for link, taken in seconds.items()}
        self._links.update(ends)
        # Links work side by side: the slower one is what the exchange takes.
        return Leg(start=min(starts.values(), default=ready), ends=ends, busy=max(seconds.values(), default=0.0))

    def wait(self, kind: str, leg: Leg, moment: float) -> None:
        """The host has waited for an exchange that was complete at `moment`."""
        self.accounts.busy[kind] += leg.busy
        self.accounts.stalled[kind] += max(0.0, moment - self.idle_from)
        self.host = max(self.host, moment)
        self.behind_s = max(self.behind_s, -self.clock.left_s(self.host))
