"""Process groups of one generation. They are values that are passed on: nothing here is global."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nep.distributed.waiting import FailedLaunch, Nothing, Pending, PendingWork, Waiter, WaitingThread


def create_device(hostname: str | None = None) -> Any:
    """Where this process listens for gloo; one serves all groups, and making one takes 10 ms.

    Args:
        hostname: the address to listen on; by default the one that this host's name resolves to.
    """
    if hostname is not None:
        return dist.ProcessGroupGloo.create_device(hostname=hostname)
    return dist.ProcessGroupGloo.create_default_device()


def create_process_group(
    store: dist.Store, *, rank: int, size: int, timeout_s: float, device: Any
) -> dist.ProcessGroup:
    """A gloo group that needs no default group. Blocks until all `size` members have come.

    Collective: every member calls it, each with a `store` of the same prefix.

    Args:
        store: where the members find each other.
        rank, size: this member's index and the number of members.
        timeout_s: the group's own time-out, finite so that abandoned operations end.
        device: see `create_device`.
    """
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [device]
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    # A bare ProcessGroupGloo lacks the single-tensor calls; the wrapper has them.
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


class Communicator:
    """A process group with the slots that form it.

    Args:
        name: for messages and traces.
        group: the torch group, or None when this slot is its only member.
        slots: members; the position in this tuple is the rank.
        slot: this slot.
        trace: called with (communicator, operation) at every launch, in order.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup | None,
        slots: Sequence[int],
        slot: int,
        trace: Callable[[str, str], None] | None = None,
    ):
        if group is None and len(slots) != 1:
            raise ValueError(f"communicator {name} with {len(slots)} slots needs a process group")
        self.name = name
        self.group = group
        self.slots = tuple(slots)
        self.rank = self.slots.index(slot)
        self._rank_of = {member: index for index, member in enumerate(self.slots)}
        self._trace = trace
        self._tag = 0
        # Sends and receives cannot be polled, so a thread waits for them.
        self._thread = WaitingThread(f"wait-{name}") if group is not None else None

    @property
    def size(self) -> int:
        return len(self.slots)

    def _launched(self, operation: str) -> None:
        if self._trace is not None:
            self._trace(self.name, operation)

    def all_to_all(
        self, output: torch.Tensor, inputs: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Pending:
        """Uneven all-to-all along dimension 0. Every member calls it."""
        assert self.group is not None
        self._launched("all_to_all")
        try:
            work = self.group.alltoall_base(output, inputs, output_splits, input_splits)
        except RuntimeError as error:
            return FailedLaunch(error)
        return PendingWork(work, (output, inputs))

    def all_gather(self, output: torch.Tensor, inputs: torch.Tensor) -> Pending:
        """`output` [size * n] gets every member's `inputs` [n], in rank order. Every member calls it."""
        assert self.group is not None
        self._launched("all_gather")
        try:
            work = self.group._allgather_base(output, inputs)
        except RuntimeError as error:
            return FailedLaunch(error)
        return PendingWork(work, (output, inputs))

    def exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> Pending:
        """Grouped sends and receives with those peers (slots) that have data.

        Every member calls it the same number of times (calls are numbered to match), also those that send
        and receive nothing.
        """
        self._tag += 1
        self._launched("exchange")
        if not sends and not receives:
            return Nothing()
        assert self.group is not None and self._thread is not None
        group, calls = self.group, []
        try:
            for peer, buffer in receives.items():
                calls.append(group.recv([buffer], self._rank_of[peer], self._tag).wait)
            for peer, buffer in sends.items():
                calls.append(group.send([buffer], self._rank_of[peer], self._tag).wait)
        except RuntimeError as error:
            # A peer is gone already. What has been launched goes on and may still write.
            calls.insert(0, FailedLaunch(error).check)
        return self._thread.submit(calls, (dict(sends), dict(receives)))

    def close(self) -> None:
        """No more calls; the waiting thread ends when the last operation has."""
        if self._thread is not None:
            self._thread.close()

    @property
    def quiet(self) -> bool:
        """Whether no operation is being waited for any more (after `close`)."""
        return self._thread is None or not self._thread.alive


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
        device: see `create_device`.
        waiter: gives up when this generation has a fault.
        group_timeout_s: the groups' own time-out.
        rebuild_timeout_s: how long to wait for the others.
        finished: called once `store` is idle again, from another thread.
        trace: see `Communicator`.
    """

    generation: int
    slot: int
    store: dist.Store
    device: Any
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
                group = self._group(builder, prefix, name, slots) if len(slots) > 1 else None
                built.append(Communicator(name, group, slots, self.slot, self.trace))
            return built
        except BaseException:
            for communicator in built:
                communicator.close()
            raise
        finally:
            if self.finished is not None:
                builder.submit([self.finished])
            builder.close()

    def _group(self, builder: WaitingThread, prefix: str, name: str, slots: Sequence[int]) -> dist.ProcessGroup:
        def create() -> dist.ProcessGroup:
            return create_process_group(
                dist.PrefixStore(f"{prefix}/{name}", self.store),
                rank=list(slots).index(self.slot),
                size=len(slots),
                timeout_s=self.group_timeout_s,
                device=self.device,
            )

        pending = builder.submit([create])
        what = f"process group {name} of generation {self.generation}"
        self.waiter.wait(pending, what, self.rebuild_timeout_s)
        return pending.value


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
    """Groups and operations of past generations that may still write to their memory."""

    def __init__(self) -> None:
        self._parked: list[tuple[Groups | None, list[Pending]]] = []

    def park(self, groups: Groups | None, operations: Sequence[Pending]) -> None:
        if groups is not None:
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
