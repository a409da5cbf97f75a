"""Seconds that a slot computes, waits left out."""

from __future__ import annotations

import time

import pytest

from nep.distributed.compute_clock import HostClock, watching
from nep.distributed.waiting import Fault, Nothing, Waiter


class Slow(Nothing):
    """Done after a while."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def done(self) -> bool:
        return time.monotonic() > self._until


def test_a_wait_does_not_count_and_what_lies_between_does() -> None:
    waiter = Waiter(lambda: None, 10.0)
    before = time.perf_counter()
    with watching(waiter, HostClock()) as clock:
        time.sleep(0.05)
        waiter.wait(Slow(0.2), "a message")
        time.sleep(0.05)
        computed = clock.seconds()
    total = time.perf_counter() - before
    assert 0.1 <= computed <= total - 0.19
    waiter.wait(Slow(0.1), "another one")
    assert clock.seconds() >= computed + 0.1, "nobody tells it any more"


def test_a_wait_that_is_given_up_has_ended_too() -> None:
    waiter = Waiter(lambda: "somebody failed", 10.0)
    with watching(waiter, HostClock()) as clock:
        with pytest.raises(Fault):
            waiter.wait(Slow(1.0), "a message")
        before = clock.seconds()
        time.sleep(0.02)
        assert clock.seconds() >= before + 0.02
    assert not waiter.watches
