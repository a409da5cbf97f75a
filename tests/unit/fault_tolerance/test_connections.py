"""Connections to the control store that are open before they are needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from nep.fault_tolerance.connections import Connections
from nep.fault_tolerance.control_store import ControlStore


class CountedStore(ControlStore):
    """Knows how many connections were opened, all clones together; opening one may have to wait for a resolver."""

    def __init__(self, store: dist.TCPStore, opened: list[str], answers: threading.Event | None = None):
        super().__init__(store, "job/")
        self.opened = opened
        self.answers = answers

    def clone(self) -> CountedStore:
        if self.answers is not None:
            self.answers.wait(20)
        clone = CountedStore(self._store.clone(), self.opened, self.answers)
        self.opened.append(threading.current_thread().name)
        return clone


@pytest.fixture
def server() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    # Whoever opens a connection when the server is gone says so on standard error, in the middle of another test.
    for thread in threading.enumerate():
        if thread.name == "connections":
            thread.join(60)


def wait_until_opened(opened: list[str], count: int) -> None:
    deadline = time.monotonic() + 30
    while len(opened) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(opened) == count


def test_nobody_waits_for_a_connection_while_some_are_ready(server: dist.TCPStore) -> None:
    answers, opened = threading.Event(), []
    answers.set()
    connections = Connections(CountedStore(server, opened, answers), ready=2, pause_s=0.0)
    wait_until_opened(opened, 3)  # its own and two that are idle
    answers.clear()
    first, second = connections.take(), connections.take()
    assert len(opened) == 3, "nothing can be opened now"
    assert first is not second
    answers.set()
    wait_until_opened(opened, 5)  # refilled by others
    assert set(opened[3:]) == {"connections"}


def test_each_taken_connection_works_by_itself(server: dist.TCPStore) -> None:
    """A connection is one lock while it waits; another one must not wait for it."""
    connections = Connections(ControlStore(server, "job/"), ready=1)
    waiting, other = connections.take(), connections.take()
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(waiting.wait("key", 20.0)))
    thread.start()
    time.sleep(0.1)
    other.set("key", "here")
    thread.join(10)
    assert results == [True]


def test_what_is_given_back_is_taken_again_before_one_is_opened(server: dist.TCPStore) -> None:
    opened: list[str] = []
    connections = Connections(CountedStore(server, opened), ready=1, pause_s=0.0)
    wait_until_opened(opened, 2)
    one = connections.take()
    wait_until_opened(opened, 3)
    connections.give_back(one)
    taken = {connections.take() for _ in range(2)}
    assert one in taken
    assert one.exists("key") is False


def test_with_none_ready_one_is_opened_when_it_is_needed(server: dist.TCPStore) -> None:
    opened: list[str] = []
    connections = Connections(CountedStore(server, opened), ready=0)
    assert len(opened) == 1
    assert connections.take().get("key") is None
    time.sleep(0.1)
    assert len(opened) == 2 and opened[1] == threading.current_thread().name


def test_threads_never_get_the_same_connection(server: dist.TCPStore) -> None:
    connections = Connections(ControlStore(server, "job/"), ready=2)
    taken: list[ControlStore] = []
    lock = threading.Lock()

    def act() -> None:
        for _ in range(3):
            connection = connections.take()
            with lock:
                taken.append(connection)

    threads = [threading.Thread(target=act) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(taken) == len({id(connection) for connection in taken}) == 9
    assert not any(connection.exists("key") for connection in taken)


def test_when_the_store_is_gone_whoever_needs_it_says_so(server: dist.TCPStore) -> None:
    class Gone(ControlStore):
        alive = True

        def clone(self) -> ControlStore:
            if not Gone.alive:
                raise dist.DistNetworkError("connection refused")
            return Gone(self._store.clone(), self.prefix)

    connections = Connections(Gone(server, "job/"), ready=1)
    Gone.alive = False
    idle = connections.take()  # the refill fails in its own thread: nothing is raised anywhere
    time.sleep(0.1)
    assert idle.get("key") is None
    with pytest.raises(RuntimeError, match="refused"):
        connections.take()
