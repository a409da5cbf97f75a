"""`nep status`, `nep drain SLOT` and `nep undrain SLOT`: talk to a running job."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from nep.fault_tolerance.running_job import RunningJob, find_job
from nep.report.command_line import parse_options
from nep.report.terminal import print_text

SCHEMA = 1

_AWAY = ("drained", "down", "returning")


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """Say which step a running job is at and how its slots are."""

    job: Annotated[str | None, tyro.conf.arg(metavar="FILE|HOST:PORT")] = None
    """The job.json in a run folder, or the address of the control store; by default the newest under ./runs."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True)
class DrainOptions:
    """Let a slot leave a running job after a step. Its state moves to the others first, so nothing is lost."""

    slot: tyro.conf.Positional[int]
    """Number of the slot."""
    job: Annotated[str | None, tyro.conf.arg(metavar="FILE|HOST:PORT")] = None
    """The job.json in a run folder, or the address of the control store; by default the newest under ./runs."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True)
class UndrainOptions:
    """Let a slot come back to a running job: one that was drained, or one that died and was left out."""

    slot: tyro.conf.Positional[int]
    """Number of the slot."""
    job: Annotated[str | None, tyro.conf.arg(metavar="FILE|HOST:PORT")] = None
    """The job.json in a run folder, or the address of the control store; by default the newest under ./runs."""
    json: bool = False
    """Print one JSON object."""


def status(arguments: Sequence[str]) -> int:
    """`nep status`."""
    options = parse_options(StatusOptions, prog="nep status", arguments=arguments)
    job = RunningJob(find_job(options.job))
    found = _status(job)
    print_text(json.dumps(found) if options.json else _page(found))
    return 0


def drain(arguments: Sequence[str]) -> int:
    """`nep drain`."""
    options = parse_options(DrainOptions, prog="nep drain", arguments=arguments)
    number = RunningJob(find_job(options.job)).drain(options.slot)
    _asked(options.json, "drain", options.slot, number, "leaves after the next step; nep status says when it has")
    return 0


def undrain(arguments: Sequence[str]) -> int:
    """`nep undrain`."""
    options = parse_options(UndrainOptions, prog="nep undrain", arguments=arguments)
    number = RunningJob(find_job(options.job)).undrain(options.slot)
    _asked(options.json, "undrain", options.slot, number, "comes back as soon as its process is up")
    return 0


def _asked(as_json: bool, kind: str, slot: int, number: int, what: str) -> None:
    if as_json:
        print_text(json.dumps({"schema": SCHEMA, "kind": kind, "slot": slot, "request": number}))
    else:
        print_text(f"request {number}: slot {slot} {what}")


def _status(job: RunningJob) -> dict[str, Any]:
    decision, progress = job.decision(), job.progress()
    return {
        "schema": SCHEMA,
        "run_id": job.address.run_id,
        "store_address": job.address.store_address,
        "exit_code": job.exit_code,
        "generation": decision.generation if decision else None,
        "reason": decision.reason if decision else "",
        "step": progress.get("step", 0),
        "steps": progress.get("steps"),
        "loss": progress.get("loss"),
        "unprotected_since_step": progress.get("unprotected"),
        "slots": [dataclasses.asdict(slot) for slot in job.slots()],
    }


def _page(found: dict[str, Any]) -> str:
    state = "running" if found["exit_code"] is None else f"over, exit code {found['exit_code']}"
    of = f" of {found['steps']}" if found["steps"] else ""
    loss = "" if found["loss"] is None else f", loss {found['loss']:.4f}"
    lines = [
        f"job {found['run_id']} at {found['store_address']}: {state}",
        f"step {found['step']}{of}{loss}; generation {found['generation']} ({found['reason']})",
    ]
    if found["unprotected_since_step"] is not None:
        lines.append(
            f"unprotected since step {found['unprotected_since_step']}: some state is held once, and the loss of its "
            "owner means a checkpoint"
        )
    for slot in found["slots"]:
        # What a slot that is not there has told of its limit is out of date: others put it back.
        watts = "" if slot["limit_w"] is None or slot["state"] in _AWAY else f"{slot['limit_w']:g} W"
        lines.append(f"  slot {slot['slot']:<4} {slot['state']:<10} {watts or slot['detail']}".rstrip())
    return "\n".join(lines)
