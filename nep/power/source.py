"""Where devices come from, as a value that another process can open the same devices by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, get_args

if TYPE_CHECKING:
    from nep.power.nvml import NvmlDevice
    from nep.power.simulated_file import FileDevice

Kind = Literal["nvml", "simulated"]


@dataclass(frozen=True, kw_only=True)
class DeviceSource:
    """NVML, or a file of simulated boards.

    Attributes:
        kind: which of them.
        path: of the file.
    """

    kind: Kind = "nvml"
    path: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind ({self.kind!r}) must be one of {', '.join(get_args(Kind))}")
        if (self.path is None) != (self.kind == "nvml"):
            raise ValueError(f"path ({self.path}) goes with simulated devices, and with them only")

    def open(self, boards: Sequence[int | str] | None = None) -> tuple[NvmlDevice, ...] | tuple[FileDevice, ...]:
        """The devices.

        Args:
            boards: which; None: all. Simulated ones have numbers only.

        Raises:
            PowerError: they cannot be opened.
            ValueError: the file is none of simulated boards, or has no such board.
        """
        # Each kind is imported where it is used: the restoring process stays small.
        if self.path is None:
            from nep.power.nvml import open_nvml

            return open_nvml(boards)
        from nep.power.simulated_file import open_file

        return open_file(Path(self.path), boards)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: another form.
        """
        value = json.loads(text)
        if not isinstance(value, dict) or set(value) != {field.name for field in fields(cls)}:
            raise ValueError(f"a source of devices has kind and path; this is {text}")
        return cls(**value)
