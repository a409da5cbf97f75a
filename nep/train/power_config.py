"""What a job does with the power limits of its boards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from nep.power.device import PowerDevice, PowerError
from nep.power.simulated_file import open_file, simulated_boards
from nep.power.source import DeviceSource

Mode = Literal["off", "advise", "apply"]

_FILE = "simulated:"


@dataclass(frozen=True, kw_only=True)
class PowerConfig:
    """Watts as a lever of compensation.

    Attributes:
        mode: `off`; `advise` says what it would set and how; `apply` sets it, and puts it back.
        source: `nvml`, `simulated` (boards in each trainer's memory) or `simulated:FILE` (`nep.power.simulated_file`).
        budget_w: for the limits of a node's boards together; None: what they are before anything is changed.
        failed_draw_w: of that, what each board that does not train may still draw.
    """

    mode: Mode = "off"
    source: str = "nvml"
    budget_w: int | None = None
    failed_draw_w: int = 150

    def problems(self, compensate: str) -> list[str]:
        """Everything that is wrong with it. No board is looked at.

        Args:
            compensate: see `nep.train.balance_config.BalanceConfig`.
        """
        problems = []
        if self.mode not in get_args(Mode):
            problems.append(f"power ({self.mode!r}) must be one of {', '.join(get_args(Mode))}")
        if self.mode != "off" and compensate != "auto":
            problems.append(f"power ({self.mode!r}) is a lever of compensation; give --compensate auto, too")
        if self.budget_w is not None and self.budget_w < 1:
            problems.append(f"power_budget_w ({self.budget_w}) must be at least 1; leave it out for the limits of now")
        if self.failed_draw_w < 0:
            problems.append(f"power_failed_draw_w ({self.failed_draw_w}) must be at least 0")
        try:
            if self.file is not None:
                open_file(self.file)
        except ValueError as error:
            problems.append(f"power_source: {error}")
        if self.file is None and self.source not in ("nvml", "simulated"):
            problems.append(f"power_source ({self.source!r}) must be nvml, simulated, or simulated:FILE")
        return problems

    @property
    def file(self) -> Path | None:
        """Of simulated boards."""
        return Path(self.source.removeprefix(_FILE)).absolute() if self.source.startswith(_FILE) else None

    @property
    def devices(self) -> DeviceSource | None:
        """Where another process finds the boards; None: nowhere, they are in memory."""
        if self.source == "simulated":
            return None
        return DeviceSource() if self.file is None else DeviceSource(kind="simulated", path=str(self.file))

    def open(self, board: int | str, local_index: int) -> PowerDevice:
        """One slot's board.

        Args:
            board: its number or UUID, for NVML.
            local_index: of the slot on its node, for simulated ones.

        Raises:
            PowerError: it cannot be opened.
        """
        source = self.devices
        if source is None:
            return simulated_boards(local_index + 1)[local_index]
        try:
            return source.open([board if source.kind == "nvml" else local_index])[0]
        except ValueError as error:
            raise PowerError(str(error), "missing") from error
