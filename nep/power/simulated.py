"""Boards of arithmetic: a power-speed curve, heat that comes late, and throttling by temperature.

The board under load draws what its limit allows. Its temperature follows the draw with one time constant (a thermal
resistance and a heat capacity), and near the slowdown temperature the power it may use shrinks, so that it settles
where cooling and draw are equal. Speed is the curve's at the power that is left.

Time is whoever's: the wall's for a command, a time line's for emulated accelerators.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nep.planning.speed_curve import SpeedCurve
from nep.power.device import PowerError, PowerRange, PowerReading, Throttle

# Integration steps per time constant: the draw changes with the temperature only near slowdown, and slowly.
_STEPS_PER_TAU = 25
# A pause of so many time constants leaves nothing of the temperature before.
_FORGOTTEN_TAU = 40


@dataclass(frozen=True, kw_only=True)
class BoardModel:
    """What a simulated board is like.

    Attributes:
        name: product name.
        curve: speed by power; begins at or below `range_w.min_w`, or the lowest limits have its first knot's speed.
        range_w: limits.
        idle_w: draw without work.
        ambient_c: of the coolant.
        kelvin_per_w: how much warmer than the coolant each watt makes the chip in the long run.
        tau_s: time constant of that.
        slowdown_c: the board does not get hotter than this.
        band_c: so many degrees below it begins to use less power.
        max_clock_mhz: at the curve's highest speed.
        speed: of this very chip, 1 as its kind.
    """

    name: str
    curve: SpeedCurve
    range_w: PowerRange
    idle_w: float = 75.0
    ambient_c: float = 30.0
    kelvin_per_w: float = 0.045
    tau_s: float = 8.0
    slowdown_c: float = 87.0
    band_c: float = 4.0
    max_clock_mhz: int = 1980
    speed: float = 1.0

    def __post_init__(self) -> None:
        errors = [
            f"{name} ({getattr(self, name)}) must be positive and finite"
            for name in ("kelvin_per_w", "tau_s", "band_c", "speed", "idle_w")
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0)
        ]
        if self.slowdown_c - self.band_c <= self.ambient_c:
            errors.append(f"slowdown_c ({self.slowdown_c}) minus band_c ({self.band_c}) must be above {self.ambient_c}")
        if self.idle_w >= self.range_w.min_w:
            errors.append(f"idle_w ({self.idle_w}) must be below the lowest limit ({self.range_w.min_w})")
        if errors:
            raise ValueError(f"simulated board {self.name!r}: " + "; ".join(errors))

    def allowed_w(self, limit_w: float, temperature_c: float) -> float:
        """Power under a limit at a temperature: less and less within the band, at its end what cooling carries off for
        ever."""
        start = self.slowdown_c - self.band_c
        if temperature_c <= start:
            return limit_w
        sustained = (self.slowdown_c - self.ambient_c) / self.kelvin_per_w
        share = min((temperature_c - start) / self.band_c, 1.0)
        return min(limit_w, limit_w + (min(sustained, limit_w) - limit_w) * share)

    def speed_at(self, power_w: float) -> float:
        """Speed against the default limit's, with this much power."""
        known = max(power_w, self.curve.knots[0][0])
        return self.speed * self.curve.speed(known) / self.curve.speed(self.range_w.default_w)


@dataclass
class Chip:
    """State of a simulated board at a moment.

    Attributes:
        board: what it is like.
        limit_w: in force.
        temperature_c: now.
        now_s: when that is.
        load: share of the allowed power that work takes; 0 idles.
    """

    board: BoardModel
    limit_w: float
    temperature_c: float
    now_s: float = 0.0
    load: float = 1.0

    @classmethod
    def cold(cls, board: BoardModel) -> Chip:
        """At its default limit, idle for long, with work from now on."""
        temperature = board.ambient_c + board.kelvin_per_w * board.idle_w
        return cls(board=board, limit_w=board.range_w.default_w, temperature_c=temperature)

    @classmethod
    def warm(cls, board: BoardModel) -> Chip:
        """At its default limit, under work for long."""
        chip = cls.cold(board)
        chip.advance(_FORGOTTEN_TAU * board.tau_s)
        chip.now_s = 0.0
        return chip

    @property
    def draw_w(self) -> float:
        """What it draws."""
        board = self.board
        return board.idle_w + self.load * (board.allowed_w(self.limit_w, self.temperature_c) - board.idle_w)

    @property
    def speed(self) -> float:
        """Against a board of its kind at the default limit, cool."""
        return self.board.speed_at(self.board.allowed_w(self.limit_w, self.temperature_c))

    def advance(self, now_s: float) -> None:
        """Let time pass up to a moment. A moment before the last one begins a new count: no time passes."""
        passed, self.now_s = now_s - self.now_s, now_s
        if passed <= 0:
            return
        board = self.board
        passed = min(passed, _FORGOTTEN_TAU * board.tau_s)
        pieces = max(1, math.ceil(passed / board.tau_s * _STEPS_PER_TAU))
        # Exact where the draw does not change meanwhile, which it does only near slowdown.
        decay = math.exp(-passed / pieces / board.tau_s)
        for _ in range(pieces):
            settled = board.ambient_c + board.kelvin_per_w * self.draw_w
            self.temperature_c = settled + (self.temperature_c - settled) * decay


@dataclass
class SimulatedDevice:
    """A simulated board as a device. See `nep.power.device.PowerDevice`.

    Attributes:
        index: its number.
        chip: its state.
        clock: seconds now; None leaves the chip's time to its user.
        permitted: whether its limit may be set.
        lost: it has fallen off the bus.
        xids: driver errors that the next reading reports.
        ecc_corrected, ecc_uncorrected: memory errors so far.
    """

    index: int
    chip: Chip
    clock: Callable[[], float] | None = time.monotonic
    permitted: bool = True
    lost: bool = False
    xids: list[int] = field(default_factory=list)
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0

    def __post_init__(self) -> None:
        if self.clock is not None:
            self.chip.now_s = self.clock()

    @property
    def name(self) -> str:
        return f"GPU {self.index} (simulated {self.chip.board.name})"

    @property
    def model(self) -> str:
        """The board's product name."""
        return self.chip.board.name

    def range_w(self) -> PowerRange:
        self._present()
        return self.chip.board.range_w

    def limit_w(self) -> float:
        self._present()
        return self.chip.limit_w

    def set_limit_w(self, limit_w: float) -> None:
        self._present()
        if not self.permitted:
            raise PowerError(
                f"{self.name}: setting its power limit to {limit_w:g} W failed: permission denied; run the command "
                f"that follows as an administrator: {self.command(limit_w)}",
                "permission",
            )
        limits = self.chip.board.range_w
        if not limits.min_w <= limit_w <= limits.max_w:
            raise PowerError(
                f"{self.name}: setting its power limit to {limit_w:g} W failed: the board takes {limits.min_w} to "
                f"{limits.max_w} W; plan within its range",
                "world",
            )
        self._tick()
        self.chip.limit_w = limit_w

    def read(self) -> PowerReading:
        self._present()
        self._tick()
        chip, board = self.chip, self.chip.board
        new, self.xids = tuple(self.xids), []
        # As boards do, it never shows a clock above its highest.
        share = min(1.0, chip.speed / board.speed_at(max(board.curve.knots[-1][0], board.range_w.max_w)))
        return PowerReading(
            limit_w=chip.limit_w,
            enforced_w=chip.limit_w,
            draw_w=round(chip.draw_w, 1),
            temperature_c=round(chip.temperature_c, 1),
            slowdown_c=board.slowdown_c,
            clock_mhz=round(board.max_clock_mhz * share) if chip.load else round(board.max_clock_mhz * 0.2),
            max_clock_mhz=board.max_clock_mhz,
            throttles=self._throttles(),
            xids=new,
            ecc_corrected=self.ecc_corrected,
            ecc_uncorrected=self.ecc_uncorrected,
        )

    def command(self, limit_w: float) -> str:
        return f"sudo nvidia-smi -i {self.index} -pl {limit_w:g}"

    def close(self) -> None:
        """Nothing to give back."""

    def _throttles(self) -> frozenset[Throttle]:
        chip, board = self.chip, self.chip.board
        if not chip.load:
            return frozenset({"idle"})
        found: set[Throttle] = set()
        if board.allowed_w(chip.limit_w, chip.temperature_c) < chip.limit_w:
            found.add("software_thermal")
        elif board.speed_at(chip.limit_w) < board.speed_at(board.curve.knots[-1][0]):
            found.add("power_limit")
        return frozenset(found)

    def _tick(self) -> None:
        if self.clock is not None:
            self.chip.advance(self.clock())

    def _present(self) -> None:
        if self.lost:
            raise PowerError(f"{self.name}: the GPU has fallen off the bus; drain the slot and reset it", "lost")
