"""Signs of a sick device in what it reports: values, for whoever decides what to do about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from nep.power.device import PowerError, PowerReading

SignalKind = Literal["xid", "ecc_uncorrected", "ecc_corrected", "throttle", "temperature", "lost"]
Severity = Literal["note", "slow", "suspect", "fatal"]
"""note: for the log; slow: the slot computes slower than its limit says; suspect: results or availability are in doubt,
so it should be drained; fatal: it does not compute any more, or not rightly."""


@dataclass(frozen=True, kw_only=True)
class HealthSignal:
    """One sign.

    Attributes:
        kind: what it is.
        severity: what it means.
        value: the XID's number, new ECC errors, degrees; 0 where there is none.
        text: a sentence with what to do.
    """

    kind: SignalKind
    severity: Severity
    value: float
    text: str


_RESET = "drain the slot and reset the GPU (nvidia-smi --gpu-reset)"
_NODE = "take the node out and see its system log; a reset or a repair is due"
_APPLICATION = "the application's fault as a rule; look into its own log first"

XIDS: Mapping[int, tuple[Severity, str, str]] = MappingProxyType(
    {
        13: ("note", "graphics engine exception", _APPLICATION),
        31: ("note", "memory page fault", _APPLICATION),
        43: ("note", "the GPU stopped a channel", _APPLICATION),
        45: ("note", "channels were torn down, as after a kill", "nothing, unless others come with it"),
        46: ("fatal", "the GPU stopped processing", _RESET),
        48: ("fatal", "uncorrectable memory error", _RESET),
        62: ("fatal", "the power and clock controller halted", _RESET),
        63: (
            "suspect",
            "a memory row was marked for remapping",
            "drain the slot soon; a reset makes the remap take effect",
        ),
        64: ("fatal", "a memory row could not be remapped", _RESET),
        74: ("suspect", "NVLink error", "see nvidia-smi nvlink --errorcounters; drain the slot if it comes again"),
        79: ("fatal", "the GPU has fallen off the bus", _NODE),
        92: ("suspect", "many corrected memory errors", "drain the slot and run the field diagnostic"),
        94: ("suspect", "a contained uncorrectable memory error", "the application that hit it is lost; " + _RESET),
        95: ("fatal", "an uncontained uncorrectable memory error", _RESET),
        109: ("fatal", "a context switch timed out", _RESET),
        119: ("fatal", "the GPU's system processor does not answer", _NODE),
        120: ("fatal", "the GPU's system processor failed", _NODE),
        140: ("fatal", "unrecovered memory error", _RESET),
        154: ("suspect", "the driver recommends a recovery", "see GPU Recovery Action in nvidia-smi -q"),
    }
)
"""XID -> severity, what it is, what to do; after docs.nvidia.com/deploy/xid-errors."""


def xid_signal(xid: int) -> HealthSignal:
    """What a driver error means; one that is not known here is suspect."""
    severity, what, remedy = XIDS.get(
        xid, ("suspect", "a driver error", "see docs.nvidia.com/deploy/xid-errors and the system log")
    )
    return HealthSignal(kind="xid", severity=severity, value=xid, text=f"XID {xid}: {what}; {remedy}")


def lost_signal(error: PowerError) -> HealthSignal:
    """A device that cannot be read because it is gone."""
    return HealthSignal(kind="lost", severity="fatal", value=0, text=str(error))


def health_signals(now: PowerReading, before: PowerReading | None = None) -> tuple[HealthSignal, ...]:
    """Signs in a reading.

    Args:
        now: the reading.
        before: the one before it of the same device; None: counters of now are taken as the start.

    Returns:
        The worst first; a state that lasts (heat, thermal throttling) is named by each reading.
    """
    signals = [xid_signal(xid) for xid in now.xids]
    signals += _ecc(now, before)
    signals += _throttles(now)
    if now.enforced_w is not None and now.enforced_w < now.limit_w - 1:
        text = (
            f"the board keeps to {now.enforced_w:g} W, below its limit of {now.limit_w:g} W: another limit is lower, "
            "see the BMC or the node's power manager"
        )
        signals.append(HealthSignal(kind="throttle", severity="slow", value=now.enforced_w, text=text))
    hot, limit = now.temperature_c, now.slowdown_c
    if hot is not None and limit is not None and hot >= limit:
        text = f"{hot:g} °C, from {limit:g} °C on the board slows itself down; see its cooling, or lower its limit"
        signals.append(HealthSignal(kind="temperature", severity="slow", value=hot, text=text))
    order = ("fatal", "suspect", "slow", "note")
    return tuple(sorted(signals, key=lambda signal: order.index(signal.severity)))


def _ecc(now: PowerReading, before: PowerReading | None) -> list[HealthSignal]:
    signals = []
    if new := _more(now.ecc_uncorrected, before.ecc_uncorrected if before else now.ecc_uncorrected):
        text = f"{new} new uncorrectable memory errors; what the slot computed since is in doubt; {_RESET}"
        signals.append(HealthSignal(kind="ecc_uncorrected", severity="fatal", value=new, text=text))
    if new := _more(now.ecc_corrected, before.ecc_corrected if before else now.ecc_corrected):
        text = f"{new} new corrected memory errors; results are right, many of them announce worse"
        signals.append(HealthSignal(kind="ecc_corrected", severity="note", value=new, text=text))
    return signals


def _more(now: int | None, before: int | None) -> int:
    """How much a counter has grown; a reset board counts from 0 again."""
    if now is None or before is None:
        return 0
    return now - before if now >= before else now


def _throttles(now: PowerReading) -> list[HealthSignal]:
    found = []
    if heat := now.throttles & {"software_thermal", "hardware_thermal"}:
        text = f"clocks are lowered by heat ({', '.join(sorted(heat))}); see its cooling, or lower its limit"
        found.append(HealthSignal(kind="throttle", severity="slow", value=0, text=text))
    if now.throttles & {"power_brake"}:
        text = "the power supply asks for less (power brake); see the node's supplies, or lower limits of the domain"
        found.append(HealthSignal(kind="throttle", severity="slow", value=0, text=text))
    elif "hardware_slowdown" in now.throttles and not heat:
        text = "clocks are lowered by hardware (heat, power brake or supply); see the node's cooling and supplies"
        found.append(HealthSignal(kind="throttle", severity="slow", value=0, text=text))
    return found
