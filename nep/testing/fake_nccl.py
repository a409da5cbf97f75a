"""A stand-in for NCCL on CPUs, to exercise what is built around it.

Payloads travel over gloo. What differs from gloo is what matters for recovery, as the source of torch and the documents
of NCCL have it: sends and receives between `_start_coalescing` and `_end_coalescing` are one operation; one whose peer
dies does not fail but stays in flight, and the device cannot be synchronised, until its communicator is aborted; then
it ends at once, and touches nothing any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nep.distributed.transports.gloo import create_process_group
from nep.distributed.waiting import PendingCall, PendingWork, WaitingThread

Note = Callable[[str], None]

_PAUSE_S = 1e-3
_SUCCESS, _COMM_ERROR = 0, 2  # torch's WorkResult


class FakeNccl:
    """`NcclCalls` without a GPU.

    Args:
        note: called with the name of every call, in order.
    """

    def __init__(self, note: Note | None = None):
        self._note = note or (lambda call: None)
        self._listener = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        self._works: list[FakeWork] = []

    def claim(self, device: torch.device) -> None:
        """See `NcclCalls`."""
        self._note(f"claim {device}")

    def open(self, store: dist.Store, *, rank: int, size: int, timeout_s: float, device: torch.device) -> FakeGroup:
        """See `NcclCalls`."""
        self._note("open")
        inner = create_process_group(store, rank=rank, size=size, timeout_s=timeout_s, listener=self._listener)
        return FakeGroup(inner, self._note, self._works)

    def synchronize(self, device: torch.device) -> None:
        """See `NcclCalls`. Never returns while some operation waits for a dead peer."""
        self._note("synchronize")
        while any(not work.is_completed() for work in self._works):
            time.sleep(_PAUSE_S)
        self._works.clear()


class FakeGroup:
    """A process group of NCCL: the calls that nep makes.

    Args:
        inner: carries the payloads.
        note: see `FakeNccl`.
        works: of the device, to be added to.
    """

    def __init__(self, inner: dist.ProcessGroup, note: Note, works: list[FakeWork]):
        self._inner = inner
        self._note = note
        self._works = works
        self._thread = WaitingThread("fake-nccl")
        self._calls: list[Callable[[], Any]] | None = None  # of a coalesced operation
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.aborted = threading.Event()

    def alltoall_base(
        self, output: torch.Tensor, inputs: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> FakeWork:
        self._note("all_to_all")
        copy = output.clone()
        work = self._inner.alltoall_base(copy, inputs, output_splits, input_splits)
        return self._launched(PendingWork(work), [(copy, output)])

    def _allgather_base(self, output: torch.Tensor, inputs: torch.Tensor) -> FakeWork:
        self._note("all_gather")
        copy = output.clone()
        return self._launched(PendingWork(self._inner._allgather_base(copy, inputs)), [(copy, output)])

    def _start_coalescing(self, device: torch.device) -> None:
        self._note("start_coalescing")
        assert self._calls is None, "groups are not nested"
        self._calls, self._copies = [], []

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._note(f"recv {peer}")
        copy = tensors[0].clone()
        self._copies.append((copy, tensors[0]))
        self._coalesced(lambda: self._inner.recv([copy], peer, tag))

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._note(f"send {peer}")
        self._coalesced(lambda: self._inner.send(tensors, peer, tag))

    def _coalesced(self, launch: Callable[[], Any]) -> None:
        assert self._calls is not None, "outside of a group NCCL would make a communicator of its own"
        self._calls.append(launch)

    def _end_coalescing(self, device: torch.device) -> FakeWork:
        self._note("end_coalescing")
        assert self._calls is not None
        launches, copies, self._calls = self._calls, self._copies, None
        waits: list[Callable[[], Any]] = []
        try:
            waits = [launch().wait for launch in launches]
        except RuntimeError as error:
            waits.insert(0, _raising(error))
        return self._launched(self._thread.submit(waits), copies)

    def _launched(
        self, pending: PendingWork | PendingCall, copies: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> FakeWork:
        work = FakeWork(pending, copies, self.aborted)
        self._works.append(work)
        self._works[:] = [one for one in self._works if not one.over]
        return work

    def abort(self) -> None:
        self._note("abort")
        self.aborted.set()
        self._thread.close()


class FakeWork:
    """An operation: done when gloo's is and went well, or once the communicator is aborted."""

    def __init__(
        self,
        pending: PendingWork | PendingCall,
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        aborted: threading.Event,
    ):
        self._pending = pending
        self._copies = copies
        self._aborted = aborted
        self._lock = threading.Lock()
        self._hangs = False
        self._result: int | None = None

    @property
    def over(self) -> bool:
        return self._result is not None

    def is_completed(self) -> bool:
        with self._lock:
            if self._result is None and not self._hangs and self._pending.done():
                try:
                    self._pending.check()
                except RuntimeError:
                    self._hangs = True  # a kernel does not know that its peer is gone
                else:
                    for copy, output in self._copies:
                        output.copy_(copy)
                    self._result = _SUCCESS
            if self._result is None and self._aborted.is_set():
                self._result = _COMM_ERROR
            return self._result is not None

    def get_future_result(self) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        if self._result is not None:
            future.set_result(self._result)
        return future

    def wait(self) -> bool:
        assert self._result == _SUCCESS, "torch would abort this communicator alone, and before the others"
        return True


def _raising(error: RuntimeError) -> Callable[[], Any]:
    def call() -> None:
        raise error

    return call
