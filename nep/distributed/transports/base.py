"""What communicators are made of: channels between members, made and given up by a transport.

A channel is one process group as one member uses it. Its operations return at once; whoever waits for them polls
(`nep.distributed.waiting`). What a failed wait means, and what giving up a generation takes, differs:

* gloo: an operation fails by itself when its peer dies (in milliseconds for those that touch the dead one, at the
  group's time-out for others) and cannot be cancelled. Giving up means to look away: groups, operations and their
  memory are parked until they have ended by themselves.
* NCCL: most operations never fail; a kernel waits for its dead peer until its communicator is aborted. Giving up means
  to abort all communicators of the generation, at once and together, to wait for the device, and to drop them; nothing
  touches their memory afterwards.

Groups are never shrunk: the next generation makes new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from nep.distributed.waiting import Pending


class Channel(Protocol):
    """One process group of several members. Only one thread launches operations."""

    @property
    def device(self) -> torch.device:
        """Where the tensors of its operations are."""

    def all_to_all(
        self, output: torch.Tensor, inputs: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Pending:
        """Uneven all-to-all along dimension 0. Every member calls it."""

    def all_gather(self, output: torch.Tensor, inputs: torch.Tensor) -> Pending:
        """`output` [size * n] gets every member's `inputs` [n], in rank order. Every member calls it."""

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], tag: int) -> Pending:
        """One group of sends and receives, by rank of the peer; at least one.

        Args:
            tag: number of the exchange on this channel, the same on all members.
        """

    def close(self) -> None:
        """No more operations; all that were launched have been waited for, or are given up."""

    @property
    def quiet(self) -> bool:
        """Whether nothing is left of it but this object (after `close`)."""


class Transport(Protocol):
    """Makes channels for one process."""

    @property
    def name(self) -> str:
        """As in `--backend`."""

    @property
    def device(self) -> torch.device:
        """Where the tensors of its channels are."""

    def connect(self, name: str, store: dist.Store, *, rank: int, size: int, timeout_s: float) -> Channel:
        """A channel between `size` members. Blocks until all have come, so it is called in a thread of its own.

        Collective: every member calls it, each with a `store` of the same prefix.

        Args:
            name: for messages and threads.
            store: where the members find each other.
            rank, size: this member's index and the number of members.
            timeout_s: the group's own time-out; finite, so that what is abandoned ends.

        Raises:
            RuntimeError: some member has not come.
        """

    def abandon(self, channels: Sequence[Channel]) -> None:
        """Give up a generation: all its channels, whatever is in flight on them.

        Raises:
            RuntimeError: they cannot be given up; this process cannot go on.
        """
