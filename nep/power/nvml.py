"""Boards through NVML, NVIDIA's management library, by the package nvidia-ml-py (which imports as pynvml).

The package is an extra (`pip install 'nep[power]'`) and is imported when devices are opened. Reading is open to
everybody; setting a limit is not.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from nep.power.device import PowerError, PowerRange, PowerReading, Throttle
from nep.power.nvml_errors import explained

INSTALL = "pip install 'nep[power]' (the package nvidia-ml-py)"
# What NVML calls the bits of nvmlDeviceGetCurrentClocksEventReasons, without the name's beginning.
_THROTTLES: dict[str, Throttle] = {
    "GpuIdle": "idle",
    "SwPowerCap": "power_limit",
    "SwThermalSlowdown": "software_thermal",
    "HwThermalSlowdown": "hardware_thermal",
    "HwSlowdown": "hardware_slowdown",
    "HwPowerBrakeSlowdown": "power_brake",
    "ApplicationsClocksSetting": "clocks_setting",
    "DisplayClockSetting": "clocks_setting",
    "SyncBoost": "sync_boost",
}
# Events that one reading takes at most: a board in a storm of errors must not hold its reader.
_MAX_EVENTS = 64


def load_pynvml() -> ModuleType:
    """The package, with NVML started. Each call is one more user of the library; `NvmlDevice.close` is one less.

    Raises:
        PowerError: there is no package, library or driver.
    """
    try:
        module = importlib.import_module("pynvml")
    except ImportError as error:
        raise PowerError(f"NVML cannot be used: {error}; {INSTALL}", "missing") from error
    if not hasattr(module, "nvmlDeviceSetPowerManagementLimit"):
        raise PowerError(f"the module pynvml ({module.__file__}) is another package; {INSTALL}", "missing")
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        raise explained(_code(error), "starting NVML", "this machine") from error
    return module


def open_nvml(boards: Sequence[int | str] | None = None) -> tuple[NvmlDevice, ...]:
    """Boards of this machine.

    Args:
        boards: NVML's numbers (those of nvidia-smi, which CUDA_VISIBLE_DEVICES does not change) or UUIDs (what
            `torch.cuda.get_device_properties(i).uuid` says, with or without `GPU-`); None: all.

    Raises:
        PowerError: there is no NVML, or no such board.
    """
    module = load_pynvml()
    try:
        if boards is None:
            boards = range(_call(module, "this machine", "counting GPUs", "nvmlDeviceGetCount"))
        found = []
        for board in boards:
            found.append(NvmlDevice(module if not found else load_pynvml(), board))
    except PowerError:
        module.nvmlShutdown()
        raise
    if not found:
        module.nvmlShutdown()
    return tuple(found)


class NvmlDevice:
    """A board. See `nep.power.device.PowerDevice`.

    Args:
        module: what `load_pynvml` returned.
        board: number or UUID.
    """

    def __init__(self, module: ModuleType, board: int | str):
        self._module = module
        # How errors call it until its name is known.
        self._label = f"GPU {board}"
        self._handle: Any = None
        if isinstance(board, str):
            uuid = board if board.startswith(("GPU-", "MIG-")) else f"GPU-{board}"
            self._handle = self._need("finding it", "nvmlDeviceGetHandleByUUID", uuid)
        else:
            self._handle = self._need("finding it", "nvmlDeviceGetHandleByIndex", board)
        name = self._need("reading its name", "nvmlDeviceGetName")
        self._model = name.decode() if isinstance(name, bytes) else str(name)
        index = self._ask("nvmlDeviceGetIndex")
        self._index = index if index is not None else board
        self._label = f"GPU {self._index} ({self._model})"
        self._events: Any = None
        self._no_events = False

    @property
    def name(self) -> str:
        return self._label

    @property
    def model(self) -> str:
        """The board's product name."""
        return self._model

    def range_w(self) -> PowerRange:
        low, high = self._need("reading its range of power limits", "nvmlDeviceGetPowerManagementLimitConstraints")
        default = self._need("reading its default power limit", "nvmlDeviceGetPowerManagementDefaultLimit")
        # Inward: a limit of a watt below the minimum would be refused.
        smallest, largest = -(-low // 1000), high // 1000
        return PowerRange(min_w=smallest, max_w=largest, default_w=min(max(default // 1000, smallest), largest))

    def limit_w(self) -> float:
        return float(self._need("reading its power limit", "nvmlDeviceGetPowerManagementLimit")) / 1000

    def set_limit_w(self, limit_w: float) -> None:
        mode = self._ask("nvmlDeviceGetMigMode")
        if mode is not None and mode[0] == self._module.NVML_DEVICE_MIG_ENABLE:
            raise PowerError(
                f"{self.name}: MIG is on, and the power limit is of the whole board, which all its instances share; "
                "switch MIG off (nvidia-smi -mig 0) or plan without this lever",
                "unsupported",
            )
        self._need(
            f"setting its power limit to {limit_w:g} W",
            "nvmlDeviceSetPowerManagementLimit",
            round(limit_w * 1000),
            command=self.command(limit_w),
        )
        now = self.limit_w()
        if abs(now - limit_w) >= 1:
            raise PowerError(
                f"{self.name}: its power limit is {now:g} W after setting {limit_w:g} W; something else sets it too "
                "(the BMC, a power manager), stop that one",
                "busy",
            )

    def read(self) -> PowerReading:
        module = self._module
        draw, enforced = self._ask("nvmlDeviceGetPowerUsage"), self._ask("nvmlDeviceGetEnforcedPowerLimit")
        return PowerReading(
            limit_w=self.limit_w(),
            enforced_w=None if enforced is None else enforced / 1000,
            draw_w=None if draw is None else draw / 1000,
            temperature_c=self._ask("nvmlDeviceGetTemperature", module.NVML_TEMPERATURE_GPU),
            slowdown_c=self._ask("nvmlDeviceGetTemperatureThreshold", module.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            clock_mhz=self._ask("nvmlDeviceGetClockInfo", module.NVML_CLOCK_SM),
            max_clock_mhz=self._ask("nvmlDeviceGetMaxClockInfo", module.NVML_CLOCK_SM),
            throttles=self._throttles(),
            xids=self._xids(),
            ecc_corrected=self._ecc(module.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._ecc(module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        )

    def command(self, limit_w: float) -> str:
        return f"sudo nvidia-smi -i {self._index} -pl {limit_w:g}"

    def close(self) -> None:
        """Give the library back."""
        if self._events is not None:
            self._ask("nvmlEventSetFree", of_handle=False, arguments=(self._events,))
            self._events = None
        self._module.nvmlShutdown()

    def _throttles(self) -> frozenset[Throttle]:
        # Before driver 535 the same word was called differently.
        name = next(
            (
                name
                for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
                if hasattr(self._module, name)
            ),
            None,
        )
        bits = self._ask(name) if name is not None else None
        found: set[Throttle] = set()
        for suffix, throttle in _THROTTLES.items():
            bit = _reason(self._module, suffix)
            if bits and bit and bits & bit:
                found.add(throttle)
                bits &= ~bit
        return frozenset(found | {"other"}) if bits else frozenset(found)

    def _ecc(self, kind: int) -> int | None:
        count = self._ask("nvmlDeviceGetTotalEccErrors", kind, self._module.NVML_VOLATILE_ECC)
        return None if count is None else int(count)

    def _xids(self) -> tuple[int, ...]:
        """Driver errors since the last call; the first call only begins to listen."""
        if self._events is None and not self._no_events:
            self._events = self._listen()
            self._no_events = self._events is None
        found: list[int] = []
        while self._events is not None and len(found) < _MAX_EVENTS:
            try:
                event = self._module.nvmlEventSetWait_v2(self._events, 0)
            except self._module.NVMLError as error:
                if _code(error) == self._module.NVML_ERROR_TIMEOUT:
                    break
                raise explained(_code(error), "waiting for driver errors", self.name) from error
            if event.eventType == self._module.nvmlEventTypeXidCriticalError:
                found.append(int(event.eventData))
        return tuple(found)

    def _listen(self) -> Any:
        supported = self._ask("nvmlDeviceGetSupportedEventTypes") or 0
        wanted = supported & self._module.nvmlEventTypeXidCriticalError
        if not wanted:
            return None
        events = self._need("listening for driver errors", "nvmlEventSetCreate", of_handle=False)
        try:
            self._module.nvmlDeviceRegisterEvents(self._handle, wanted, events)
        except self._module.NVMLError as error:
            self._module.nvmlEventSetFree(events)
            problem = explained(_code(error), "listening for driver errors", self.name)
            if problem.kind == "lost":
                raise problem from error
            return None
        return events

    def _need(
        self, doing: str, function: str, *arguments: Any, command: str | None = None, of_handle: bool = True
    ) -> Any:
        if of_handle and self._handle is not None:
            arguments = (self._handle, *arguments)
        return _call(self._module, self._label, doing, function, *arguments, command=command)

    def _ask(self, function: str, *more: Any, arguments: tuple[Any, ...] = (), of_handle: bool = True) -> Any:
        """As `_need`, but None where the board cannot say or may not tell."""
        try:
            return self._need(f"asking it ({function})", function, *more, *arguments, of_handle=of_handle)
        except PowerError as error:
            if error.kind in ("unsupported", "permission"):
                return None
            raise


def _call(
    module: ModuleType, device: str, doing: str, function: str, *arguments: Any, command: str | None = None
) -> Any:
    call = getattr(module, function, None)
    if call is None:
        raise PowerError(
            f"{device}: {doing} failed: this nvidia-ml-py has no {function}; pip install -U nvidia-ml-py", "unsupported"
        )
    try:
        return call(*arguments)
    except module.NVMLError as error:
        raise explained(_code(error), doing, device, command=command) from error


def _reason(module: ModuleType, suffix: str) -> int:
    for beginning in ("nvmlClocksEventReason", "nvmlClocksThrottleReason"):
        if hasattr(module, beginning + suffix):
            return int(getattr(module, beginning + suffix))
    return 0


def _code(error: Any) -> int:
    return int(getattr(error, "value", 999))
