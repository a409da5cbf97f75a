"""gloo: CPU tensors over TCP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nep.distributed.transports.base import Channel
from nep.distributed.waiting import FailedLaunch, Pending, PendingWork, WaitingThread

_CPU = torch.device("cpu")


class GlooTransport:
    """Makes gloo channels.

    Args:
        hostname: the address to listen on; by default the one that this host's name resolves to.
    """

    name = "gloo"
    device = _CPU

    def __init__(self, hostname: str | None = None):
        # One serves all groups, and making one takes 10 ms.
        if hostname is not None:
            self._listener = dist.ProcessGroupGloo.create_device(hostname=hostname)
        else:
            self._listener = dist.ProcessGroupGloo.create_default_device()

    def connect(self, name: str, store: dist.Store, *, rank: int, size: int, timeout_s: float) -> GlooChannel:
        """See `Transport.connect`."""
        group = create_process_group(store, rank=rank, size=size, timeout_s=timeout_s, listener=self._listener)
        return GlooChannel(name, group)

    def abandon(self, channels: Sequence[Channel]) -> None:
        """Look away: operations end by themselves, and are parked with their memory until then."""
        for channel in channels:
            channel.close()


def create_process_group(
    store: dist.Store, *, rank: int, size: int, timeout_s: float, listener: Any
) -> dist.ProcessGroup:
    """A gloo group that needs no default group. Blocks until all `size` members have come.

    Args:
        store, rank, size, timeout_s: see `Transport.connect`.
        listener: gloo's device.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [listener]
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    # A bare ProcessGroupGloo lacks the single-tensor calls; the wrapper has them.
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


class GlooChannel:
    """A gloo group, and a thread that waits for its sends and receives: they cannot be polled.

    Args:
        name: of the thread.
        group: the torch group.
    """

    device = _CPU

    def __init__(self, name: str, group: dist.ProcessGroup):
        self._group = group
        self._thread = WaitingThread(f"wait-{name}")

    def all_to_all(
        self, output: torch.Tensor, inputs: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Pending:
        """See `Channel`."""
        try:
            work = self._group.alltoall_base(output, inputs, output_splits, input_splits)
        except RuntimeError as error:
            return FailedLaunch(error)
        return PendingWork(work, (output, inputs))

    def all_gather(self, output: torch.Tensor, inputs: torch.Tensor) -> Pending:
        """See `Channel`."""
        try:
            work = self._group._allgather_base(output, inputs)
        except RuntimeError as error:
            return FailedLaunch(error)
        return PendingWork(work, (output, inputs))

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], tag: int) -> Pending:
        """See `Channel`."""
        calls = []
        try:
            for peer, buffer in receives.items():
                calls.append(self._group.recv([buffer], peer, tag).wait)
            for peer, buffer in sends.items():
                calls.append(self._group.send([buffer], peer, tag).wait)
        except RuntimeError as error:
            # A peer is gone already. What has been launched goes on and may still write.
            calls.insert(0, FailedLaunch(error).check)
        return self._thread.submit(calls, (dict(sends), dict(receives)))

    def close(self) -> None:
        """The waiting thread ends when the last operation has."""
        self._thread.close()

    @property
    def quiet(self) -> bool:
        """Whether no operation is being waited for any more."""
        return not self._thread.alive
