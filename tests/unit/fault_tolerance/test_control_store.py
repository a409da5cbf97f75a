"""The control store, and the facts about TCPStore that it relies on."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from nep.fault_tolerance import control_store
from nep.fault_tolerance.control_store import ControlStore, discover_job, fault_key, split_address


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)


@pytest.fixture
def store(server: dist.TCPStore) -> ControlStore:
    return ControlStore.connect(f"127.0.0.1:{server.port}", "nep/run/", 10.0)


def test_get_does_not_wait_for_an_absent_key(store: ControlStore) -> None:
    start = time.monotonic()
    assert store.get("absent") is None
    assert store.get_json("absent") is None
    assert time.monotonic() - start < 5.0  # TCPStore.get would have waited 10 s
    store.set("key", "wörd")
    assert store.get("key") == "wörd"


def test_keys_are_below_the_prefix(store: ControlStore, server: dist.TCPStore) -> None:
    store.set("a", "1")
    assert server.check(["nep/run/a"])
    assert store.at_prefix("nep/").get("run/a") == "1"
    assert store.at_prefix("nep/other/").get("a") is None


def test_compare_and_set_writes_once(store: ControlStore) -> None:
    assert store.compare_and_set("k", "", "first") == "first"
    assert store.compare_and_set("k", "", "second") == "first"
    assert store.compare_and_set("k", "other", "second") == "first"
    assert store.get("k") == "first"
    assert store.compare_and_set("k", "first", "second") == "second"
    assert store.get("k") == "second"


def test_compare_and_set_tells_an_absent_key_from_the_expectation(store: ControlStore, server: dist.TCPStore) -> None:
    assert store.compare_and_set("absent", "expected", "new") == ""
    assert store.get("absent") is None
    # Why the wrapper is needed: torch answers what was expected, as if it were there.
    assert server.compare_set("nep/run/absent", "expected", "new") == b"expected"


def test_one_writer_wins(store: ControlStore) -> None:
    results: list[str] = []
    barrier = threading.Barrier(8)

    def write(name: str) -> None:
        own = store.clone()
        barrier.wait()
        results.append(own.compare_and_set("race", "", name))

    threads = [threading.Thread(target=write, args=(f"writer {index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert set(results) == {store.get("race")}


@pytest.mark.parametrize("write", ["set", "compare_and_set"])
def test_empty_values_are_refused(store: ControlStore, server: dist.TCPStore, write: str) -> None:
    with pytest.raises(ValueError, match='"key" is empty'):
        store.set("key", "") if write == "set" else store.compare_and_set("key", "", "")
    # Why: torch takes an empty value for an absent one, and "written once" would be lost.
    server.set("empty", "")
    assert server.check(["empty"])
    assert server.compare_set("empty", "", "overwritten") == b"overwritten"


def test_wait(store: ControlStore) -> None:
    assert not store.wait("late", 0.1)
    assert not store.wait("late", 0.0)
    assert not store.wait("late", -1.0)
    other = store.clone()
    timer = threading.Timer(0.2, other.set, args=("late", "1"))
    timer.start()
    assert store.wait("late", 10.0)
    timer.join()
    assert store.wait("late", 0.0)
    assert store.get("late") == "1"  # the connection has survived the time-outs


def test_waiting_takes_no_client_time(store: ControlStore) -> None:
    before = time.thread_time()
    assert not store.wait("never", 0.5)
    # A client that polled 20 us requests would have been busy all the time.
    assert time.thread_time() - before < 0.1


def test_a_waiting_connection_blocks_itself_but_not_its_clone(store: ControlStore) -> None:
    other = store.clone()
    waiting = threading.Thread(target=store.wait, args=("awaited", 30.0))
    found: list[str | None] = []
    asking = threading.Thread(target=lambda: found.append(store.get("z")))
    waiting.start()
    time.sleep(0.3)  # it waits by now; if it does not, the next answer would come too early
    other.set("z", "1")
    asking.start()  # the same connection: only after the wait
    time.sleep(0.3)
    assert waiting.is_alive() and not found
    other.set("awaited", "1")
    waiting.join(20)
    asking.join(20)
    assert found == ["1"]


def test_a_set_is_visible_to_other_connections_when_it_returns(store: ControlStore) -> None:
    other = store.clone()
    missed = 0
    for index in range(2000):
        store.set(f"k{index}", "1")
        missed += not other.exists(f"k{index}")
    assert missed == 0  # TCPStore.set alone misses some, on a busy machine


def test_exists_means_all(store: ControlStore) -> None:
    store.set("a", "1")
    store.set("bc", "1")
    assert store.exists("bc")  # a key, not its letters
    assert store.exists(["a", "bc"])
    assert not store.exists(["a", "bc", "d"])
    assert store.exists(f"{key}" for key in ("a", "bc"))
    assert store.exists([])


def test_add(store: ControlStore) -> None:
    assert store.add("n", 3) == 3
    assert store.clone().add("n", -1) == 2


def test_the_first_fault_stays(store: ControlStore) -> None:
    assert store.raise_fault(3, {"kind": "exit", "slot": 1}) == {"kind": "exit", "slot": 1}
    assert store.clone().raise_fault(3, {"kind": "time-out", "slot": 2}) == {"kind": "exit", "slot": 1}
    assert store.get_json(fault_key(3)) == {"kind": "exit", "slot": 1}
    assert not store.exists(fault_key(4))


def test_json(store: ControlStore) -> None:
    store.set_json("decision", {"members": [0, 2]})
    assert store.get_json("decision") == {"members": [0, 2]}


def test_torch_store(store: ControlStore, server: dist.TCPStore) -> None:
    """Process groups meet below the job's prefix, on this connection, with the time-out given."""
    group = dist.PrefixStore("group/2", store.torch_store(timeout_s=0.2))
    group.set("x", "1")
    assert server.get("nep/run/group/2/x") == b"1"
    start = time.monotonic()
    with pytest.raises(dist.DistStoreError):
        group.get("absent")
    assert time.monotonic() - start < 5.0


def test_all_keys_differ() -> None:
    keys = [
        control_store.fault_key(1),
        control_store.record_key(1, 2),
        control_store.decision_key(1),
        control_store.exit_key(1),
        control_store.fence_key(1),
        control_store.finished_key(1, 2),
        control_store.end_key(),
        control_store.injected_key(1),
        control_store.job_key(),
        control_store.supervisor_key(1),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost:29500", ("localhost", 29500)),
        ("[::1]:1", ("::1", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
    ],
)
def test_split_address(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["", "host", "host:", ":29500", "host:0", "host:65536", "host:port"])
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_address(address)


def test_nobody_there() -> None:
    with socket.socket() as taken:  # but nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=r"did not answer within 0\.5 s; check that the launcher"):
            ControlStore.connect(address, "nep/", 0.5)


def test_discovery(store: ControlStore) -> None:
    assert discover_job(store.address, 5.0) is None
    store.at_prefix("").set_json(control_store.DISCOVERY_KEY, {"run_id": "r"})
    assert discover_job(store.address, 5.0) == {"run_id": "r"}


@pytest.fixture
def mortal_server() -> Iterator["subprocess.Popen[str]"]:
    """A server in another process; its first line of output is its port."""
    code = (
        "import sys, torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_a_dead_server_is_an_error_at_once(mortal_server: "subprocess.Popen[str]") -> None:
    assert mortal_server.stdout is not None
    store = ControlStore.connect(f"127.0.0.1:{mortal_server.stdout.readline().strip()}", "nep/", 30.0)
    mortal_server.kill()
    mortal_server.wait()
    for call in (lambda: store.get("a"), lambda: store.set("a", "1"), lambda: store.wait("a", 30.0)):
        start = time.monotonic()
        with pytest.raises(dist.DistNetworkError):
            call()
        assert time.monotonic() - start < 5.0
    assert issubclass(dist.DistNetworkError, dist.DistError)


def test_a_client_starts_no_thread(server: dist.TCPStore) -> None:
    """In a fresh process, since this one has threads already."""
    code = (
        "import os, json, sys\n"
        "from nep.fault_tolerance.control_store import ControlStore\n"
        "tasks = lambda: len(os.listdir('/proc/self/task'))\n"
        "before = tasks()\n"
        "store = ControlStore.connect(sys.argv[1], 'nep/', 10.0)\n"
        "store.set('a', '1'); store.wait('a', 1.0); store.get('a'); store.clone().exists('a')\n"
        "print(json.dumps([before, tasks()]))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, f"127.0.0.1:{server.port}"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert json.loads(output) == [1, 1]
