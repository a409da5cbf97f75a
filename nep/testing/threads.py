"""Threads as ranks: the slots of a job in one process, with real gloo groups (0.05 s to start four of them)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from nep.distributed.groups import Groups, Rendezvous, build_groups
from nep.distributed.transports.base import Transport
from nep.distributed.transports.gloo import GlooTransport
from nep.distributed.waiting import Waiter

T = TypeVar("T")


@dataclass(kw_only=True)
class ThreadSlot:
    """What a thread needs to act as a slot.

    Attributes:
        slot: its number.
        groups: communicators of its generation.
        waiter: gives up after `deadline_s`, or when `fault` is set.
        fault: set it to break the generation of all slots.
        rendezvous: how to build other groups.
        operations: (communicator, operation) of every launch, in order.
    """

    slot: int
    groups: Groups
    waiter: Waiter
    fault: threading.Event
    rendezvous: Rendezvous
    operations: list[tuple[str, str]] = field(default_factory=list)


def run_slots(
    replicas: Sequence[Sequence[int]],
    body: Callable[[ThreadSlot], T],
    *,
    lanes: Sequence[Sequence[int]] | None = None,
    deadline_s: float = 30.0,
    group_timeout_s: float = 40.0,
    transport: Callable[[], Transport] = lambda: GlooTransport("127.0.0.1"),
) -> dict[int, T]:
    """Run `body` once for each slot, all at the same time.

    Args:
        replicas: the slots of each replica (a dispatch group each).
        body: gets its slot's communicators.
        lanes: the slots of each lane; by default each slot is one.
        deadline_s: of one wait.
        group_timeout_s: the groups' own time-out.
        transport: makes each slot's.

    Returns:
        slot -> what `body` returned.

    Raises:
        Exception: the first error of any slot; the others are told to stop.
    """
    slots = sorted(slot for replica in replicas for slot in replica)
    store = dist.HashStore()
    fault = threading.Event()
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def act(slot: int) -> None:
        try:
            waiter = Waiter(lambda: "another slot failed" if fault.is_set() else None, deadline_s)
            operations: list[tuple[str, str]] = []
            index = next(i for i, replica in enumerate(replicas) if slot in replica)

            rendezvous = Rendezvous(
                generation=1,
                slot=slot,
                store=store,
                transport=transport(),
                waiter=waiter,
                group_timeout_s=group_timeout_s,
                rebuild_timeout_s=30.0,
                trace=lambda communicator, operation: operations.append((communicator, operation)),
            )
            groups = build_groups(
                rendezvous,
                slots=slots,
                replica=replicas[index],
                lane=next((lane for lane in lanes or () if slot in lane), [slot]),
            )
            results[slot] = body(
                ThreadSlot(
                    slot=slot,
                    groups=groups,
                    waiter=waiter,
                    fault=fault,
                    rendezvous=rendezvous,
                    operations=operations,
                )
            )
        except BaseException as error:
            errors.append(error)
            fault.set()

    # Each poll of a wait needs the interpreter lock, and by default a busy thread keeps it for 5 ms.
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    threads = [threading.Thread(target=act, args=(slot,), name=f"slot-{slot}") for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval_s)
    if errors:
        raise errors[0]
    return results
