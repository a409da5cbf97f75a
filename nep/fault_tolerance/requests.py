"""Requests to a running job: who shall leave, who may come back, who has come.

A request is an entry `request/{n}` of the control store, numbered from 1 without gaps and never changed. Trainers read
them before each vote; one takes effect with the first committed step whose records all carry its number, so that all
slots obey it at the same boundary, whatever fails meanwhile. What it then asks for follows from committed state alone:
a boundary that is come to again asks for the same.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self, get_args

from nep.fault_tolerance.control_store import ControlStore, plan_key, request_key

SCHEMA = 1
Kind = Literal["drain", "undrain", "join", "plan"]
_PLANS = 4  # texts that are kept; a proposal is looked at soon, or never


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        kind: drain (the slot shall leave), undrain (it may come back), join (a trainer has come up and waits) or plan
            (the job shall go on under another plan, see `nep.fault_tolerance.proposals`).
        slot: which one; plan: who proposes it.
        incarnation: join: which trainer of the slot. drain: the one that shall leave, since its node does or is about
            to; 0: the slot shall stay away until it is undrained.
        time: when, seconds since the epoch.
        digest: plan: of its canonical JSON.
        base: plan: number of the plan that it follows; it is void once there is another.
        why: plan: JSON for whoever carries it out. drain: what asked for it, if it was no operator.
        nonce: tells equal requests apart, so that each has a number of its own.
    """

    kind: Kind
    slot: int
    incarnation: int = 0
    time: float = field(default_factory=time.time)
    digest: str = ""
    base: int = 0
    why: str = ""
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"request kind ({self.kind!r}) must be one of {', '.join(get_args(Kind))}")

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: another format.
        """
        value = json.loads(text)
        schema = value.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(f"request of schema {schema} must be of {SCHEMA}; use one release of nep everywhere")
        return cls(**value)


class Requests:
    """The requests of a job in order of their numbers, as far as they have been read. Several threads may read.

    Attributes:
        known: only ever appended to.
        plans: digest -> canonical JSON of the newest plans proposed. Read before their requests count as known: a plan
            is turned to at a boundary, where nobody may wait for the store.
    """

    def __init__(self) -> None:
        self.known: list[Request] = []
        self.plans: dict[str, str] = {}
        self._lock = threading.Lock()

    def read(self, store: ControlStore) -> int:
        """Read what is new: one round trip if nothing is. Returns the highest number."""
        while True:
            number = len(self.known) + 1
            text = store.get(request_key(number))
            if text is None:
                return len(self.known)
            request = Request.from_json(text)
            plan = store.get(plan_key(request.digest)) if request.kind == "plan" else None
            self.add(number, request, plan)

    def add(self, number: int, request: Request, plan: str | None = None) -> None:
        """The request with this number, and the plan that it proposes, unless another thread has read it meanwhile."""
        with self._lock:
            if len(self.known) != number - 1:
                return
            if plan is not None:
                self.plans[request.digest] = plan
                while len(self.plans) > _PLANS:
                    del self.plans[next(iter(self.plans))]
            self.known.append(request)

    def post(self, store: ControlStore, request: Request) -> int:
        """Put a request at the end of the queue. Returns its number."""
        mine = request.to_json()
        while True:
            number = self.read(store) + 1
            if store.compare_and_set(request_key(number), "", mine) == mine:
                self.read(store)
                return number


def drained(requests: Iterable[Request]) -> frozenset[int]:
    """Slots that shall not train, after these requests.

    One of which a certain trainer was to leave is not away any more when a later one has come.
    """
    found: dict[int, int] = {}
    for request in requests:
        if request.kind == "drain":
            found[request.slot] = request.incarnation if found.get(request.slot, 1) else 0
        elif request.kind == "undrain" or request.incarnation > found.get(request.slot, 0) > 0:
            found.pop(request.slot, None)
    return frozenset(found)


def kept_away(requests: Iterable[Request]) -> dict[int, str]:
    """Slots that stay away whichever trainer of theirs comes, until they are undrained -> who or what wanted that."""
    found: dict[int, str] = {}
    for request in requests:
        if request.kind == "drain" and not request.incarnation:
            found[request.slot] = request.why or "an operator"
        elif request.kind == "undrain":
            found.pop(request.slot, None)
    return found


def leaving(requests: Sequence[Request], slots: Sequence[int]) -> tuple[int, ...]:
    """Those of a plan's slots that shall leave it. One stays, whatever is asked: the lowest of the last."""
    wanted = drained(requests)
    gone = tuple(slot for slot in slots if slot in wanted)
    return gone if len(gone) < len(slots) else gone[1:]


def spares_first(requests: Sequence[Request], slots: Sequence[int], considered: int) -> bool:
    """Whether those that wait are to be let in before anybody leaves: all slots of a plan shall leave.

    They come beside these, so nobody has to hold everything meanwhile. It is tried once each time that this is asked
    for: whoever waits may be dead, which only a decision finds out.

    Args:
        requests: up to the one that counts.
        slots: of the plan.
        considered: number of the last request that an earlier decision has answered.
    """
    asked = drained(requests)
    newest = max((n for n, one in enumerate(requests, 1) if one.kind == "drain" and one.slot in slots), default=0)
    return asked.issuperset(slots) and newest > considered and bool(standing(requests).keys() - set(slots))


def returners(requests: Sequence[Request], considered: int) -> dict[int, int]:
    """Slots that wait to be members -> which trainer of theirs, in the order in which they asked.

    Args:
        requests: up to the one that counts.
        considered: number of the last that an earlier decision has answered; a trainer that it left out waits no more.
    """
    away, waiting = drained(requests), dict[int, int]()
    for request in requests[considered:]:
        if request.kind == "join":
            waiting.pop(request.slot, None)  # the place of the newest counts
            waiting[request.slot] = request.incarnation
    return {slot: incarnation for slot, incarnation in waiting.items() if slot not in away}


def standing(requests: Iterable[Request]) -> dict[int, int]:
    """Slots whose trainers have registered at any time and are not drained -> the newest of them.

    Members have registered, too, if they came later than the job began, and so have trainers that are dead.
    """
    known = list(requests)
    return returners(known, 0)


def taken_in(waiting: Mapping[int, int], members: Collection[int], wanted: int) -> dict[int, int]:
    """Those of the waiting that come: as many as are missing, in their order.

    So a spare goes before the new trainer of the slot that was lost, which may fail again.

    Args:
        waiting: slots -> which trainer.
        members: slots that train already.
        wanted: how many shall.
    """
    come = [slot for slot in waiting if slot not in members][: max(0, wanted - len(members))]
    return {slot: waiting[slot] for slot in come}


def incarnation_of(incarnations: Mapping[int, int], slot: int) -> int:
    """Which trainer of a slot is the member; the first where nothing is said."""
    return incarnations.get(slot, 1)
