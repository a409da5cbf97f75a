"""Communicators and parking without a second process; `tests/multirank` has them with real groups."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from nep.distributed import groups
from nep.distributed.collectives import all_gather_bytes, sum_exact
from nep.distributed.groups import Communicator, Groups, ParkingLot, Rendezvous, build_groups
from nep.distributed.transports import gloo
from nep.distributed.waiting import FailedLaunch, Fault, Waiter, WaitingThread

WAITER = Waiter(lambda: None, 1.0)


def alone(name: str = "vote", trace: list[tuple[str, str]] | None = None) -> Communicator:
    return Communicator(name, None, (5,), 5, None if trace is None else lambda *launched: trace.append(launched))


def test_a_slot_alone_needs_no_group() -> None:
    trace: list[tuple[str, str]] = []
    communicator = alone("transfer", trace)
    assert (communicator.size, communicator.rank, communicator.quiet) == (1, 0, True)
    assert communicator.exchange({}, {}).done()
    assert trace == [("transfer", "exchange")]
    sent: list[str] = []
    assert all_gather_bytes(communicator, b"abc", WAITER, "a test", lambda: sent.append("sent")) == [b"abc"]
    assert sent == ["sent"]
    values = torch.tensor([[2**60, 1], [0, -3]])
    assert torch.equal(sum_exact(communicator, values, WAITER, "a test"), values)


def test_what_was_built_before_a_fault_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups stand when the generation breaks, and the third comes late: the threads of all must end, and the
    store's connection is free again."""
    built: list[object] = []
    threads: list[WaitingThread] = []
    release, free = threading.Event(), threading.Event()

    class Recorded(WaitingThread):
        def __init__(self, name: str):
            super().__init__(name)
            threads.append(self)

    def create(store: object, *, rank: int, size: int, timeout_s: float, listener: object) -> object:
        built.append(object())
        if len(built) == 3:
            release.wait(10)
        return built[-1]

    for module in (groups, gloo):
        monkeypatch.setattr(module, "WaitingThread", Recorded)
    monkeypatch.setattr(gloo, "create_process_group", create)
    with pytest.raises(Fault, match="slot 3 has ended"):
        build_groups(
            Rendezvous(
                generation=2,
                slot=0,
                store=dist.HashStore(),
                transport=gloo.GlooTransport("127.0.0.1"),
                waiter=Waiter(lambda: "slot 3 has ended" if len(built) > 2 else None, 10.0),
                group_timeout_s=10.0,
                rebuild_timeout_s=10.0,
                finished=free.set,
            ),
            slots=(0, 1),
            replica=(0, 1),
            lane=(0,),
        )
    assert not free.is_set(), "the third is still being built on the connection"
    release.set()
    assert free.wait(10)
    assert sorted(thread._thread.name for thread in threads) == [
        "build-groups-2", "wait-dispatch-0", "wait-transfer", "wait-vote",
    ]  # fmt: skip
    deadline = time.monotonic() + 10
    while any(thread.alive for thread in threads):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_several_slots_need_one() -> None:
    with pytest.raises(ValueError, match="communicator vote with 2 slots"):
        Communicator("vote", None, (0, 1), 0)


class Operation:
    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return True

    def check(self) -> None:
        raise RuntimeError("failed")

    def ended(self) -> bool:
        return self.over


def test_a_generation_stays_parked_until_all_its_operations_have_ended() -> None:
    lot, operations = ParkingLot(), [Operation(), Operation()]
    parked = Groups(generation=1, **{name: alone(name) for name in ("transfer", "vote", "dispatch", "lane")})
    lot.park(parked, operations)
    lot.park(None, [FailedLaunch(RuntimeError())])
    assert lot.reap() == 1, "what never started has ended"
    operations[0].over = True
    assert lot.reap() == 1
    operations[1].over = True
    assert lot.reap() == 0


def test_a_generation_stays_parked_while_its_threads_wait() -> None:
    class Busy:
        """A communicator whose thread has something left to wait for."""

        def __init__(self) -> None:
            self.closed = False
            self.quiet = False

        def close(self) -> None:
            self.closed = True

    lot, busy = ParkingLot(), Busy()
    others = {name: alone(name) for name in ("vote", "dispatch", "lane")}
    lot.park(Groups(generation=1, transfer=busy, **others), [])  # type: ignore[arg-type]
    assert busy.closed and lot.reap() == 1
    busy.quiet = True
    assert lot.reap() == 0


def test_a_thread_is_alive_until_it_is_closed() -> None:
    thread = WaitingThread("a test")
    assert thread.alive
    thread.close()
    thread._thread.join(10)
    assert not thread.alive
