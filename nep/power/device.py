"""What power control needs of a device: its limits, its state, and errors that say what to do.

Units are in the names. `nep.power.nvml` reads real boards, `nep.power.simulated` has boards of arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

ErrorKind = Literal["permission", "unsupported", "lost", "missing", "busy", "world"]
"""Why a device does not obey: not allowed; the board cannot; it is gone; there is no driver or library; somebody
else is using it; anything else of the world."""

Throttle = Literal[
    "idle",
    "power_limit",
    "software_thermal",
    "hardware_thermal",
    "hardware_slowdown",
    "power_brake",
    "clocks_setting",
    "sync_boost",
    "other",
]
"""Why clocks are below their highest. `power_limit` is what a limit is for; the thermal ones and the brake are trouble;
`sync_boost`: the board keeps step with a group of others."""


class PowerError(RuntimeError):
    """A device that cannot be read or set; the message ends with what to do.

    Attributes:
        kind: for code that has to decide.
    """

    def __init__(self, message: str, kind: ErrorKind):
        if kind not in get_args(ErrorKind):
            raise ValueError(f"kind ({kind!r}) must be one of {', '.join(get_args(ErrorKind))}")
        super().__init__(message)
        self.kind: ErrorKind = kind


@dataclass(frozen=True, kw_only=True)
class PowerRange:
    """Limits of a board, in whole watts.

    Attributes:
        min_w, max_w: what may be set; rounded inward.
        default_w: what it comes with.
    """

    min_w: int
    max_w: int
    default_w: int

    def __post_init__(self) -> None:
        if not 0 < self.min_w <= self.default_w <= self.max_w:
            raise ValueError(
                f"limits must be 0 < min_w ({self.min_w}) <= default_w ({self.default_w}) <= max_w ({self.max_w})"
            )

    @property
    def headroom(self) -> float:
        """Highest over default limit."""
        return self.max_w / self.default_w

    def check(self, limit_w: int, name: str) -> None:
        """Refuses a limit that the board would refuse.

        Raises:
            ValueError: it is outside.
        """
        if type(limit_w) is not int or not self.min_w <= limit_w <= self.max_w:
            raise ValueError(
                f"limit_w of {name} ({limit_w!r}) must be whole watts from {self.min_w} to {self.max_w}; plan within "
                "the board's range"
            )


@dataclass(frozen=True, kw_only=True)
class PowerReading:
    """A device's state at one moment. None: the board does not say.

    Attributes:
        limit_w: power limit that was set last; a fraction if somebody set one.
        enforced_w: the lowest of all limits, such as one that the BMC has set: what the board keeps to.
        draw_w: what it draws.
        temperature_c: of the chip.
        slowdown_c: from here on the board slows itself down.
        clock_mhz, max_clock_mhz: of the multiprocessors.
        throttles: why clocks are lower than they could be.
        xids: driver errors (XID numbers) since the reading before.
        ecc_corrected, ecc_uncorrected: memory errors since the driver was loaded.
    """

    limit_w: float
    enforced_w: float | None = None
    draw_w: float | None = None
    temperature_c: float | None = None
    slowdown_c: float | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    throttles: frozenset[Throttle] = frozenset()
    xids: tuple[int, ...] = ()
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None


def usable_range(limits: PowerRange, reading: PowerReading) -> PowerRange:
    """A board's range as a planner should take it.

    Its `default_w` is the limit in force: an administrator may have chosen it, and speeds are measured under it. Its
    `max_w` is less than the board's where another limit, say the BMC's, is lower than ours, so that raising ours brings
    nothing.
    """
    most = limits.max_w
    if reading.enforced_w is not None and reading.enforced_w < reading.limit_w - 1:
        most = min(max(int(reading.enforced_w), limits.min_w), most)
    return PowerRange(min_w=limits.min_w, default_w=min(max(int(reading.limit_w), limits.min_w), most), max_w=most)


class PowerDevice(Protocol):
    """A board whose power limit can be read and, with permission, set. Used by one thread at a time."""

    @property
    def name(self) -> str:
        """For people: `GPU 3 (NVIDIA H100 80GB HBM3)`."""
        ...

    def range_w(self) -> PowerRange:
        """What may be set.

        Raises:
            PowerError: the device does not say.
        """
        ...

    def limit_w(self) -> float:
        """The limit in force.

        Raises:
            PowerError: the device does not say.
        """
        ...

    def set_limit_w(self, limit_w: float) -> None:
        """Set it; it holds until somebody sets another one or the driver is unloaded.

        Args:
            limit_w: within `range_w`; whole but for limits that are restored.

        Raises:
            PowerError: the device does not obey.
        """
        ...

    def read(self) -> PowerReading:
        """Its state now.

        Raises:
            PowerError: the device is gone.
        """
        ...

    def command(self, limit_w: float) -> str:
        """The command line with which an administrator would set this limit."""
        ...
