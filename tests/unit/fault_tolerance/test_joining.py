"""A trainer that comes back waits for the decision that names it, and for nothing else. The store is a real one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch.distributed as dist

from nep.fault_tolerance.control_store import ControlStore, decision_key, end_key, exit_key, request_key
from nep.fault_tolerance.joining import NobodyLeft, first_decision, join_job
from nep.fault_tolerance.membership import Drained, JobEnded
from nep.fault_tolerance.records import Decision
from nep.fault_tolerance.requests import Request, Requests

LIMIT_S = 20.0


def decision(generation: int, members: tuple[int, ...], incarnations: dict[int, int], request: int = 0) -> Decision:
    return Decision(
        generation=generation,
        members=members,
        committed=3,
        result=b"three",
        result_slots=members,
        layout=2,
        layout_digest="two",
        action="continue",
        plan="{}",
        params_versions={},
        incarnations=incarnations,
        request=request,
    )


@dataclass(frozen=True)
class Job:
    """Slot 2's second trainer, in a thread of its own."""

    store: ControlStore
    joining: Future[Decision]

    def decide(self, *what: object, **more: int) -> None:
        made = decision(*what, **more)  # type: ignore[arg-type]
        self.store.set(decision_key(made.generation), made.to_json())


@pytest.fixture(scope="module")
def opened() -> list[ControlStore]:
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    store = ControlStore(server, "")
    return [store, store.clone()]


@pytest.fixture
def job(opened: list[ControlStore], request: pytest.FixtureRequest) -> Iterator[Job]:
    store, mine = (connection.at_prefix(f"{request.node.name}/") for connection in opened)
    store.set(decision_key(1), decision(1, (0, 1, 2), {}).to_json())
    with ThreadPoolExecutor(1) as pool:
        yield Job(store, pool.submit(lambda: join_job(mine, 2, 2, Requests(), first_decision(mine, LIMIT_S), 3)))


def test_it_waits_for_a_decision_that_names_its_incarnation(job: Job) -> None:
    assert job.store.wait(request_key(1), LIMIT_S)
    asked = Request.from_json(job.store.get(request_key(1)) or "")
    assert (asked.kind, asked.slot, asked.incarnation) == ("join", 2, 2)
    job.decide(2, (0, 1, 2), {})  # made before anybody heard that the first trainer is dead
    job.decide(3, (0, 1), {})
    job.decide(4, (0, 1, 2), {2: 2}, request=1)
    assert job.joining.result(LIMIT_S).generation == 4


def test_it_asks_again_if_a_decision_has_passed_it_over(job: Job) -> None:
    assert job.store.wait(request_key(1), LIMIT_S)
    job.decide(2, (0, 1), {}, request=1)
    assert job.store.wait(request_key(2), LIMIT_S)
    job.decide(3, (0, 1, 2), {2: 2}, request=2)
    assert job.joining.result(LIMIT_S).request == 2


def test_the_job_may_end_first(job: Job) -> None:
    job.store.set(end_key(), "4")
    with pytest.raises(JobEnded) as caught:
        job.joining.result(LIMIT_S)
    assert caught.value.exit_code == 4


def test_a_decision_that_ends_the_job_lets_nobody_in(job: Job) -> None:
    """Owner and mirror of something died while it was on its way: the others write who they are and leave."""
    made = dataclasses.replace(
        decision(2, (0, 1, 2), {2: 2}, request=1), action="checkpoint", plan=None, returners=(2,)
    )
    job.store.set(decision_key(2), made.to_json())
    time.sleep(0.1)
    assert not job.joining.done()
    job.store.set(end_key(), "4")
    with pytest.raises(JobEnded):
        job.joining.result(LIMIT_S)


def test_those_who_decided_to_end_the_job_may_die_before_they_say_so(job: Job) -> None:
    made = dataclasses.replace(
        decision(2, (0, 1, 2), {2: 2}, request=1), action="checkpoint", plan=None, returners=(1, 2)
    )
    job.store.set(decision_key(2), made.to_json())
    job.store.set(exit_key(0, 1), "{}")
    with pytest.raises(NobodyLeft):
        job.joining.result(LIMIT_S)


def test_it_may_be_drained_again(job: Job) -> None:
    Requests().post(job.store, Request(kind="drain", slot=2))
    with pytest.raises(Drained):
        job.joining.result(LIMIT_S)


def test_there_may_be_nobody_left(job: Job) -> None:
    job.decide(2, (0, 1), {0: 2})
    for slot, incarnation in ((0, 1), (1, 1)):
        job.store.set(exit_key(slot, incarnation), "{}")
    assert not job.joining.done(), "the second trainer of slot 0 lives"
    job.store.set(exit_key(0, 2), "{}")
    with pytest.raises(NobodyLeft, match=r"the trainers of slots \(0, 1\) have all ended"):
        job.joining.result(LIMIT_S)


def test_a_job_without_a_plan(opened: list[ControlStore], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match=r"no plan was made within 0\.01 s"):
        first_decision(opened[0].at_prefix("empty/"), 0.01)


def test_while_enough_others_train_it_is_a_spare_and_does_not_ask_again(job: Job) -> None:
    assert job.store.wait(request_key(1), LIMIT_S)
    job.decide(2, (0, 1, 3), {}, request=1)
    time.sleep(0.6)
    assert not job.store.exists(request_key(2)) and not job.joining.done()
    job.decide(3, (0, 1, 2), {2: 2}, request=1)
    assert job.joining.result(LIMIT_S).generation == 3
