"""A module that answers as nvidia-ml-py does, with boards of plain values instead of a driver's."""

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

ERRORS = {
    "UNINITIALIZED": 1,
    "INVALID_ARGUMENT": 2,
    "NOT_SUPPORTED": 3,
    "NO_PERMISSION": 4,
    "ALREADY_INITIALIZED": 5,
    "NOT_FOUND": 6,
    "INSUFFICIENT_SIZE": 7,
    "INSUFFICIENT_POWER": 8,
    "DRIVER_NOT_LOADED": 9,
    "TIMEOUT": 10,
    "IRQ_ISSUE": 11,
    "LIBRARY_NOT_FOUND": 12,
    "FUNCTION_NOT_FOUND": 13,
    "CORRUPTED_INFOROM": 14,
    "GPU_IS_LOST": 15,
    "RESET_REQUIRED": 16,
    "OPERATING_SYSTEM": 17,
    "LIB_RM_VERSION_MISMATCH": 18,
    "IN_USE": 19,
    "MEMORY": 20,
    "NO_DATA": 21,
    "VGPU_ECC_NOT_SUPPORTED": 22,
    "INSUFFICIENT_RESOURCES": 23,
    "FREQ_NOT_SUPPORTED": 24,
    "ARGUMENT_VERSION_MISMATCH": 25,
    "DEPRECATED": 26,
    "NOT_READY": 27,
    "GPU_NOT_FOUND": 28,
    "INVALID_STATE": 29,
    "RESET_TYPE_NOT_SUPPORTED": 30,
    "UNKNOWN": 999,
}
"""NVML's return codes (nvml.h), without `NVML_ERROR_`."""

_CONSTANTS = {
    "NVML_TEMPERATURE_GPU": 0,
    "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN": 1,
    "NVML_CLOCK_SM": 1,
    "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_VOLATILE_ECC": 0,
    "NVML_DEVICE_MIG_DISABLE": 0,
    "NVML_DEVICE_MIG_ENABLE": 1,
    "nvmlEventTypeXidCriticalError": 8,
    "nvmlClocksEventReasonGpuIdle": 0x1,
    "nvmlClocksEventReasonApplicationsClocksSetting": 0x2,
    "nvmlClocksEventReasonSwPowerCap": 0x4,
    "nvmlClocksEventReasonHwSlowdown": 0x8,
    "nvmlClocksEventReasonSyncBoost": 0x10,
    "nvmlClocksEventReasonSwThermalSlowdown": 0x20,
    "nvmlClocksEventReasonHwThermalSlowdown": 0x40,
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": 0x80,
    "nvmlClocksEventReasonDisplayClockSetting": 0x100,
}


class NVMLError(Exception):
    """As the package's: the code is `value`."""

    def __init__(self, value: int):
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class FakeBoard:
    """What a driver knows of one board.

    Attributes:
        outside_mw: a limit of somebody else's (the BMC's), which counts if it is lower.
        fails: function -> NVML code that it answers with.
    """

    uuid: str
    limit_mw: int = 700_000
    outside_mw: int = 10**9
    range_mw: tuple[int, int] = (200_000, 700_000)
    default_mw: int = 700_000
    draw_mw: int = 612_345
    temperature: int = 61
    slowdown: int = 87
    clock: int = 1755
    reasons: int = 0x4
    ecc: tuple[int, int] = (3, 0)
    mig: int | None = 0
    name: str | bytes = "NVIDIA H100 80GB HBM3"
    supported_events: int = 0x1F
    xids: list[int] = field(default_factory=list)
    others: int = 0
    fails: dict[str, int] = field(default_factory=dict)
    ignores_limit: bool = False


class FakePynvml(ModuleType):
    """The module. `users` counts nvmlInit against nvmlShutdown, `calls` names what was called."""

    def __init__(self, boards: list[FakeBoard], start_fails: int | None = None):
        super().__init__("pynvml")
        self.__file__ = "fake"
        self.boards, self.users, self.calls = boards, 0, list[str]()
        self.start_fails = start_fails
        self.event_sets: list[SimpleNamespace] = []
        self.NVMLError = NVMLError
        for name, code in ERRORS.items():
            setattr(self, f"NVML_ERROR_{name}", code)
        for name, value in _CONSTANTS.items():
            setattr(self, name, value)
        values: dict[str, Any] = {
            "nvmlDeviceGetName": lambda board: board.name,
            "nvmlDeviceGetIndex": lambda board: self.boards.index(board),
            "nvmlDeviceGetPowerManagementLimit": lambda board: board.limit_mw,
            "nvmlDeviceGetEnforcedPowerLimit": lambda board: min(board.limit_mw, board.outside_mw),
            "nvmlDeviceGetPowerManagementLimitConstraints": lambda board: list(board.range_mw),
            "nvmlDeviceGetPowerManagementDefaultLimit": lambda board: board.default_mw,
            "nvmlDeviceGetPowerUsage": lambda board: board.draw_mw,
            "nvmlDeviceGetTemperature": lambda board, sensor: board.temperature,
            "nvmlDeviceGetTemperatureThreshold": lambda board, which: board.slowdown,
            "nvmlDeviceGetClockInfo": lambda board, which: board.clock,
            "nvmlDeviceGetMaxClockInfo": lambda board, which: 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda board: board.reasons,
            "nvmlDeviceGetTotalEccErrors": lambda board, kind, counter: board.ecc[kind],
            "nvmlDeviceGetSupportedEventTypes": lambda board: board.supported_events,
            "nvmlDeviceGetMigMode": self._mig,
            "nvmlDeviceSetPowerManagementLimit": self._set,
            "nvmlDeviceRegisterEvents": self._register,
        }
        for name, act in values.items():
            setattr(self, name, self._function(name, act))

    def nvmlInit(self) -> None:
        self.calls.append("nvmlInit")
        if self.start_fails is not None:
            raise NVMLError(self.start_fails)
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1
        assert self.users >= 0

    def nvmlDeviceGetCount(self) -> int:
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeBoard:
        if not 0 <= index < len(self.boards):
            raise NVMLError(ERRORS["INVALID_ARGUMENT"])
        return self._found(self.boards[index], "nvmlDeviceGetHandleByIndex")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeBoard:
        for board in self.boards:
            if board.uuid == uuid:
                return self._found(board, "nvmlDeviceGetHandleByUUID")
        raise NVMLError(ERRORS["NOT_FOUND"])

    def nvmlEventSetCreate(self) -> SimpleNamespace:
        self.event_sets.append(SimpleNamespace(board=None, types=0, free=False))
        return self.event_sets[-1]

    def nvmlEventSetFree(self, events: SimpleNamespace) -> None:
        assert not events.free
        events.free = True

    def nvmlEventSetWait_v2(self, events: SimpleNamespace, timeout_ms: int) -> SimpleNamespace:
        assert timeout_ms == 0 and not events.free
        board = events.board
        if "nvmlEventSetWait_v2" in board.fails:
            raise NVMLError(board.fails["nvmlEventSetWait_v2"])
        if board.xids:
            return SimpleNamespace(eventType=self.nvmlEventTypeXidCriticalError, eventData=board.xids.pop(0))
        raise NVMLError(ERRORS["TIMEOUT"])

    def _function(self, name: str, act: Any) -> Any:
        def call(board: FakeBoard, *arguments: Any) -> Any:
            self.calls.append(name)
            if name in board.fails:
                raise NVMLError(board.fails[name])
            return act(board, *arguments)

        return call

    def _found(self, board: FakeBoard, name: str) -> FakeBoard:
        if name in board.fails:
            raise NVMLError(board.fails[name])
        return board

    def _mig(self, board: FakeBoard) -> list[int]:
        if board.mig is None:
            raise NVMLError(ERRORS["NOT_SUPPORTED"])
        return [board.mig, board.mig]

    def _set(self, board: FakeBoard, limit_mw: int) -> None:
        assert type(limit_mw) is int
        if not board.range_mw[0] <= limit_mw <= board.range_mw[1]:
            raise NVMLError(ERRORS["INVALID_ARGUMENT"])
        if not board.ignores_limit:
            board.limit_mw = limit_mw

    def _register(self, board: FakeBoard, types: int, events: SimpleNamespace) -> None:
        assert types & ~board.supported_events == 0
        events.board, events.types = board, types
