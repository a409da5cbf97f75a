"""A running job as an operator sees it from outside: where it is, how its slots are, and what may be asked of them."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nep.distributed.timeouts import Timeouts
from nep.fault_tolerance.control_store import (
    FIRST_GENERATION,
    ControlStore,
    decision_key,
    discover_job,
    end_key,
    exit_key,
    power_limit_key,
    split_address,
    step_key,
    supervisor_key,
)
from nep.fault_tolerance.job import DEFAULT_TIMEOUT_BASE_S, JOB_SCHEMA
from nep.fault_tolerance.joining import newest_decision
from nep.fault_tolerance.records import Decision
from nep.fault_tolerance.requests import Request, Requests, drained, kept_away, standing
from nep.fault_tolerance.takeover import unsupervised

_CONNECT_S = 3.0
State = Literal["training", "leaving", "drained", "returning", "spare", "down"]


@dataclass(frozen=True, kw_only=True)
class JobAddress:
    """Where a job's control store is.

    Attributes:
        run_id: the job's name.
        store_address: host:port.
        prefix: of its keys.
        num_slots: of the whole job.
        slots_per_node: of its first node.
        spares: slots that are kept in reserve.
        timeout_base_s: what its time-outs are derived from.
        command: the script and its arguments, if the job has said so.
        folder: in which it was started.
    """

    run_id: str
    store_address: str
    prefix: str
    num_slots: int
    slots_per_node: int = 1
    spares: int = 0
    timeout_base_s: float = DEFAULT_TIMEOUT_BASE_S
    command: tuple[str, ...] = ()
    folder: str = "."

    @classmethod
    def from_description(cls, value: Mapping[str, Any], source: str) -> JobAddress:
        """Reads what job.json says.

        Raises:
            ValueError: it says something else.
        """
        if value.get("schema") != JOB_SCHEMA:
            raise ValueError(f"{source} has schema {value.get('schema')} and not {JOB_SCHEMA}; name a job.json of nep")
        try:
            needed = {name: value[name] for name in ("run_id", "store_address", "prefix", "num_slots")}
            optional = ("slots_per_node", "spares", "timeout_base_s", "folder")
            more = {name: value[name] for name in optional if name in value}
            return cls(**needed, **more, command=tuple(value.get("command", ())))
        except KeyError as error:
            raise ValueError(f"{source} lacks {error}; name a job.json of nep") from error


def find_job(job: str | None, runs: Path = Path("runs")) -> JobAddress:
    """The job that an operator means.

    Args:
        job: a job.json, the folder of one, or HOST:PORT of the control store; None: the newest below `runs`.
        runs: the folder in which runs make theirs.

    Raises:
        ValueError: there is none.
        RuntimeError: nobody answers at the address.
    """
    if job is None:
        found = sorted(runs.glob("*/job.json"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise ValueError(f"no job.json in {runs}/*/; start a job here, or name one: --job FILE or --job HOST:PORT")
        return _read(found[-1])
    path = Path(job)
    if path.is_dir():
        path = path / "job.json"
    if path.exists():
        return _read(path)
    if ":" not in job or "/" in job:
        raise ValueError(f"job ({job}) is no file; name the job.json in its run folder, or HOST:PORT")
    split_address(job)
    _require_answer(job)
    description = discover_job(job, _CONNECT_S)
    if description is None:
        raise ValueError(f"the control store at {job} knows of no job; name the job.json in its run folder")
    # The address by which it was reached: the job's own name for it may be one of its own host only.
    return JobAddress.from_description({**description, "store_address": job}, job)


def _read(path: Path) -> JobAddress:
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); name a job.json of nep") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is no JSON object; name a job.json of nep")
    return JobAddress.from_description(value, str(path))


def _require_answer(address: str) -> None:
    # Asked before the store's client is: that would log its tries.
    try:
        socket.create_connection(split_address(address), _CONNECT_S).close()
    except OSError as error:
        raise RuntimeError(
            f"no control store answers at {address} ({error.strerror or error}): the job is over, or cannot be reached "
            "from this host"
        ) from error


@dataclass(frozen=True, kw_only=True)
class SlotStatus:
    """One slot.

    Attributes:
        slot: its number.
        state: training; leaving (it is asked to and still trains); drained; returning (a trainer waits to be a
            member); spare (one waits, and enough others train); down.
        detail: how its last trainer ended, if one has.
        limit_w: power limit of its board, as its trainer told it last; None: it has told of none.
    """

    slot: int
    state: State
    detail: str = ""
    limit_w: float | None = None


class RunningJob:
    """A connection to a job.

    Args:
        address: where it is.

    Raises:
        RuntimeError: nobody answers there.
    """

    def __init__(self, address: JobAddress):
        self.address = address
        _require_answer(address.store_address)
        self._store = ControlStore.connect(address.store_address, address.prefix, _CONNECT_S)
        self._requests = Requests()

    @property
    def exit_code(self) -> int | None:
        """The job's, if it is over."""
        text = self._store.get(end_key())
        return None if text is None else int(text)

    def decision(self) -> Decision | None:
        """What the newest generation goes by; None while the job comes up."""
        text = self._store.get(decision_key(FIRST_GENERATION))
        return None if text is None else newest_decision(self._store, Decision.from_json(text))

    def progress(self) -> dict[str, Any]:
        """Step, steps, loss and time of a step of the last second; empty before the first."""
        found: dict[str, Any] | None = self._store.get_json(step_key())
        return found or {}

    def slots(self) -> list[SlotStatus]:
        """Every slot of the job."""
        self._requests.read(self._store)
        known, decision = self._requests.known, self.decision()
        members = decision.members if decision else tuple(range(self.address.num_slots))
        away, waiting = drained(known), standing(known)
        is_full = decision is not None and len(decision.members) >= self.address.num_slots - self.address.spares
        found = []
        for slot in range(self.address.num_slots):
            detail = self._how_it_ended(slot)
            state: State
            if slot in members:
                state, detail = ("leaving" if slot in away else "training"), ""
            elif slot in away:
                state = "drained"
            elif slot in waiting and not self._store.exists(exit_key(slot, waiting[slot])):
                state = "spare" if is_full else "returning"
            else:
                state = "down"
            told = self._store.get_json(power_limit_key(slot)) or {}
            found.append(SlotStatus(slot=slot, state=state, detail=detail, limit_w=told.get("limit_w")))
        return found

    def _how_it_ended(self, slot: int) -> str:
        incarnation, last = 1, None
        while (record := self._store.get_json(exit_key(slot, incarnation))) is not None:
            incarnation, last = incarnation + 1, record
        if last is None:
            return ""
        how = last["signal"] or f"exit code {last['status']}"
        if "by" in last:
            return f"lost with its supervisor (seen by: {last['by']}); bring it back on its node with: nep join"
        return f"trainer {last['incarnation']} ended by {how}; log {last['log']}"

    def absent(self) -> list[int]:
        """Slots that are neither here nor kept away, and whose supervisors are gone: a node may bring them back.

        It takes up to three terms of a lease to find out.
        """
        down = [one.slot for one in self.slots() if one.state == "down" or one.slot in self._gone_with_their_node()]
        return sorted(unsupervised(self._store, down, Timeouts(base_s=self.address.timeout_base_s).lease_s))

    def _gone_with_their_node(self) -> set[int]:
        """Drained slots that are so since their launcher had died or had been about to, not by an operator."""
        known = self._requests.known
        return set(drained(known)) - kept_away(known).keys()

    def kept_away(self) -> dict[int, str]:
        """Slots that stay away until they are undrained, even if their node comes back -> who or what wanted that."""
        self._requests.read(self._store)
        return kept_away(self._requests.known)

    def host_of(self, slot: int) -> str:
        """The host on which the slot's last supervisor ran; empty if it never had one."""
        text = self._store.get(supervisor_key(slot))
        return str(json.loads(text)["host"]) if text else ""

    def drain(self, slot: int) -> int:
        """Ask a slot to leave after a step. Returns the request's number.

        Raises:
            ValueError: there is no such slot, it is drained already, or no other would be left.
            RuntimeError: the job is over.
        """
        status = self._status_of(slot)
        states = {one.slot: one.state for one in self.slots()}
        if status.state in ("drained", "leaving"):
            raise ValueError(f"slot {slot} is {status.state} already")
        if [one for one, state in states.items() if state == "training"] == [slot]:
            raise ValueError(f"slot {slot} is the last one that trains; stop the job instead")
        return self._requests.post(self._store, Request(kind="drain", slot=slot))

    def undrain(self, slot: int) -> int:
        """Let a slot that was drained, or that is down, come back. Returns the request's number.

        Raises:
            ValueError: there is no such slot, or it need not come back.
            RuntimeError: the job is over.
        """
        status = self._status_of(slot)
        if status.state in ("training", "returning", "spare"):
            raise ValueError(f"slot {slot} is {status.state}; only one that is drained or down can be brought back")
        return self._requests.post(self._store, Request(kind="undrain", slot=slot))

    def _status_of(self, slot: int) -> SlotStatus:
        code = self.exit_code
        if code is not None:
            raise RuntimeError(f"job {self.address.run_id} is over (exit code {code})")
        if not 0 <= slot < self.address.num_slots:
            raise ValueError(f"slot ({slot}) is none of this job's, 0 to {self.address.num_slots - 1}")
        return next(one for one in self.slots() if one.slot == slot)
