"""Tells operators when a job is degraded or unprotected, and when that is over: by a command or a webhook."""

from __future__ import annotations

import json
import logging
import queue
import shlex
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import asdict, dataclass, field
from typing import Literal

from torch.distributed import DistError

from nep.fault_tolerance.control_store import ControlStore
from nep.fault_tolerance.runtime import SlotRun
from nep.report.terminal import ranges

log = logging.getLogger(__name__)

SCHEMA = 1
_TIMEOUT_S = 10.0  # of one delivery
_RETRIES_S = (0.0, 1.0, 5.0)  # pauses before the tries
_FLUSH_S = 15.0  # what deliveries get after the end of training

Condition = Literal["whole", "degraded", "unprotected"]
Event = Condition | Literal["stopped"]


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One message; the JSON that a command reads and a webhook gets has these fields and `schema`.

    Attributes:
        event: `degraded` (slots are missing, all state is held twice), `unprotected` (some is held once: one more
            loss may need a checkpoint), `whole` (neither any more), or `stopped` (the job ended before its last step).
        text: the same for people.
        run_id: name of the job.
        step: last committed one.
        generation: which membership, from 1.
        live_slots, missing_slots: who trains, who does not.
        unprotected_intervals: pieces of state without a mirror.
        exit_code: with `stopped`, the job's.
        time: when, seconds since the epoch.
    """

    event: Event
    text: str
    run_id: str
    step: int
    generation: int
    live_slots: tuple[int, ...]
    missing_slots: tuple[int, ...]
    unprotected_intervals: int
    exit_code: int | None = None
    time: float = field(default_factory=time.time)

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)})


def target_problems(target: str) -> list[str]:
    """What is wrong with the target of alerts, a sentence each."""
    if _is_url(target):
        return [] if urllib.parse.urlsplit(target).hostname else [f"on_alert ({target}) is a URL without a host"]
    try:
        words = shlex.split(target)
    except ValueError as error:
        return [f"on_alert ({target}) is no command: {error}"]
    if not words or shutil.which(words[0]) is None:
        return [
            f"on_alert ({target}): there is no program {words[0] if words else ''!r}; give a command whose first word "
            "can be run, or an http(s) URL"
        ]
    return []


class Alerts:
    """The alerts of one trainer. Every slot notices the same; the first to reach the control store delivers.

    Args:
        target: a command (no shell; it reads the JSON from its standard input) or an http(s) URL (POST of the JSON);
            None: nobody is told.
    """

    def __init__(self, target: str | None):
        self._target = target
        self._condition: Condition | None = None  # None: of before this trainer came
        self._queue: queue.Queue[tuple[str, Alert] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def look(self, run: SlotRun, reason: str) -> None:
        """A plan has become the current one: tell if the job's condition has changed.

        Args:
            run: this slot's.
            reason: of the generation.
        """
        if self._target is None:
            return
        plan = run.state.plan
        missing, alone = _lacking(run)
        condition: Condition = "unprotected" if alone else "degraded" if missing else "whole"
        before, self._condition = self._condition, condition
        if condition == before or (before is None and condition == "whole" and run.current.number == 1):
            return
        text = f"{len(plan.slots)} of {run.wanted_members} slots train"
        if missing:
            text += f", slots {ranges(missing)} are missing"
        if alone:
            text += f"; {alone} intervals of the training state have no mirror: one more loss may need a checkpoint"
        elif plan.redundancy != "none" and run.job.num_slots > 1:
            text += "; all state is held twice"
        self._send(run, condition, f"{text} ({reason})")

    def stopped(self, run: SlotRun, line: str, exit_code: int) -> None:
        """The job ends before its last step."""
        if self._target is not None:
            self._send(run, "stopped", line, exit_code)

    def finish(self) -> None:
        """Deliver what is left, for a limited time."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_FLUSH_S)

    def _send(self, run: SlotRun, event: Event, text: str, exit_code: int | None = None) -> None:
        missing, alone = _lacking(run)
        number = 0 if run.generation is None else run.generation.number
        alert = Alert(
            event=event,
            text=f"job {run.job.run_id}, step {run.progress.tx}: {text}",
            run_id=run.job.run_id,
            step=run.progress.tx,
            generation=number,
            live_slots=run.state.plan.slots,
            missing_slots=missing,
            unprotected_intervals=alone,
            exit_code=exit_code,
        )
        key = "stopped" if event == "stopped" else f"{number}/{run.state.plan.number}/{event}"
        self._queue.put((f"alert/{key}", alert))
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, args=(run,), name="alerts", daemon=True)
            self._thread.start()

    def _deliver(self, run: SlotRun) -> None:
        connection: ControlStore | None = None
        while (item := self._queue.get()) is not None:
            key, alert = item
            mine = f"{run.slot} {alert.time}"
            try:
                connection = connection or run.connections.take()
                if connection.compare_and_set(key, "", mine) != mine:
                    continue
            except DistError:
                if run.slot != min(alert.live_slots):
                    continue  # nobody can be asked who tells; the lowest does
            assert self._target is not None
            deliver(self._target, alert)


def deliver(target: str, alert: Alert) -> bool:
    """Run the command or call the webhook, a few times if need be. Returns whether that worked; a failure is logged."""
    error = ""
    for pause_s in _RETRIES_S:
        time.sleep(pause_s)
        try:
            _post(target, alert) if _is_url(target) else _run(target, alert)
        except (OSError, subprocess.SubprocessError, urllib.error.URLError) as failure:
            error = str(failure)
        else:
            log.info("told %s: %s", target, alert.text)
            return True
    log.error("could not tell %s (%s): %s", target, error, alert.text)
    return False


def _lacking(run: SlotRun) -> tuple[tuple[int, ...], int]:
    """Slots that do not train, and how many pieces of state lack a mirror that they should have."""
    plan = run.state.plan
    missing = tuple(slot for slot in range(run.job.num_slots) if slot not in plan.slots)
    if len(plan.slots) >= run.wanted_members:
        missing = ()  # the others are in reserve
    wanted = plan.redundancy != "none" and run.job.num_slots > 1
    return missing, len(plan.unprotected(run.recipe.lines)) if wanted else 0


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _post(url: str, alert: Alert) -> None:
    request = urllib.request.Request(url, alert.to_json().encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        answer.read()


def _run(command: str, alert: Alert) -> None:
    subprocess.run(
        shlex.split(command),
        input=alert.to_json() + "\n",
        text=True,
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
