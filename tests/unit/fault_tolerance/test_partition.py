"""What a partition from the control store does to those who talk to it: they go on without, and come back."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from nep.distributed.timeouts import SupervisorTimeouts, Timeouts
from nep.fault_tolerance.bulletin import StepBoard, follow_requests
from nep.fault_tolerance.connections import Connections
from nep.fault_tolerance.control_store import ControlStore, exit_key, lease_key, step_key
from nep.fault_tolerance.detection import FaultWatch
from nep.fault_tolerance.job import JobSpec
from nep.fault_tolerance.keepalive import give_up_after
from nep.fault_tolerance.membership import agree
from nep.fault_tolerance.records import Decision, Progress
from nep.fault_tolerance.requests import Request, Requests
from nep.fault_tolerance.supervisor_link import StoreLink
from nep.testing.store_proxy import StoreProxy

LIMIT_S = 20.0
# How the network goes away, and how it comes back.
PARTITIONS: dict[str, tuple[Callable[[StoreProxy], None], Callable[[StoreProxy], None]]] = {
    "reset": (StoreProxy.cut, StoreProxy.mend),
    "refused": (lambda proxy: proxy.cut(refuse=True), StoreProxy.mend),
    "held back": (StoreProxy.stall, StoreProxy.mend),
    "forgotten": (StoreProxy.stall, lambda proxy: proxy.mend(forget=True)),
}


@pytest.fixture(scope="module")
def direct() -> ControlStore:
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    return ControlStore(server, "job/")


@pytest.fixture
def proxy(direct: ControlStore) -> Iterator[StoreProxy]:
    host, _, port = direct.address.rpartition(":")
    proxy = StoreProxy(host, int(port))
    yield proxy
    proxy.close()  # or threads that wait for the store would try again when the interpreter ends
    for thread in threading.enumerate():
        if thread.name == "connections":
            thread.join(20)


@pytest.fixture
def store(proxy: StoreProxy, direct: ControlStore, request: pytest.FixtureRequest) -> ControlStore:
    return ControlStore.connect(proxy.address, f"{request.node.name}/", 5.0)


@pytest.fixture
def outside(direct: ControlStore, request: pytest.FixtureRequest) -> ControlStore:
    """The same keys, past the proxy."""
    return direct.at_prefix(f"{request.node.name}/")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.soak] * (kind in ("held back", "refused"))) for kind in PARTITIONS]
)
def test_all_who_listen_and_tell_come_back(
    kind: str, proxy: StoreProxy, store: ControlStore, outside: ControlStore
) -> None:
    leave, come_back = PARTITIONS[kind]
    connections, requests = Connections(store, ready=2), Requests()
    board, watch = StepBoard(connections), FaultWatch(connections, 1)
    follow_requests(connections, requests)
    board.tell(step=1)
    until(lambda: outside.exists(step_key()))
    leave(proxy)
    board.tell(step=2)
    outside.raise_fault(1, {"reason": "seen by others"})
    Requests().post(outside, Request(kind="drain", slot=1))
    time.sleep(0.3)
    assert watch.reason() is None and not requests.known, "nothing comes through"
    assert outside.get_json(step_key()) == {"step": 1}
    come_back(proxy)
    until(lambda: watch.reason() is not None)
    until(lambda: requests.known)
    board.tell(step=3)
    until(lambda: outside.get_json(step_key()) == {"step": 3})
    until(lambda: connections.take().works())


def test_idle_connections_are_opened_anew_before_they_are_needed(proxy: StoreProxy, store: ControlStore) -> None:
    connections = Connections(store, ready=3)
    until(lambda: len(connections._idle) == 3)
    mine = connections.take()
    until(lambda: len(connections._idle) == 3)
    proxy.cut()
    proxy.mend()
    assert mine.works()
    until(lambda: len(connections._idle) == 3 and not any(one._failed for one in connections._idle))
    until(lambda: not connections._refreshing.locked())
    assert all(one.works() for one in list(connections._idle))


def test_a_call_fails_at_once_or_is_patient(proxy: StoreProxy, store: ControlStore, outside: ControlStore) -> None:
    proxy.cut()
    start = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match="cannot be reached"):
        store.get("key")
    assert time.monotonic() - start < LIMIT_S / 2, "it is not patient"
    threading.Timer(0.7, proxy.mend).start()
    with store.patience(LIMIT_S):
        assert store.raise_fault(4, {"reason": "mine"}) == {"reason": "mine"}
    assert outside.get_json("fault/4") == {"reason": "mine"}
    assert time.monotonic() - start >= 0.7


def test_a_write_whose_answer_is_lost_counts_once(
    proxy: StoreProxy, store: ControlStore, outside: ControlStore
) -> None:
    """The bytes reach the server, the answer does not: the call is repeated and finds its own value."""
    before = store._ask

    def lost(question: Callable[[dist.TCPStore], object]) -> object:
        before(question)
        store._ask = before  # type: ignore[method-assign]
        proxy.cut()
        proxy.mend()
        return before(question)

    store._ask = lost  # type: ignore[method-assign, assignment]
    assert store.compare_and_set("once", "", "mine") == "mine"
    assert outside.compare_and_set("once", "", "another") == "mine"


@pytest.mark.parametrize("kind", ["reset", "forgotten"])
def test_members_agree_once_the_store_is_back(
    kind: str, proxy: StoreProxy, store: ControlStore, outside: ControlStore
) -> None:
    """A failure in a partition: two survivors wait for the store, and found the next generation together."""
    leave, come_back = PARTITIONS[kind]

    def decide(records: object, dead: set[int]) -> Decision:
        assert dead == {2}
        return Decision(
            generation=2,
            members=(0, 1),
            committed=0,
            result=None,
            result_slots=(),
            layout=1,
            layout_digest="",
            action="continue",
            plan="{}",
            params_versions={},
        )

    def survive(slot: int, connection: ControlStore) -> Decision:
        with connection.patience(LIMIT_S):
            progress = Progress(slot=slot, layout=1, layout_digest="")
            return agree(connection, 2, (0, 1, 2), progress, Timeouts(base_s=0.5), decide)

    mine = [store, store.clone()]
    leave(proxy)
    outside.set(exit_key(2), "{}")
    with ThreadPoolExecutor(2) as pool:
        joined = [pool.submit(survive, slot, mine[slot]) for slot in (0, 1)]
        time.sleep(2.5)  # more than all time-outs of an agreement
        assert not any(one.done() for one in joined)
        come_back(proxy)
        assert [one.result(LIMIT_S).members for one in joined] == [(0, 1), (0, 1)]


def test_the_kernel_watches_connections_to_the_store(store: ControlStore, proxy: StoreProxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port)) as one:
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
        assert give_up_after(proxy.port, 8.0) >= 2
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 8000
        idle, pause, probes = (
            one.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + pause * probes <= 8


@pytest.mark.parametrize("kind", ["reset", "refused"])
def test_a_supervisor_tells_a_store_that_is_out_of_reach_from_one_that_is_gone(
    kind: str, proxy: StoreProxy, outside: ControlStore, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    leave, come_back = PARTITIONS[kind]
    spec = JobSpec(
        slot=1, num_slots=2, slots_per_node=2, run_id="x", store_address=proxy.address, run_dir=tmp_path, joins=True
    )
    said: list[str] = []
    timeouts = dataclasses.replace(SupervisorTimeouts.from_base(1.0), grace_s=1.5, slow_poll_s=0.05)
    link = StoreLink(spec, timeouts, said.append)
    link.connect()
    plain = outside.at_prefix(spec.prefix)
    link.renew()
    first = plain.get(lease_key(1))
    assert first is not None and not link.away_s
    leave(proxy)
    until(lambda: link.ask(lambda store: store.exists("key"), None) is None)
    assert link.away_s and link.is_refused == (kind == "refused") and not link.is_gone
    time.sleep(1.6)
    assert link.is_gone == (kind == "refused")
    assert ("is gone" in said[0]) == (kind == "refused")
    come_back(proxy)
    until(lambda: link.ask(lambda store: store.exists("key"), None) is not None)
    assert not link.away_s and not link.is_gone and "can be reached again" in said[1] and len(said) == 2
    link.renew()
    assert plain.get(lease_key(1)) != first
