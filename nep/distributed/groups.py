"""Process groups of one generation. They are values that are passed on: nothing here is global."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from nep.distributed.transports.base import Channel, Transport
from nep.distributed.waiting import Nothing, Pending, PendingCall, Waiter, WaitingThread


class Communicator:
    """A channel with the slots that form it.

    Args:
        name: for messages and traces.
        channel: between the slots, or None when this slot is its only member.
        slots: members; the position in this tuple is the rank.
        slot: this slot.
        trace: called with (communicator, operation) at every launch, in order.
    """

    def __init__(
        self,
        name: str,
        channel: Channel | None,
        slots: Sequence[int],
        slot: int,
        trace: Callable[[str, str], None] | None = None,
    ):
        if channel is None and len(slots) != 1:
            raise ValueError(f"communicator {name} with {len(slots)} slots needs a channel between them")
        self.name = name
        self.channel = channel
        self.slots = tuple(slots)
        self.rank = self.slots.index(slot)
        self._rank_of = {member: index for index, member in enumerate(self.slots)}
        self._trace = trace
        self._tag = 0

    @property
    def size(self) -> int:
        return len(self.slots)

    @property
    def device(self) -> torch.device:
        """Where the tensors of its operations are; it has several members."""
        assert self.channel is not None
        return self.channel.device

    def _launched(self, operation: str) -> None:
        if self._trace is not None:
            self._trace(self.name, operation)

    def all_to_all(
        self, output: torch.Tensor, inputs: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Pending:
        """Uneven all-to-all along dimension 0. Every member calls it."""
        assert self.channel is not None
        self._launched("all_to_all")
        return self.channel.all_to_all(output, inputs, output_splits, input_splits)

    def all_gather(self, output: torch.Tensor, inputs: torch.Tensor) -> Pending:
        """`output` [size * n] gets every member's `inputs` [n], in rank order. Every member calls it."""
        assert self.channel is not None
        self._launched("all_gather")
        return self.channel.all_gather(output, inputs)

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> Pending:
        """Grouped sends and receives with those peers (slots) that have data.

        Every member calls it the same number of times (calls are numbered to match), also those that send
        and receive nothing.
        """
        self._tag += 1
        self._launched("exchange")
        if not sends and not receives:
            return Nothing()
        assert self.channel is not None
        ranks = self._rank_of
        return self.channel.exchange(
            {ranks[peer]: buffer for peer, buffer in sends.items()},
            {ranks[peer]: buffer for peer, buffer in receives.items()},
            self._tag,
        )

    def close(self) -> None:
        """No more calls."""
        if self.channel is not None:
            self.channel.close()

    @property
    def quiet(self) -> bool:
        """Whether nothing of it is at work any more (after `close`)."""
        return self.channel is None or self.channel.quiet


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The communicators of one slot in one generation. Each has one use, so none is entered in two orders.

    Attributes:
        generation: which membership they belong to.
        transfer: all members: gradient sums, parameter return, recovery.
        vote: all members: records and counts.
        dispatch: the members of this slot's replica: tokens.
        lane: the members of this slot's lane: tensor parallelism.
    """

    generation: int
    transfer: Communicator
    vote: Communicator
    dispatch: Communicator
    lane: Communicator

    @property
    def all(self) -> tuple[Communicator, ...]:
        return (self.transfer, self.vote, self.dispatch, self.lane)

    @property
    def channels(self) -> list[Channel]:
        return [communicator.channel for communicator in self.all if communicator.channel is not None]

    def close(self) -> None:
        for communicator in self.all:
            communicator.close()

    @property
    def quiet(self) -> bool:
        return all(communicator.quiet for communicator in self.all)


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """How the members of a generation find each other.

    Attributes:
        generation: which membership.
        slot: this slot.
        store: on a connection that nobody else uses until building has returned or, if it raises, until the builder
            has ended (`finished` is called then).
        transport: makes the channels.
        waiter: gives up when this generation has a fault.
        group_timeout_s: the groups' own time-out.
        rebuild_timeout_s: how long to wait for the others.
        finished: called once `store` is idle again, from another thread.
        trace: see `Communicator`.
    """

    generation: int
    slot: int
    store: dist.Store
    transport: Transport
    waiter: Waiter
    group_timeout_s: float
    rebuild_timeout_s: float
    finished: Callable[[], None] | None = None
    trace: Callable[[str, str], None] | None = None

    def meet(self, prefix: str, members: Mapping[str, Sequence[int]]) -> list[Communicator]:
        """Build communicators, one after the other, able to give up while another member is missing.

        Args:
            prefix: of the keys in the store; unique to this meeting.
            members: name -> slots.

        Raises:
            Fault: a member did not come in `rebuild_timeout_s`, or the generation has a fault.
        """
        builder = WaitingThread(f"build-groups-{self.generation}")
        built: list[Communicator] = []
        try:
            for name, slots in members.items():
                channel = self._connect(builder, prefix, name, slots) if len(slots) > 1 else None
                built.append(Communicator(name, channel, slots, self.slot, self.trace))
            return built
        except BaseException:
            self.transport.abandon([one.channel for one in built if one.channel is not None])
            raise
        finally:
            if self.finished is not None:
                builder.submit([self.finished])
            builder.close()

    def _connect(self, builder: WaitingThread, prefix: str, name: str, slots: Sequence[int]) -> Channel:
        def connect() -> Channel:
            return self.transport.connect(
                name,
                dist.PrefixStore(f"{prefix}/{name}", self.store),
                rank=list(slots).index(self.slot),
                size=len(slots),
                timeout_s=self.group_timeout_s,
            )

        pending = builder.submit([connect])
        what = f"process group {name} of generation {self.generation}"
        try:
            self.waiter.wait(pending, what, self.rebuild_timeout_s)
        except BaseException:
            builder.submit([lambda: self._discard(pending)])  # it may come late
            raise
        channel: Channel = pending.value
        return channel

    @staticmethod
    def _discard(pending: PendingCall) -> None:
        if pending.value is not None:
            pending.value.close()
            pending.value = None


def build_groups(
    rendezvous: Rendezvous, *, slots: Sequence[int], replica: Sequence[int], lane: Sequence[int]
) -> Groups:
    """Build every communicator of a generation. Collective: all `slots` call it, in any order.

    Args:
        slots, replica, lane: members of the job, of this slot's replica and of its lane.

    Raises:
        Fault: see `Rendezvous.meet`.
    """
    members = {"transfer": slots, "vote": slots, **_roles(replica, lane)}
    transfer, vote, dispatch, own_lane = rendezvous.meet(f"group/{rendezvous.generation}", members)
    return Groups(generation=rendezvous.generation, transfer=transfer, vote=vote, dispatch=dispatch, lane=own_lane)


def regroup(
    rendezvous: Rendezvous, groups: Groups, *, layout: int, replica: Sequence[int], lane: Sequence[int]
) -> Groups:
    """The same generation with other replicas and lanes; `groups` stays as it is. Collective: all members call it.

    Args:
        layout: number of the layout that they are for.
        replica, lane: members of this slot's replica and of its lane.

    Raises:
        Fault: see `Rendezvous.meet`.
    """
    prefix = f"group/{rendezvous.generation}/layout-{layout}"
    dispatch, own_lane = rendezvous.meet(prefix, _roles(replica, lane))
    return replace(groups, dispatch=dispatch, lane=own_lane)


def _roles(replica: Sequence[int], lane: Sequence[int]) -> dict[str, Sequence[int]]:
    return {f"dispatch-{min(replica)}": replica, f"lane-{min(lane)}": lane}


class ParkingLot:
    """Groups and operations of past generations that may still write to their memory.

    Args:
        transport: how to give up their channels; by default they are closed.
    """

    def __init__(self, transport: Transport | None = None) -> None:
        self._transport = transport
        self._parked: list[tuple[Groups | None, list[Pending]]] = []

    def park(self, groups: Groups | None, operations: Sequence[Pending]) -> None:
        """Give up a generation.

        Raises:
            RuntimeError: see `Transport.abandon`.
        """
        if groups is not None and self._transport is not None:
            self._transport.abandon(groups.channels)
        elif groups is not None:
            groups.close()
        self._parked.append((groups, list(operations)))

    def reap(self) -> int:
        """Drop what has ended; returns how many generations are still parked."""
        self._parked = [
            (groups, operations)
            for groups, operations in self._parked
            if not ((groups is None or groups.quiet) and all(operation.ended() for operation in operations))
        ]
        return len(self._parked)
