"""Simulated boards whose state is a file: several processes see and set the same limits, as with a driver.

`{"schema": 1, "kind": "simulated boards", "boards": [{"model": "b200-sxm", "default_w": 700, "min_w": 200,
"max_w": 1000, "limit_w": 700, "temperature_c": 61.0, "at_s": 1790000000.0, "load": 1.0, "permitted": true}]}`; what is
not said is the default.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from nep.planning.speed_curve import CURVES, DEFAULT_W, curve_for_limits, curve_of
from nep.power.device import PowerRange, PowerReading
from nep.power.simulated import BoardModel, Chip, SimulatedDevice

SCHEMA = 1
KIND = "simulated boards"
_Result = TypeVar("_Result")

# Lowest and highest limits; the latter as in nep.planning.cost.profiles, the former as boards report them (B200: the
# DGX B200 user guide, AllowableMin 200; the others: nvidia-smi -q -d POWER of such boards).
_RANGES: Mapping[str, tuple[int, int]] = {
    "v100": (100, 250),
    "a40": (100, 300),
    "rtx6000": (100, 260),
    "a100-80gb-sxm": (100, 400),
    "h100-sxm": (200, 700),
    "h200-sxm": (200, 700),
    "b200-sxm": (200, 1000),
    "gb200-nvl72": (200, 1200),
}
_MODEL_KEYS = {"idle_w", "ambient_c", "kelvin_per_w", "tau_s", "slowdown_c", "band_c", "max_clock_mhz", "speed"}
_STATE_KEYS = {"limit_w", "temperature_c", "at_s", "load"}
_DEVICE_KEYS = {"permitted", "lost", "xids", "ecc_corrected", "ecc_uncorrected"}
_KEYS = {"model", "min_w", "default_w", "max_w"} | _MODEL_KEYS | _STATE_KEYS | _DEVICE_KEYS


def board_model(model: str = "b200-sxm", **numbers: Any) -> BoardModel:
    """A board of a known kind.

    Args:
        model: name of a curve in `nep.planning.speed_curve`.
        numbers: `min_w`, `default_w`, `max_w` and what else `BoardModel` has, where it differs; for the curve see
            `curve_for_limits`.

    Raises:
        ValueError: there is no such board.
    """
    curve_of(model)
    least, most = _RANGES[model]
    default = numbers.pop("default_w", DEFAULT_W[model])
    limits = PowerRange(
        min_w=numbers.pop("min_w", min(least, default)),
        default_w=default,
        max_w=numbers.pop("max_w", max(most, default)),
    )
    curve = curve_for_limits(model, default_w=limits.default_w, max_w=limits.max_w)
    return BoardModel(name=model, curve=curve, range_w=limits, **numbers)


def simulated_boards(count: int, model: str = "b200-sxm", **numbers: Any) -> tuple[SimulatedDevice, ...]:
    """So many boards in memory, warm and at work.

    Raises:
        ValueError: fewer than one, or no such board.
    """
    if count < 1:
        raise ValueError(f"count ({count}) must be at least 1")
    board = board_model(model, **numbers)
    return tuple(SimulatedDevice(index=index, chip=Chip.warm(board)) for index in range(count))


def create_file(path: Path, boards: Sequence[Mapping[str, Any]]) -> None:
    """Writes a file of simulated boards.

    Raises:
        ValueError: a board that cannot be.
    """
    value = {"schema": SCHEMA, "kind": KIND, "boards": [dict(board) for board in boards]}
    for index, board in enumerate(value["boards"]):
        _device(board, index, path)
    _write(path, value)


def open_file(path: Path, boards: Sequence[int | str] | None = None) -> tuple[FileDevice, ...]:
    """The boards in a file.

    Raises:
        ValueError: it cannot be read, or has no such board.
    """
    count = len(_read(path)["boards"])
    wanted = range(count) if boards is None else boards
    strangers = [board for board in wanted if not isinstance(board, int) or not 0 <= board < count]
    if strangers:
        raise ValueError(f"boards {strangers} are not in {path}, which has 0 to {count - 1}")
    return tuple(FileDevice(path, index) for index in wanted if isinstance(index, int))


class FileDevice:
    """A simulated board in a file. See `nep.power.device.PowerDevice`.

    Args:
        path: the file.
        index: of the board in it.
    """

    def __init__(self, path: Path, index: int):
        self._path, self._index = path, index

    @property
    def name(self) -> str:
        return self._do(lambda device: device.name)

    @property
    def model(self) -> str:
        """The board's product name."""
        return self._do(lambda device: device.model)

    def range_w(self) -> PowerRange:
        return self._do(lambda device: device.range_w())

    def limit_w(self) -> float:
        return self._do(lambda device: device.limit_w())

    def set_limit_w(self, limit_w: float) -> None:
        self._do(lambda device: device.set_limit_w(limit_w))

    def read(self) -> PowerReading:
        return self._do(lambda device: device.read())

    def command(self, limit_w: float) -> str:
        return self._do(lambda device: device.command(limit_w))

    def close(self) -> None:
        """Nothing to give back."""

    def _do(self, act: Callable[[SimulatedDevice], _Result]) -> _Result:
        with _locked(self._path):
            value = _read(self._path)
            device = _device(value["boards"][self._index], self._index, self._path)
            result = act(device)
            chip = device.chip
            value["boards"][self._index] |= {
                "limit_w": chip.limit_w,
                "temperature_c": chip.temperature_c,
                "at_s": chip.now_s,
                "xids": device.xids,
            }
            _write(self._path, value)
            return result


def _device(value: Mapping[str, Any], index: int, path: Path) -> SimulatedDevice:
    if not isinstance(value, Mapping) or (unknown := sorted(set(value) - _KEYS)):
        named = ", ".join(unknown) if isinstance(value, Mapping) else repr(value)
        raise ValueError(f"board {index} of {path}: {named} unknown; a board has {', '.join(sorted(_KEYS))}")
    try:
        limits = {name: value[name] for name in ("min_w", "default_w", "max_w") if name in value}
        numbers = {name: value[name] for name in _MODEL_KEYS if name in value}
        board = board_model(value.get("model", "b200-sxm"), **limits, **numbers)
        chip = Chip.warm(board)
        chip.load = float(value.get("load", 1.0))
        if not 0 <= chip.load <= 1:
            raise ValueError(f"load ({chip.load}) must be 0 to 1")
        chip.limit_w = value.get("limit_w", chip.limit_w)
        chip.temperature_c = float(value.get("temperature_c", chip.temperature_c))
        device = SimulatedDevice(
            index=index, chip=chip, clock=time.time, **{name: value[name] for name in _DEVICE_KEYS if name in value}
        )
        chip.now_s = float(value.get("at_s", chip.now_s))
        return device
    except (TypeError, ValueError) as error:
        raise ValueError(f"board {index} of {path}: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a file of simulated boards") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); give a file of simulated boards") from error
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise ValueError(f"{path} must be a JSON object of kind {KIND!r}; this is another file")
    if value.get("schema") != SCHEMA:
        raise ValueError(f"schema ({value.get('schema')!r}) of {path} must be {SCHEMA}, the one that this nep reads")
    if not isinstance(value.get("boards"), list) or not value["boards"]:
        raise ValueError(f"{path} has no boards; give at least one, {{}} is a B200")
    return value


def _write(path: Path, value: Mapping[str, Any]) -> None:
    """At once or not at all: a process may be killed meanwhile."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(json.dumps(value), encoding="utf-8")
    os.replace(unfinished, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # A file of its own: the one with the boards is replaced.
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


KNOWN_BOARDS = tuple(name for name in CURVES if name in _RANGES)
