"""Plans that one slot proposes and all read."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from nep.fault_tolerance.control_store import plan_key, request_key
from nep.fault_tolerance.proposals import Proposal, newest, read_plan
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
    connections = SimpleNamespace(take=lambda: store, give_back=lambda connection: None)
    state = SimpleNamespace(plan=plan_of(2))
    return SimpleNamespace(slot=slot, store=store, requests=Requests(), state=state, connections=connections)


def test_a_proposal_is_read_by_the_others_and_asks_nobody_to_leave() -> None:
    store = Store()
    first, second = make_run(store, 0), make_run(store, 1)
    second.requests.post(store, Request(kind="join", slot=3, incarnation=2))
    proposal = Proposal(first, plan_of(4), "why")
    assert proposal.wait() == 2 and proposal.is_open(1) and not proposal.is_open(2)
    second.requests.read(store)
    known = second.requests.known
    found = newest(known, base=first.state.plan.number)
    assert found is not None and (found.slot, found.why) == (0, "why")
    assert read_plan(second, found) == plan_of(4)
    assert leaving(known, (0, 1)) == () and returners(known, 0) == {3: 2}


def test_nobody_waits_for_the_store_to_turn_to_a_plan() -> None:
    store = Store()
    first, second = make_run(store, 0), make_run(store, 1)
    Proposal(first, plan_of(4), "").wait()
    second.requests.read(store)
    second.store = None  # away: the vote has carried the request's number, so the plan must be here
    assert read_plan(second, second.requests.known[0]) == plan_of(4)


def test_plans_that_nobody_turns_to_are_not_kept() -> None:
    requests = Requests()
    for number in range(1, 20):
        requests.add(number, Request(kind="plan", slot=0, digest=str(number)), f"plan {number}")
    assert list(requests.plans) == ["16", "17", "18", "19"] and len(requests.known) == 19


def test_a_store_that_is_away_costs_the_proposal_only() -> None:
    def away() -> Store:
        raise RuntimeError("cannot be reached")

    run = make_run(Store(), 0)
    run.connections = SimpleNamespace(take=away)
    proposal = Proposal(run, plan_of(4), "")
    assert proposal.wait() == 0 and not proposal.is_open(0)


def test_a_store_that_says_nothing_costs_a_moment() -> None:
    store, answers = Store(), threading.Event()

    def take() -> Store:
        answers.wait(10)
        return store

    run = make_run(store, 0)
    run.connections.take = take
    proposal = Proposal(run, plan_of(4), "")
    assert proposal.wait(0.01) == 0 and proposal.is_open(0), "it may still come"
    answers.set()
    assert proposal.wait() == 1 and proposal.is_open(0)


def test_the_newest_for_the_plan_in_force_counts() -> None:
    proposals = [
        Request(kind="plan", slot=0, digest=str(digest), base=base) for digest, base in ((1, 5), (2, 5), (3, 6))
    ]
    assert newest(proposals, 5) == proposals[1] and newest(proposals, 7) is None
    assert Request.from_json(proposals[2].to_json()) == proposals[2]


@pytest.mark.parametrize("found", [None, "another"])
def test_a_store_that_has_lost_the_plan_is_named(found: str | None) -> None:
    store = Store()
    Proposal(make_run(store, 0), plan_of(4), "").wait()
    run = make_run(store, 1)
    request = Request.from_json(store[request_key(1)])
    if found is None:
        del store[plan_key(request.digest)]
    else:
        store[plan_key(request.digest)] = plan_of(3).canonical_json()
    with pytest.raises(RuntimeError, match=request.digest[:12]):
        read_plan(run, request)


def test_a_connection_on_which_the_store_failed_is_given_back() -> None:
    class Failing(Store):
        def compare_and_set(self, key: str, expected: str, value: str) -> str:
            raise RuntimeError("reset")

    store, back = Failing(), list[Store]()
    run = make_run(store, 0)
    run.connections.give_back = back.append
    assert Proposal(run, plan_of(4), "").wait() == 0
    assert back == [store]
