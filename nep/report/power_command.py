"""`nep power`: boards and their limits, and watts with which a damaged job keeps pace."""

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from nep.planning.power import WattsPlan, plan_watts
from nep.power.controller import LimitsSet, PowerController
from nep.power.device import PowerDevice, PowerError, PowerReading, usable_range
from nep.power.health import health_signals, lost_signal
from nep.power.source import DeviceSource
from nep.report.command_line import parse_options
from nep.report.power_options import Board, JobSlots, PowerOptions, WattsQuestion, watts_question
from nep.report.power_table import SCHEMA, BoardState, board_object, boards_text, watts_object, watts_text
from nep.report.readers.cluster_file import slot_list
from nep.report.terminal import print_text, terminal_width

EXAMPLES = (
    ("This machine's boards, every two seconds.", "nep power --watch"),
    (
        "Slot 3 of the job has died: which limits would let its node keep pace?",
        "nep power --plan plan.json",
    ),
    ("Set them here, and hold them until Ctrl-C.", "sudo nep power --plan plan.json --apply"),
    ("Without GPUs: eight simulated B200, one of them out of use.", "nep power --simulate 8 --failed 3"),
)
EPILOG = "\n".join(["examples:", *(f"\n  # {what}\n  {command}" for what, command in EXAMPLES)])


class _NamedDevice(PowerDevice, Protocol):
    """A device that knows its product's name and can be closed."""

    @property
    def model(self) -> str: ...

    def close(self) -> None: ...


def main(arguments: Sequence[str]) -> int:
    """Runs `nep power`.

    Args:
        arguments: those after `nep power`.

    Returns:
        0; 1 if limits that were to be set were refused.

    Raises:
        ValueError: bad input, in one sentence.
        RuntimeError: boards cannot be read, in one sentence.
    """
    options = parse_options(PowerOptions, prog="nep power", arguments=arguments, epilog=EPILOG)
    options.check()
    source, devices, boards = _open(options)
    try:
        return _run(options, source, devices, boards)
    except KeyboardInterrupt:
        return 0
    finally:
        for device in devices.values():
            device.close()


def _open(options: PowerOptions) -> tuple[DeviceSource | None, dict[int, _NamedDevice], dict[int, int]]:
    """Where boards come from (None: from this process), slot -> board, and slot -> its number there."""
    wanted = slot_list(options.boards, "boards") if options.boards else None
    found: Sequence[_NamedDevice]
    source: DeviceSource | None = None
    if options.simulate is not None and options.simulate.isdecimal():
        from nep.power.simulated_file import simulated_boards

        simulated = simulated_boards(int(options.simulate))
        if wanted is not None and max(wanted) >= len(simulated):
            raise ValueError(f"boards ({options.boards}) must be 0 to {len(simulated) - 1}, those that are simulated")
        found = simulated if wanted is None else [simulated[board] for board in wanted]
    else:
        path = options.simulate
        source = DeviceSource() if path is None else DeviceSource(kind="simulated", path=str(Path(path).resolve()))
        found = source.open(wanted)
    if not found:
        raise ValueError("no boards; on a machine without GPUs say --simulate 8")
    numbers = list(range(len(found))) if wanted is None else wanted
    slots = [options.first_slot + place for place in range(len(found))]
    return source, dict(zip(slots, found, strict=True)), dict(zip(slots, numbers, strict=True))


def _run(
    options: PowerOptions,
    source: DeviceSource | None,
    devices: Mapping[int, _NamedDevice],
    boards: Mapping[int, int],
) -> int:
    before: dict[int, PowerReading] = {}
    rounds = 0
    while options.watch:
        states = _look(devices, before)
        _show(options, states, rewrite=rounds > 0)
        rounds += 1
        if rounds == options.rounds:
            return 0
        time.sleep(options.interval_s)
    states = _look(devices, before)
    if not options.plans:
        _show(options, states)
        return 0
    here = {
        state.slot: Board(
            product=devices[state.slot].model,
            range_w=state.range_w,
            usable_w=usable_range(state.range_w, state.reading),
        )
        for state in states
        if state.range_w is not None and state.reading is not None
    }
    if not here:
        raise RuntimeError(f"no board can be read; {states[0].problem}")
    question = watts_question(options, here, [slot for slot in devices if slot not in here], _job(options.job))
    plan = plan_watts(question.slots, budgets_w=question.budgets_w)
    return _answer(options, states, question, plan, PowerController(devices, source=source, boards=boards))


def _job(name: str | None) -> JobSlots | None:
    """The running job of this name; None if none is asked for."""
    if name is None:
        return None
    # Loads torch, which nothing else here needs.
    from nep.fault_tolerance.running_job import RunningJob, find_job

    job = RunningJob(find_job(name))
    training = frozenset(slot.slot for slot in job.slots() if slot.state in ("training", "leaving"))
    return JobSlots(num_slots=job.address.num_slots, training=training)


def _look(devices: Mapping[int, _NamedDevice], before: dict[int, PowerReading]) -> list[BoardState]:
    """All boards; one that cannot be read is a row as well."""
    states = []
    for slot, device in devices.items():
        try:
            limits, reading = device.range_w(), device.read()
        except PowerError as error:
            signals = (lost_signal(error),) if error.kind == "lost" else ()
            states.append(BoardState(slot=slot, name=device.name, signals=signals, problem=str(error)))
            continue
        signals = health_signals(reading, before.get(slot))
        before[slot] = reading
        states.append(BoardState(slot=slot, name=device.name, range_w=limits, reading=reading, signals=signals))
    return states


def _show(options: PowerOptions, states: Sequence[BoardState], *, rewrite: bool = False) -> None:
    text = boards_text(states, terminal_width())
    if rewrite and sys.stdout.isatty():
        text = "\x1b[H\x1b[J" + text
    print_text(text)
    if options.json:
        _print_object({"boards": [board_object(state) for state in states]})


def _answer(
    options: PowerOptions,
    states: Sequence[BoardState],
    question: WattsQuestion,
    plan: WattsPlan,
    controller: PowerController,
) -> int:
    """Says what is planned, and sets it if asked to."""
    needed = {slot.slot: slot.needed_ppm for slot in question.slots}
    print_text(boards_text(states, terminal_width()) + "\n")
    print_text(watts_text(plan, needed, question.notes, terminal_width()) + "\n")
    readable = {state.slot: state.reading.limit_w for state in states if state.reading is not None}
    local = {slot: limit for slot, limit in plan.changes_w.items() if slot in readable}
    commands = controller.commands(local)
    value: dict[str, Any] = {
        "boards": [board_object(state) for state in states],
        "watts": watts_object(plan, needed, question.notes),
        "commands": list(commands),
        "set_w": {},
        "refused": [],
    }
    code = 0
    if not local:
        print_text("nothing to set on this machine")
    elif options.apply and not options.dry_run:
        with _interrupted_by_sigterm(), controller:
            result = controller.set_limits(local)
            _say_result(result)
            value["set_w"] = {str(slot): limit for slot, limit in result.set_w.items()}
            value["refused"] = [
                {"slot": one.slot, "limit_w": one.limit_w, "kind": one.kind, "text": one.text} for one in result.refused
            ]
            code = 0 if result.complete else 1
            if result.set_w:
                _hold(options.hold_s)
        if value["set_w"]:
            print_text("limits are as they were")
    else:
        # What goes down comes first: in between, the node is not above its budget either.
        order = sorted(local, key=lambda slot: (local[slot] > readable[slot], slot))
        print_text("nothing is changed; --apply sets these limits and puts them back at its end, and so would")
        print_text("\n".join(f"  {controller.devices[slot].command(local[slot])}" for slot in order))
        print_text("with these to undo it")
        print_text("\n".join(f"  {controller.devices[slot].command(readable[slot])}" for slot in reversed(order)))
    if options.json:
        _print_object(value)
    return code


def _say_result(result: LimitsSet) -> None:
    for slot, limit in result.set_w.items():
        print_text(f"slot {slot}: limit is {limit} W")
    for refusal in result.refused:
        print_text(f"slot {refusal.slot}: {refusal.text}")
    if result.refused:
        print_text("an administrator would type")
        print_text("\n".join(f"  {command}" for command in result.commands))


def _hold(seconds: float | None) -> None:
    """Until the time is over, or Ctrl-C."""
    print_text("held until Ctrl-C" if seconds is None else f"held for {seconds:g} s")
    try:
        threading.Event().wait(seconds)
    except KeyboardInterrupt:
        return


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: limits are put back."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _print_object(value: Mapping[str, Any]) -> None:
    print(json.dumps({"schema": SCHEMA, **value}, separators=(",", ":"), allow_nan=False), flush=True)
