"""How a trainer that comes back becomes a member: it registers, and runs nothing until a decision names it."""

from __future__ import annotations

import time

from nep.fault_tolerance.control_store import FIRST_GENERATION, ControlStore, decision_key, end_key, exit_key
from nep.fault_tolerance.membership import Drained, JobEnded, LeftOut
from nep.fault_tolerance.records import Decision
from nep.fault_tolerance.requests import Request, Requests, drained, incarnation_of

_POLL_S = 0.005
_SLOW_POLL_S = 0.25
_TRIES = 3


class NobodyLeft(RuntimeError):
    """All members have ended: there is nothing to come back to."""


def newest_decision(store: ControlStore, known: Decision) -> Decision:
    """The last decision that stands, which may be the known one."""
    while (text := store.get(decision_key(known.generation + 1))) is not None:
        known = Decision.from_json(text)
    return known


def first_decision(store: ControlStore, timeout_s: float) -> Decision:
    """The one that founded the job.

    Raises:
        RuntimeError: there is none in time.
    """
    if not store.wait(decision_key(FIRST_GENERATION), timeout_s):
        raise RuntimeError(f"no plan was made within {timeout_s:g} s; see the logs of the other slots")
    text = store.get(decision_key(FIRST_GENERATION))
    assert text is not None
    return Decision.from_json(text)


def join_job(
    store: ControlStore, slot: int, incarnation: int, requests: Requests, known: Decision, wanted: int
) -> Decision:
    """Register, and wait for the decision that makes this trainer a member.

    The members see the request at the end of a step, or in a recovery that comes before; a step may be long, so there
    is no limit but the end of the job. While enough others train this one is a spare.

    Args:
        requests: filled with those there are.
        known: any decision, the newer the better.
        wanted: how many slots shall train.

    Raises:
        JobEnded: it has ended first.
        Drained: the slot is drained; it was not asked for any more.
        LeftOut: decision after decision has passed it over.
        NobodyLeft: nobody is there to decide.
    """
    number = requests.post(store, Request(kind="join", slot=slot, incarnation=incarnation))
    tries, look_at = 1, 0.0
    while True:
        known = newest_decision(store, known)
        named = slot in known.members and incarnation_of(known.incarnations, slot) == incarnation
        if named and known.action == "continue":
            return known  # else the others end the job
        now = time.monotonic()
        if now >= look_at:
            look_at = now + _SLOW_POLL_S
            ended = store.get(end_key())
            if ended is not None:
                raise JobEnded(int(ended))
            requests.read(store)
            if slot in drained(requests.known):
                raise Drained(f"slot {slot} is drained again before it came back")
            # Those that come back with this one wait as it does.
            able = [one for one in known.members if not named or one not in known.returners]
            members = [exit_key(one, incarnation_of(known.incarnations, one)) for one in able]
            if store.exists(members) and newest_decision(store, known) is known:
                raise NobodyLeft(f"slot {slot} cannot come back: the trainers of slots {known.members} have all ended")
            if known.request >= number and len(known.members) < wanted:
                tries += 1
                if tries > _TRIES:
                    raise LeftOut(f"slot {slot} was passed over {_TRIES} times; see the log of slot {known.members[0]}")
                number = requests.post(store, Request(kind="join", slot=slot, incarnation=incarnation))
        time.sleep(_POLL_S)
