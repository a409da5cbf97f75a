"""Waiting without process groups: until done, until a fault, until the deadline."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from nep.distributed.waiting import (
    FailedLaunch,
    Fault,
    Nothing,
    Pending,
    PendingCall,
    PendingWork,
    Waiter,
    WaitingThread,
)


class Operation:
    """Is done after a number of looks; then it may turn out to have failed."""

    def __init__(self, looks: int, error: Exception | None = None):
        self.looks = looks
        self.error = error

    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def check(self) -> None:
        assert self.looks < 0, "only after done()"
        if self.error is not None:
            raise self.error

    def ended(self) -> bool:
        return self.looks < 0


def never() -> Operation:
    return Operation(10**9)


def test_a_wait_that_ends_well_parks_nothing() -> None:
    waiter = Waiter(lambda: None, 10.0)
    waiter.wait(Operation(5), "a test")
    waiter.wait(Nothing(), "a test")
    assert waiter.parked == []


def test_what_is_done_already_counts_even_after_a_fault() -> None:
    """An operation that ended well has ended well: only waiting is given up."""
    waiter = Waiter(lambda: "too late", 0.0)
    waiter.wait(Operation(0), "a test")
    assert waiter.parked == []


def test_a_fault_ends_the_wait_and_parks_the_operation() -> None:
    looks = iter([None, None, "slot 3 has ended"])
    waiter = Waiter(lambda: next(looks), 10.0)
    operation = never()
    with pytest.raises(Fault, match=r"slot 3 has ended.*while waiting for the vote") as caught:
        waiter.wait(operation, "the vote")
    assert caught.value.kind == "flag"
    assert waiter.parked == [operation]


@pytest.mark.parametrize("own", [True, False])
def test_the_deadline_ends_the_wait(own: bool) -> None:
    waiter = Waiter(lambda: None, 100.0 if own else 0.05)
    operation = never()
    start = time.monotonic()
    with pytest.raises(Fault, match=r"the vote made no progress for 0\.05 s") as caught:
        waiter.wait(operation, "the vote", 0.05 if own else None)
    assert caught.value.kind == "deadline" and waiter.parked == [operation]
    assert 0.05 <= time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("error", "said"),
    [(RuntimeError("Connection closed\nby peer\n"), "Connection closed"), (ValueError(), "ValueError")],
)
def test_a_failed_operation_is_a_fault_with_the_first_line(error: Exception, said: str) -> None:
    """Parked nevertheless: what has failed may not have ended."""
    waiter = Waiter(lambda: None, 10.0)
    failed: list[Pending] = [Operation(3, error), FailedLaunch(error)]
    for operation in failed:
        with pytest.raises(Fault) as caught:
            waiter.wait(operation, "the vote")
        assert caught.value.kind == "peer" and caught.value.detail == f"the vote failed: {said}"
        assert caught.value.__cause__ is error
    assert waiter.parked == failed


class Held:
    """Stands for groups and activations of a broken generation."""


def failed_call(held: Held) -> Pending:
    def call() -> None:
        raise RuntimeError("reset by peer" if held else "")

    pending = PendingCall([call])
    pending.run()
    return pending


def failed_launch(held: Held) -> Pending:
    """As in `Communicator.exchange`: the frame in which the launch fails has the group."""
    try:
        raise RuntimeError("reset by peer")
    except RuntimeError as error:
        return FailedLaunch(error) if held else Nothing()


def failed_later(held: Held) -> Pending:
    return Operation(0, RuntimeError("reset by peer"))


@pytest.mark.parametrize("fail", [failed_call, failed_launch, failed_later])
def test_a_fault_that_is_kept_lets_go_of_what_its_frames_held(fail: Callable[[Held], Pending]) -> None:
    """A trainer keeps its last fault until the next, and what is parked may be for long."""
    held: list[weakref.ref[Held]] = []
    waiter = Waiter(lambda: None, 10.0)

    def work() -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        waiter.wait(fail(mine), "a vote")
        raise AssertionError(mine)

    gc.disable()
    try:
        try:
            work()
        except Fault as broken:
            kept = broken.without_frames()
            assert held[0]() is not None
        if fail is failed_call:  # the call itself refers to it
            waiter.parked.clear()
        assert held[0]() is None, "not even a cycle may hold it"
    finally:
        gc.enable()
    assert kept.kind == "peer" and "reset by peer" in kept.detail


@pytest.mark.parametrize("fail", [failed_call, failed_launch])
def test_a_failed_operation_that_nobody_waited_for_lets_go_too(fail: Callable[[Held], Pending]) -> None:
    """Transfers are launched ahead; a fault leaves them behind."""
    mine = Held()
    held = weakref.ref(mine)
    gc.disable()
    try:
        pending = fail(mine)
        assert pending.done()
        del mine
        if fail is failed_call:  # the call itself refers to it
            del pending
        assert held() is None
    finally:
        gc.enable()


def test_a_call_that_failed_is_done_but_has_ended_only_when_the_others_have() -> None:
    """Receives that follow a failed one may still write to their buffers."""
    release, made = threading.Event(), []

    def fails() -> None:
        raise OSError("first")

    def slow() -> None:
        release.wait(10)
        made.append("slow")
        raise OSError("second")

    thread = WaitingThread("a test")
    pending = thread.submit([fails, slow, lambda: made.append("last")])
    with pytest.raises(Fault, match="first"):
        Waiter(lambda: None, 10.0).wait(pending, "receives")
    assert pending.done() and not pending.ended() and made == []
    release.set()
    wait_until(pending.ended)
    assert made == ["slow", "last"]
    with pytest.raises(OSError, match="first"):
        pending.check()
    thread.close()


def test_a_call_returns_a_value_and_keeps_its_memory_while_it_runs() -> None:
    memory = [bytearray(8)]
    pending = PendingCall([lambda: 1, lambda: 2], memory)
    assert not pending.done() and not pending.ended()
    pending.run()
    pending.check()
    assert pending.value == 2 and pending.ended()


def test_a_waiting_thread_works_in_order_and_ends_after_what_it_has() -> None:
    made: list[int] = []
    thread = WaitingThread("a test")
    calls = [thread.submit([lambda number=number: made.append(number)]) for number in range(20)]
    thread.close()
    wait_until(lambda: not thread.alive)
    assert made == list(range(20)) and all(call.ended() for call in calls)


def test_work_is_polled_and_then_asked_for_its_error() -> None:
    class Work:
        completed = False

        def is_completed(self) -> bool:
            return self.completed

        def wait(self) -> None:
            raise RuntimeError("reset by peer")

    work = Work()
    pending = PendingWork(work)
    assert not pending.done() and not pending.ended()
    work.completed = True
    with pytest.raises(Fault, match="reset by peer"):
        Waiter(lambda: None, 10.0).wait(pending, "an all-gather")
    assert pending.ended()


def wait_until(condition: object, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)
