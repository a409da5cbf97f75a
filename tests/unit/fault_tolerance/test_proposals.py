"""Plans that one slot proposes and all read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nep.fault_tolerance.control_store import plan_key
from nep.fault_tolerance.proposals import newest, propose, read_plan
from nep.fault_tolerance.requests import Request, Requests, leaving, returners
from nep.planning.cluster import Cluster
from nep.planning.plan import Plan
from nep.planning.planner import plan_from_scratch
from nep.planning.shapes import parameter_lines, preset


class Store(dict[str, str]):
    def set(self, key: str, value: str) -> None:
        self[key] = value

    def compare_and_set(self, key: str, expected: str, value: str) -> str:
        return self.setdefault(key, value)


def plan_of(slots: int) -> Plan:
    lines = parameter_lines(preset("debug"))
    return plan_from_scratch(Cluster.uniform(slots, slots), lines, num_replicas=1, global_batch_size=8)


def make_run(store: Store, slot: int) -> Any:
    return SimpleNamespace(slot=slot, store=store, requests=Requests(), state=SimpleNamespace(plan=plan_of(2)))


def test_a_proposal_is_read_by_the_others_and_asks_nobody_to_leave() -> None:
    store = Store()
    first, second = make_run(store, 0), make_run(store, 1)
    second.requests.post(store, Request(kind="join", slot=3, incarnation=2))
    assert propose(first, plan_of(4), "why") == 2
    second.requests.read(store)
    known = second.requests.known
    found = newest(known, base=first.state.plan.number)
    assert found is not None and (found.slot, found.why) == (0, "why")
    assert read_plan(second, found) == plan_of(4)
    assert leaving(known, (0, 1)) == () and returners(known, 0) == {3: 2}


def test_the_newest_for_the_plan_in_force_counts() -> None:
    proposals = [
        Request(kind="plan", slot=0, digest=str(digest), base=base) for digest, base in ((1, 5), (2, 5), (3, 6))
    ]
    assert newest(proposals, 5) == proposals[1] and newest(proposals, 7) is None
    assert Request.from_json(proposals[2].to_json()) == proposals[2]


@pytest.mark.parametrize("found", [None, "another"])
def test_a_store_that_has_lost_the_plan_is_named(found: str | None) -> None:
    store = Store()
    run = make_run(store, 0)
    propose(run, plan_of(4), "")
    request = run.requests.known[0]
    if found is None:
        del store[plan_key(request.digest)]
    else:
        store[plan_key(request.digest)] = plan_of(3).canonical_json()
    with pytest.raises(RuntimeError, match=request.digest[:12]):
        read_plan(run, request)
