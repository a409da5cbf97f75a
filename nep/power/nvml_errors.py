"""NVML's return codes as sentences that say what to do."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nep.power.device import ErrorKind, PowerError

_RESET = "drain the slot, then nvidia-smi --gpu-reset or a reboot"
_DRIVER = "install NVIDIA's driver, or use --simulate on a machine without GPUs"
_REPORT = "run nvidia-smi to see whether it works there, and report this with its output"

# Code -> (kind, what is the matter, remedy). Codes are NVML's own (nvml.h, nvmlReturn_t).
CODES: Mapping[int, tuple[ErrorKind, str, str]] = MappingProxyType(
    {
        1: ("world", "the library is not initialised", "open the devices again"),
        2: ("world", "the value is not one that the board takes", "ask for its range (nvidia-smi -q -d POWER)"),
        3: (
            "unsupported",
            "the board does not support it",
            "notebook and consumer boards often have a fixed limit; plan without this lever",
        ),
        4: (
            "permission",
            "permission denied",
            "run the command that follows as an administrator; in a container it also needs the host's permission "
            "(CAP_SYS_ADMIN)",
        ),
        5: ("world", "the library is initialised already", _REPORT),
        6: ("missing", "there is no such device", "see nvidia-smi -L for those there are"),
        7: ("world", "a buffer was too small", _REPORT),
        8: ("lost", "external power cables are not attached", "attach them; " + _RESET),
        9: ("missing", "NVIDIA's driver is not loaded", _DRIVER),
        10: ("busy", "it took too long", "try again; if it stays so, " + _RESET),
        11: ("world", "the kernel found an interrupt problem", "see the system log; " + _RESET),
        12: ("missing", "libnvidia-ml.so.1 is not there", _DRIVER),
        13: ("unsupported", "the driver is too old for it", "update the driver"),
        14: ("lost", "the board's information memory is corrupt", "have the board repaired"),
        15: ("lost", "the GPU has fallen off the bus or is otherwise inaccessible", _RESET),
        16: ("lost", "the GPU needs a reset", _RESET),
        17: ("world", "the operating system blocked access to the GPU", "see device files, cgroup and container rules"),
        18: (
            "missing",
            "driver and library are of different versions",
            "reboot, or reload the driver after its update",
        ),
        19: ("busy", "the GPU is in use by an operation that excludes this one", "try again"),
        20: ("busy", "memory is short", "free memory of the host"),
        21: ("unsupported", "there is no data", "the board does not measure it; plan without"),
        22: ("unsupported", "a virtual GPU with memory checks does not support it", "ask the host's administrator"),
        23: ("busy", "resources of the GPU are short", "try again"),
        24: ("world", "the clock is not one that the board has", "see nvidia-smi -q -d SUPPORTED_CLOCKS"),
        25: ("missing", "library and nvidia-ml-py are of different versions", "pip install -U nvidia-ml-py"),
        26: ("unsupported", "this driver has removed the function", "pip install -U nvidia-ml-py"),
        27: ("busy", "the GPU is not ready", "try again in some seconds"),
        28: ("lost", "the GPU is not there any more", "see nvidia-smi -L; " + _RESET),
        29: ("busy", "the GPU is in a state that does not allow it", "try again; if it stays so, " + _RESET),
        30: ("unsupported", "this GPU has no such reset", "reboot the node"),
        999: ("world", "the driver does not know what went wrong", "see the system log; " + _RESET),
    }
)
GONE = frozenset({8, 14, 15, 16, 28})
"""Codes of a device that does not answer any more."""


def explained(code: int, doing: str, device: str, *, command: str | None = None) -> PowerError:
    """An NVML error as one of ours.

    Args:
        code: NVML's.
        doing: what was tried: `reading the power limit`.
        device: for people.
        command: what an administrator would type; said where permission is missing.
    """
    kind, what, remedy = CODES.get(code, ("world", f"NVML error {code}", _REPORT))
    if kind == "permission" and command is not None:
        remedy = f"{remedy}: {command}"
    return PowerError(f"{device}: {doing} failed: {what}; {remedy}", kind)
