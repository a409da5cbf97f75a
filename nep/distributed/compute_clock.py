"""Clocks that stand still while a slot waits for others: what a step costs the slot itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from nep.distributed.waiting import Waiter


class ComputeClock(Protocol):
    """Seconds that a slot has computed."""

    def wait_begins(self) -> None:
        """The slot begins to wait for others."""

    def wait_ends(self) -> None:
        """It goes on."""

    def seconds(self) -> float:
        """Computed so far."""


class HostClock:
    """Computing on the host: time on the wall clock less waits.

    The processor time of the thread would leave out what a slow host costs as well: other processes on its cores.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._waited_s = 0.0
        self._waiting_since: float | None = None

    def wait_begins(self) -> None:
        """See `ComputeClock`."""
        self._waiting_since = time.perf_counter()

    def wait_ends(self) -> None:
        """See `ComputeClock`."""
        if self._waiting_since is not None:
            self._waited_s += time.perf_counter() - self._waiting_since
            self._waiting_since = None

    def seconds(self) -> float:
        """See `ComputeClock`."""
        return time.perf_counter() - self._start - self._waited_s


class CudaClock:
    """Computing on a CUDA stream: events around what is launched between two waits of the host.

    Kernels that were launched before a wait and run during it count, since the event after them is recorded before the
    wait; only the last `seconds` waits for the device.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream or torch.cuda.current_stream()
        self._stretches: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begin: torch.cuda.Event | None = self._mark()
        self._total_s = 0.0

    def wait_begins(self) -> None:
        """See `ComputeClock`."""
        if self._begin is not None:
            self._stretches.append((self._begin, self._mark()))
            self._begin = None

    def wait_ends(self) -> None:
        """See `ComputeClock`."""
        if self._begin is None:
            self._begin = self._mark()

    def seconds(self) -> float:
        """See `ComputeClock`."""
        self.wait_begins()
        self._stretches[-1][1].synchronize()
        self._total_s += sum(begin.elapsed_time(end) for begin, end in self._stretches) / 1e3
        self._stretches.clear()
        self.wait_ends()
        return self._total_s

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


def clock_for(device: torch.device) -> ComputeClock:
    """The clock of what runs on a device."""
    return CudaClock(torch.cuda.current_stream(device)) if device.type == "cuda" else HostClock()


@contextmanager
def watching(waiter: Waiter, clock: ComputeClock) -> Iterator[ComputeClock]:
    """Let a clock stand still while a waiter waits."""
    waiter.watches.append(clock)
    try:
        yield clock
    finally:
        waiter.watches.remove(clock)
