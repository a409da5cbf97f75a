"""NCCL: CUDA tensors. Written from torch's and NCCL's documentation and source; it has not run on a GPU (docs/nccl.md).

The calls that need a GPU are those of `NcclCalls`; everything else is exercised on CPUs with a stand-in for them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nep.distributed.transports.base import Channel
from nep.distributed.waiting import FailedLaunch, Pending, PendingCall

log = logging.getLogger(__name__)

_PAUSE_S = 1e-3
_SUCCESS = 0  # torch's WorkResult


class NcclCalls(Protocol):
    """What needs a GPU."""

    def claim(self, device: torch.device) -> None:
        """Make it the current device of this thread."""

    def open(self, store: dist.Store, *, rank: int, size: int, timeout_s: float, device: torch.device) -> Any:
        """Begin to make a process group; its communicator need not be ready, but can be aborted."""

    def synchronize(self, device: torch.device) -> None:
        """Block until everything that was launched on the device has ended."""


class TorchNccl:
    """The calls as torch has them."""

    def claim(self, device: torch.device) -> None:
        """See `NcclCalls`."""
        torch.cuda.set_device(device)

    def open(
        self, store: dist.Store, *, rank: int, size: int, timeout_s: float, device: torch.device
    ) -> dist.ProcessGroup:
        """See `NcclCalls`."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        # Non-blocking: a communicator that waits for a member that died can be aborted.
        options.config.blocking = 0
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        # At once and not with the first operation: then sends and receives use this communicator, too, and no others
        # are made in secret for each pair of ranks.
        backend.eager_connect_single_device(device)
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
        return group

    def synchronize(self, device: torch.device) -> None:
        """See `NcclCalls`."""
        torch.cuda.synchronize(device)


class CannotAbandon(RuntimeError):
    """Communicators or kernels do not end. This process cannot go on; another one can take its place."""


class NcclTransport:
    """Makes NCCL channels.

    Args:
        device: of this slot.
        abandon_timeout_s: how long aborting a generation may take. Past it the process has to end.
        calls: what needs a GPU.
    """

    name = "nccl"

    def __init__(self, device: torch.device, *, abandon_timeout_s: float, calls: NcclCalls | None = None):
        self.device = device
        self.calls: NcclCalls = TorchNccl() if calls is None else calls
        self._abandon_timeout_s = abandon_timeout_s
        self._launcher: threading.Thread | None = None
        self.calls.claim(device)

    def connect(self, name: str, store: dist.Store, *, rank: int, size: int, timeout_s: float) -> NcclChannel:
        """See `Transport.connect`. The group is ready when its members have greeted each other.

        Nothing else is launched on this group meanwhile, so the greeting, too, has it to itself.
        """
        self.calls.claim(self.device)  # the current device belongs to the thread
        group = self.calls.open(store, rank=rank, size=size, timeout_s=timeout_s, device=self.device)
        channel = NcclChannel(name, group, self)
        try:
            channel.greet(rank, size, timeout_s)
        except BaseException:
            channel.close()
            raise
        return channel

    def launching(self, what: str) -> None:
        """Note that this thread launches.

        Raises:
            AssertionError: another one has done so before. NCCL's communicators are not thread-safe, and kernels of two
                communicators that two ranks launch in different orders may wait for each other.
        """
        me = threading.current_thread()
        if self._launcher is None:
            self._launcher = me
        if self._launcher is not me:
            raise AssertionError(
                f"{what} is launched by thread {me.name} and others were by {self._launcher.name}; backward has to "
                "run in the thread that called it (torch.autograd.set_multithreading_enabled(False))"
            )

    def abandon(self, channels: Sequence[Channel]) -> None:
        """Abort all communicators together, wait for the device, then drop them. See `Transport.abandon`.

        Together, each in a thread of its own: kernels of one may wait behind those of another, so that aborting one
        after the other can hang.

        Raises:
            CannotAbandon: it took too long, or the device is broken.
        """
        mine = [channel for channel in channels if isinstance(channel, NcclChannel)]
        assert len(mine) == len(channels), "channels of another transport"
        if not mine:
            return
        limit_s = self._abandon_timeout_s
        deadline = time.monotonic() + limit_s
        aborting = [channel.begin_abort() for channel in mine]
        for channel, thread in zip(mine, aborting, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise CannotAbandon(f"NCCL communicator {channel.name} was not aborted in {limit_s:g} s")
        synchronized = PendingCall([lambda: self.calls.synchronize(self.device)])
        _start(f"synchronize-{self.device}", synchronized.run).join(max(0.0, deadline - time.monotonic()))
        if not synchronized.done():
            raise CannotAbandon(f"{self.device} has not ended its kernels {limit_s:g} s after an abort")
        try:
            synchronized.check()
        except Exception as error:
            raise CannotAbandon(f"{self.device} cannot be used any more: {error}") from error
        for channel in mine:
            channel.drop()


class NcclChannel:
    """An NCCL process group with one communicator.

    Args:
        name: for messages.
        group: the torch group.
        transport: that made it.
    """

    def __init__(self, name: str, group: Any, transport: NcclTransport):
        self.name = name
        self.device = transport.device
        self._group = group
        self._transport = transport
        self._aborting: threading.Thread | None = None
        self._dropping: threading.Thread | None = None

    def greet(self, rank: int, size: int, timeout_s: float) -> None:
        """All-gather the ranks: returns once the communicator works. Every member calls it.

        Raises:
            RuntimeError: it does not, or connects others than it should.
        """
        mine = torch.full((1,), rank, dtype=torch.int64, device=self.device)
        ranks = torch.empty(size, dtype=torch.int64, device=self.device)
        work = PendingNccl(self._group._allgather_base(ranks, mine), (ranks, mine))
        deadline = time.monotonic() + timeout_s
        while not work.done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the members of {self.name} have not greeted each other in {timeout_s:g} s")
            time.sleep(_PAUSE_S)
        work.check()
        if ranks.tolist() != list(range(size)):
            raise RuntimeError(f"{self.name} connects ranks {ranks.tolist()}, which should be 0 to {size - 1}")

    def all_to_all(
        self, output: torch.Tensor, inputs: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Pending:
        """See `Channel`."""
        self._transport.launching(f"all_to_all on {self.name}")
        try:
            work = self._group.alltoall_base(output, inputs, output_splits, input_splits)
        except RuntimeError as error:
            return FailedLaunch(error)
        return PendingNccl(work, (output, inputs))

    def all_gather(self, output: torch.Tensor, inputs: torch.Tensor) -> Pending:
        """See `Channel`."""
        self._transport.launching(f"all_gather on {self.name}")
        try:
            work = self._group._allgather_base(output, inputs)
        except RuntimeError as error:
            return FailedLaunch(error)
        return PendingNccl(work, (output, inputs))

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], tag: int) -> Pending:
        """See `Channel`. NCCL knows no tags: the order of launches matches calls of both ends."""
        self._transport.launching(f"exchange on {self.name}")
        group, memory = self._group, (dict(sends), dict(receives))
        try:
            group._start_coalescing(self.device)
            try:
                for peer, buffer in receives.items():
                    group.recv([buffer], peer, tag)
                for peer, buffer in sends.items():
                    group.send([buffer], peer, tag)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # or NCCL's group would stay open for all that follows
                    group._end_coalescing(self.device)
                raise
            work = group._end_coalescing(self.device)
        except RuntimeError as error:
            return FailedLaunch(error)
        return PendingNccl(work, memory)

    def begin_abort(self) -> threading.Thread:
        """Abort the communicator in a thread: the call may block. Once is enough."""
        if self._aborting is None:
            self._aborting = _start(f"abort-{self.name}", self._abort)
        return self._aborting

    def _abort(self) -> None:
        try:
            self._group.abort()
        except Exception as error:  # torch gave up waiting for it; the caller looks at the device
            log.warning("NCCL communicator %s: %s", self.name, error)

    def drop(self) -> None:
        """Let go of the group, aborted before, in a thread: torch's watchdog is joined, which takes a while."""
        aborting = self.begin_abort()
        if self._dropping is None:
            self._dropping = _start(f"drop-{self.name}", lambda: self._let_go(aborting))

    def _let_go(self, aborting: threading.Thread) -> None:
        aborting.join()
        self._group = None

    def close(self) -> None:
        """Abort and drop, in the background. Also a healthy group is aborted: to destroy one is collective, and would
        wait without end for a member that died at the wrong moment."""
        self.drop()

    @property
    def quiet(self) -> bool:
        """Whether the group is gone."""
        return self._dropping is not None and not self._dropping.is_alive()


class PendingNccl:
    """An operation of NCCL: polled by its event, which also asks the communicator for errors.

    Args:
        work: the torch work.
        memory: the tensors it reads and writes, kept alive as long as it is.
    """

    def __init__(self, work: Any, memory: Sequence[Any] = ()):
        self._work = work
        self._memory = memory

    def done(self) -> bool:
        """See `Pending`."""
        return bool(self._work.is_completed())

    def check(self) -> None:
        """See `Pending`. Where all is well, the current stream waits for the operation, which has ended."""
        result = self._work.get_future_result()
        if result.done() and int(result.value()) != _SUCCESS:
            # Not `wait`: it would abort this communicator by itself, in this thread, before the others.
            raise RuntimeError(f"the communicator has failed (result {int(result.value())})")
        self._work.wait()

    def ended(self) -> bool:
        """See `Pending`. True after an abort, once the kernel has ended."""
        return self.done()


def _start(name: str, call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    return thread
