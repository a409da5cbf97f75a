"""NCCL's order of calls, with stand-ins for its groups. `tests/multirank/test_nccl.py` trains with one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nep.distributed.groups import Communicator, Groups, ParkingLot
from nep.distributed.transports import nccl
from nep.distributed.transports.gloo import GlooTransport
from nep.distributed.transports.nccl import CannotAbandon, NcclChannel, NcclTransport, PendingNccl, TorchNccl

CPU = torch.device("cpu")


class Work:
    """An operation that has ended, well or not."""

    def __init__(self, result: int = 0, complete: bool = True):
        self.result, self.complete = result, complete
        self.waited = False

    def is_completed(self) -> bool:
        return self.complete

    def get_future_result(self) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        if self.result:
            future.set_result(self.result)
        return future

    def wait(self) -> None:
        self.waited = True


class Group:
    """Takes down what is called."""

    def __init__(self, calls: list[str], name: str = "", ranks: list[int] | None = None):
        self.calls, self.name = calls, name
        self.ranks = ranks
        self.work = Work()
        self.on_abort: Callable[[], None] = lambda: None
        self.on_recv: Callable[[], None] = lambda: None

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append("start")

    def _end_coalescing(self, device: torch.device) -> Work:
        self.calls.append("end")
        return self.work

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.on_recv()
        self.calls.append(f"recv {peer}")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(f"send {peer}")

    def _allgather_base(self, output: torch.Tensor, inputs: torch.Tensor) -> Work:
        self.calls.append("all_gather")
        if self.ranks is not None:
            output.copy_(torch.tensor(self.ranks))
        return self.work

    def abort(self) -> None:
        self.calls.append(f"abort{self.name}")
        self.on_abort()


class Calls:
    """`NcclCalls` that take down what is called."""

    def __init__(self, calls: list[str], group: Group | None = None):
        self.calls, self.group = calls, group
        self.on_synchronize: Callable[[], None] = lambda: None

    def claim(self, device: torch.device) -> None:
        self.calls.append("claim")

    def open(self, store: Any, **arguments: Any) -> Group:
        assert self.group is not None
        self.calls.append("open")
        return self.group

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("synchronize")
        self.on_synchronize()


def made(timeout_s: float = 10.0, group: Group | None = None) -> tuple[NcclTransport, Calls, list[str]]:
    taken: list[str] = []
    if group is not None:
        group.calls = taken
    calls = Calls(taken, group)
    return NcclTransport(CPU, abandon_timeout_s=timeout_s, calls=calls), calls, taken


def wait_until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_torch_is_asked_for_a_communicator_that_does_not_block_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Backend:
        Options = lambda: SimpleNamespace(config=SimpleNamespace(blocking=None), _timeout=None)  # noqa: E731

        def __init__(self, store: object, rank: int, size: int, options: Any):
            calls.append(("backend", rank, size, options.config.blocking, options._timeout))

        def eager_connect_single_device(self, device: torch.device) -> None:
            calls.append(("connect", device))

    class Wrapper:
        BackendType = SimpleNamespace(NCCL="nccl")

        def __init__(self, store: object, rank: int, size: int):
            pass

        def _set_default_backend(self, kind: str) -> None:
            calls.append(("default", kind))

        def _register_backend(self, device: torch.device, kind: str, backend: Backend) -> None:
            calls.append(("register", device, kind))

    monkeypatch.setattr(nccl, "dist", SimpleNamespace(ProcessGroupNCCL=Backend, ProcessGroup=Wrapper))
    device = torch.device("cuda", 1)
    TorchNccl().open(object(), rank=1, size=4, timeout_s=90.0, device=device)  # type: ignore[arg-type]
    assert calls == [
        ("backend", 1, 4, 0, timedelta(seconds=90)),
        ("connect", device),
        ("default", "nccl"),
        ("register", device, "nccl"),
    ]


def test_a_channel_stands_when_its_members_have_greeted_each_other() -> None:
    transport, _, taken = made(group=Group([], ranks=[0, 1, 2]))
    channel = transport.connect("vote", object(), rank=1, size=3, timeout_s=5.0)  # type: ignore[arg-type]
    # The device is claimed in the trainer's thread, and again in the one that connects.
    assert taken == ["claim", "claim", "open", "all_gather"]
    channel.close()
    wait_until(lambda: channel.quiet)


@pytest.mark.parametrize(
    ("ranks", "work", "message"),
    [
        ([0, 2, 1], Work(), r"connects ranks \[0, 2, 1\]"),
        ([0, 1, 2], Work(complete=False), "have not greeted each other"),
        ([0, 1, 2], Work(result=2), "the communicator has failed"),
    ],
)
def test_a_channel_that_does_not_work_is_aborted(ranks: list[int], work: Work, message: str) -> None:
    group = Group([], ranks=ranks)
    group.work = work
    transport, _, taken = made(group=group)
    with pytest.raises(RuntimeError, match=message):
        transport.connect("vote", object(), rank=1, size=3, timeout_s=0.05)  # type: ignore[arg-type]
    wait_until(lambda: "abort" in taken)


def channel_of(transport: NcclTransport, group: Group, name: str = "transfer") -> NcclChannel:
    return NcclChannel(name, group, transport)


def test_sends_and_receives_are_one_operation() -> None:
    transport, _, taken = made()
    group = Group(taken)
    buffer = torch.zeros(1)
    pending = channel_of(transport, group).exchange({0: buffer}, {2: buffer, 3: buffer}, 7)
    assert taken == ["claim", "start", "recv 2", "recv 3", "send 0", "end"]
    assert pending.done() and not group.work.waited
    pending.check()
    assert group.work.waited, "the current stream has to wait for the operation"


def test_a_launch_that_fails_leaves_no_group_open() -> None:
    def fail() -> None:
        raise RuntimeError("a peer is gone")

    transport, _, taken = made()
    group = Group(taken)
    group.on_recv = fail
    pending = channel_of(transport, group).exchange({}, {2: torch.zeros(1)}, 1)
    assert taken == ["claim", "start", "end"]
    with pytest.raises(RuntimeError, match="a peer is gone"):
        pending.check()


def test_a_failed_operation_is_not_waited_for() -> None:
    """torch would then abort this communicator alone."""
    work = Work(result=2)
    pending = PendingNccl(work)
    assert pending.done()
    with pytest.raises(RuntimeError, match="result 2"):
        pending.check()
    assert not work.waited


def test_only_one_thread_launches() -> None:
    transport, _, taken = made()
    channel = channel_of(transport, Group(taken))
    channel.all_gather(torch.zeros(2), torch.zeros(1))
    refused: list[str] = []

    def launch() -> None:
        try:
            channel.exchange({}, {0: torch.zeros(1)}, 1)
        except AssertionError as error:
            refused.append(str(error))

    other = threading.Thread(target=launch, name="autograd")
    other.start()
    other.join()
    assert "thread autograd" in refused[0] and "set_multithreading_enabled" in refused[0]
    assert taken == ["claim", "all_gather"]


def groups_of(channels: list[NcclChannel]) -> Groups:
    names = ("transfer", "vote", "dispatch")
    several = {name: Communicator(name, channel, (0, 1), 0) for name, channel in zip(names, channels, strict=True)}
    return Groups(generation=1, lane=Communicator("lane", None, (0,), 0), **several)


def test_a_generation_is_aborted_together_then_synchronized_then_dropped() -> None:
    """Each abort here ends only when all have begun, as it may be where kernels wait for each other."""
    transport, calls, taken = made()
    begun = threading.Barrier(3)
    groups = [Group(taken, f" {index}") for index in range(3)]
    for group in groups:
        group.on_abort = lambda: begun.wait(10) and None
    channels = [channel_of(transport, group, f"group {index}") for index, group in enumerate(groups)]
    held: list[bool] = []
    calls.on_synchronize = lambda: held.append(all(channel._group is not None for channel in channels))
    lot = ParkingLot(transport)
    lot.park(groups_of(channels), [])
    assert sorted(taken[1:4]) == ["abort 0", "abort 1", "abort 2"]
    assert taken[4:] == ["synchronize"]
    assert held == [True], "nothing is dropped before the device has ended"
    wait_until(lambda: lot.reap() == 0)
    assert all(channel._group is None for channel in channels)


def test_parked_operations_of_an_aborted_generation_end() -> None:
    transport, _, taken = made()
    group = Group(taken)
    group.work = Work(result=2, complete=False)

    def complete() -> None:
        group.work.complete = True

    group.on_abort = complete
    channel = channel_of(transport, group)
    pending = channel.all_gather(torch.zeros(2), torch.zeros(1))
    others = [channel_of(transport, Group(taken)) for _ in range(2)]
    lot = ParkingLot(transport)
    assert not pending.ended()
    lot.park(groups_of([channel, *others]), [pending])
    wait_until(lambda: lot.reap() == 0)


def test_an_abort_that_hangs_ends_the_process() -> None:
    transport, _, taken = made(0.05)
    release = threading.Event()
    group = Group(taken)
    group.on_abort = lambda: release.wait(10) and None
    with pytest.raises(CannotAbandon, match=r"communicator transfer was not aborted in 0.05 s"):
        transport.abandon([channel_of(transport, group)])
    release.set()
    assert "synchronize" not in taken


def test_a_device_that_hangs_or_breaks_ends_the_process() -> None:
    transport, calls, taken = made(0.05)
    release = threading.Event()
    calls.on_synchronize = lambda: release.wait(10) and None
    with pytest.raises(CannotAbandon, match="cpu has not ended its kernels"):
        transport.abandon([channel_of(transport, Group(taken))])
    release.set()

    def broken() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    calls.on_synchronize = broken
    with pytest.raises(CannotAbandon, match="illegal memory access"):
        transport.abandon([channel_of(transport, Group(taken))])


def test_an_abort_that_complains_is_judged_by_the_device() -> None:
    transport, _, taken = made()

    def complain() -> None:
        raise RuntimeError("an error of another rank")

    group = Group(taken)
    group.on_abort = complain
    transport.abandon([channel_of(transport, group)])
    assert taken[-1] == "synchronize"


def test_what_is_closed_twice_is_aborted_once() -> None:
    transport, _, taken = made()
    channel = channel_of(transport, Group(taken))
    assert not channel.quiet
    channel.close()
    channel.close()
    transport.abandon([channel])
    wait_until(lambda: channel.quiet)
    assert taken.count("abort") == 1


def test_channels_of_another_transport_are_not_abandoned_in_silence() -> None:
    transport, _, _ = made()
    with pytest.raises(AssertionError, match="another transport"):
        transport.abandon([object()])  # type: ignore[list-item]
    GlooTransport("127.0.0.1").abandon([])
