"""Boards and plans of watts, as tables and as one object."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from nep.planning.power import PPM, DomainWatts, WattsPlan
from nep.power.device import PowerRange, PowerReading
from nep.power.health import HealthSignal
from nep.report.layouts import rendered
from nep.report.terminal import ranges

SCHEMA = 1
THROTTLE_NAMES = {
    "idle": "idle",
    "power_limit": "power limit",
    "software_thermal": "heat",
    "hardware_thermal": "heat (hardware)",
    "hardware_slowdown": "hardware slowdown",
    "power_brake": "power brake",
    "clocks_setting": "fixed clocks",
    "sync_boost": "sync boost",
    "other": "other",
}
_BOUNDS = {
    "none": "keeps pace",
    "slot limit": "the highest limit of a board binds",
    "domain budget": "the node's budget binds",
    "another domain": "another node is slower still",
}


@dataclass(frozen=True, kw_only=True)
class BoardState:
    """One board at one look.

    Attributes:
        slot: it is.
        name: for people.
        range_w, reading: None where it could not be read.
        signals: what is wrong with it.
        problem: why it could not be read.
    """

    slot: int
    name: str
    range_w: PowerRange | None = None
    reading: PowerReading | None = None
    signals: tuple[HealthSignal, ...] = ()
    problem: str | None = None


def boards_text(states: Sequence[BoardState], width: int) -> str:
    """The table of boards, and below it what is wrong with them."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("slot", "board"):
        table.add_column(heading, justify="right" if heading == "slot" else "left", no_wrap=heading == "slot")
    for heading in ("limit", "default", "range W", "draw", "temp", "MHz"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("slowed by")
    for state in states:
        reading, limits = state.reading, state.range_w
        if reading is None:
            table.add_row(str(state.slot), state.name, *["-"] * 6, "not readable")
            continue
        table.add_row(
            str(state.slot),
            state.name,
            f"{reading.limit_w:g}",
            "-" if limits is None else str(limits.default_w),
            "-" if limits is None else f"{limits.min_w}-{limits.max_w}",
            _number(reading.draw_w, "{:.0f}"),
            _number(reading.temperature_c, "{:.0f}"),
            _number(reading.clock_mhz, "{}"),
            ", ".join(THROTTLE_NAMES[name] for name in THROTTLE_NAMES if name in reading.throttles) or "-",
        )
    lines = [rendered(table, width)]
    for state in states:
        if state.problem is not None:
            lines.append(f"slot {state.slot}: {state.problem}")
        lines += [f"slot {state.slot}: {signal.severity}: {signal.text}" for signal in state.signals]
    return "\n".join(lines)


def watts_text(plan: WattsPlan, needed_ppm: Mapping[int, int], notes: Sequence[str], width: int) -> str:
    """What is planned: slots that are alike in one row, then each node that changes, then the job."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("slots", no_wrap=True)
    for heading in ("needed", "now W", "planned W", "speed"):
        table.add_column(heading, justify="right", no_wrap=True)
    alike: dict[tuple[int, ...], list[int]] = {}
    for slot, limit in plan.limits_w.items():
        key = (needed_ppm[slot], plan.default_w[slot], limit, plan.speeds_ppm[slot])
        alike.setdefault(key, []).append(slot)
    for (needed, default, limit, speed), slots in sorted(alike.items(), key=lambda item: item[1]):
        table.add_row(ranges(slots), _share(needed), str(default), str(limit), _share(speed))
    lines = [rendered(table, width), ""]
    lines += [_domain(domain) for domain in plan.domains if domain.after_w != domain.before_w or domain.bound != "none"]
    lines.append(
        f"job: pace {_share(min(plan.pace_before_ppm, PPM))} at the limits of now, {_share(min(plan.pace_ppm, PPM))} "
        f"as planned; predicted gain {plan.gain_ppm / PPM - 1:.1%}"
    )
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _domain(domain: DomainWatts) -> str:
    return (
        f"node {domain.domain}: {len(domain.slots)} boards, {domain.before_w} -> {domain.after_w} W of "
        f"{domain.budget_w}; pace {_share(min(domain.pace_before_ppm, PPM))} -> {_share(min(domain.pace_ppm, PPM))}; "
        f"pace per watt {domain.efficiency_ppm / PPM - 1:+.1%}; {_BOUNDS[domain.bound]}"
    )


def board_object(state: BoardState) -> dict[str, Any]:
    """One board, plain and finite."""
    limits, reading = state.range_w, state.reading
    value: dict[str, Any] = {"slot": state.slot, "name": state.name, "problem": state.problem}
    for name in ("min_w", "default_w", "max_w"):
        value[name] = None if limits is None else getattr(limits, name)
    for name in ("limit_w", "enforced_w", "draw_w", "temperature_c", "slowdown_c", "clock_mhz", "max_clock_mhz"):
        value[name] = None if reading is None else getattr(reading, name)
    for name in ("ecc_corrected", "ecc_uncorrected"):
        value[name] = None if reading is None else getattr(reading, name)
    value["throttles"] = [] if reading is None else sorted(reading.throttles)
    value["xids"] = [] if reading is None else list(reading.xids)
    value["signals"] = [
        {"kind": signal.kind, "severity": signal.severity, "value": signal.value, "text": signal.text}
        for signal in state.signals
    ]
    return value


def watts_object(plan: WattsPlan, needed_ppm: Mapping[int, int], notes: Sequence[str]) -> dict[str, Any]:
    """A plan of watts, plain and finite."""
    return {
        "slots": [
            {
                "slot": slot,
                "needed_ppm": needed_ppm[slot],
                "default_w": plan.default_w[slot],
                "limit_w": limit,
                "speed_ppm": plan.speeds_ppm[slot],
            }
            for slot, limit in plan.limits_w.items()
        ],
        "nodes": [
            {
                "node": domain.domain,
                "slots": list(domain.slots),
                "budget_w": domain.budget_w,
                "before_w": domain.before_w,
                "after_w": domain.after_w,
                "pace_before_ppm": domain.pace_before_ppm,
                "pace_ppm": domain.pace_ppm,
                "efficiency_ppm": domain.efficiency_ppm,
                "bound": domain.bound,
                "binding_slots": list(domain.binding_slots),
            }
            for domain in plan.domains
        ],
        "pace_before_ppm": plan.pace_before_ppm,
        "pace_ppm": plan.pace_ppm,
        "gain_ppm": plan.gain_ppm,
        "keeps_pace": plan.keeps_pace,
        "notes": list(notes),
    }


def _share(ppm: int) -> str:
    return f"{ppm / PPM:.3f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
