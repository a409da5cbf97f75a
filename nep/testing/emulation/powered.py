"""Emulated accelerators under power limits: their speed follows the limit, and heat that comes late.

The limits are those of simulated boards, so that whatever sets limits of real ones (`nep.power.controller`) sets these,
and a whole loop runs on CPUs: a slot fails, watts are planned, limits are set, steps are faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nep.planning.power import PPM, PowerSlot
from nep.planning.speed_curve import boosted
from nep.power.device import PowerRange
from nep.power.simulated import BoardModel, Chip, SimulatedDevice
from nep.testing.emulation.accelerator import Speed


class PoweredSpeed:
    """A `Speed` from simulated boards. Each slot's thread asks for its own slot.

    Time is the time line's: a board heats up while kernels run. A board is taken to work without a break, which is the
    hottest it can be; a new stretch of steps, whose time begins at 0 again, goes on with the temperature reached.

    Args:
        devices: slot -> its board, without a clock of its own.
        base: speed of the slots at their default limits, for chips that are slow for other reasons; None: 1.

    Raises:
        ValueError: a board has a clock.
    """

    def __init__(self, devices: Mapping[int, SimulatedDevice], base: Speed | None = None):
        clocked = [slot for slot, device in devices.items() if device.clock is not None]
        if clocked:
            raise ValueError(f"boards of slots {clocked} have clocks; give clock=None, time is the time lines' here")
        self.devices = dict(sorted(devices.items()))
        self._base = base

    @classmethod
    def uniform(
        cls,
        slots: Iterable[int],
        *,
        headroom: float = 1.3,
        default_w: int = 700,
        min_w: int = 400,
        base: Speed | None = None,
        warm: bool = True,
        **numbers: float,
    ) -> PoweredSpeed:
        """Boards of one kind, with the curve `boosted`.

        Args:
            slots: which.
            headroom: highest over default limit.
            default_w, min_w: limits.
            base: see the class.
            warm: the boards have been at work for long.
            numbers: other fields of `BoardModel`.
        """
        most = round(default_w * headroom)
        board = BoardModel(
            name="emulated",
            curve=boosted(default_w, most),
            range_w=PowerRange(min_w=min_w, default_w=default_w, max_w=most),
            **numbers,  # type: ignore[arg-type]
        )
        begin = Chip.warm if warm else Chip.cold
        return cls({slot: SimulatedDevice(index=slot, chip=begin(board), clock=None) for slot in slots}, base)

    def __call__(self, slot: int, step: int, now_s: float) -> float:
        chip = self.devices[slot].chip
        chip.advance(now_s)
        base = 1.0 if self._base is None else self._base(slot, step, now_s)
        return base * chip.speed

    @property
    def limits_w(self) -> dict[int, float]:
        """Slot -> limit in force."""
        return {slot: device.chip.limit_w for slot, device in self.devices.items()}

    def power_slots(self, needed_ppm: Mapping[int, int], domains: Mapping[int, int]) -> list[PowerSlot]:
        """The question to `plan_watts`, for the slots that need something.

        Args:
            needed_ppm: slot -> speed.
            domains: slot -> power domain.
        """
        found = []
        for slot, needed in sorted(needed_ppm.items()):
            board = self.devices[slot].chip.board
            found.append(
                PowerSlot(
                    slot=slot,
                    domain=domains[slot],
                    curve=board.curve,
                    default_w=board.range_w.default_w,
                    min_w=board.range_w.min_w,
                    max_w=board.range_w.max_w,
                    needed_ppm=needed,
                    speed_ppm=round(board.speed * PPM),
                )
            )
        return found

    def default_w(self) -> dict[int, int]:
        """Slot -> default limit, of all slots, for `domain_budgets`."""
        return {slot: device.chip.board.range_w.default_w for slot, device in self.devices.items()}
