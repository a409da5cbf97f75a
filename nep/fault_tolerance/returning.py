"""What a slot that comes back, or comes anew, needs beside the tensors that a plan gives it."""

from __future__ import annotations

from collections.abc import Collection

from nep.distributed.collectives import all_gather_bytes
from nep.distributed.groups import Communicator
from nep.distributed.waiting import Waiter
from nep.fault_tolerance.transaction import ProtocolViolation
from nep.moe.routing_state import RoutingState


def share_routing(
    routing: RoutingState, communicator: Communicator, waiter: Waiter, returners: Collection[int]
) -> None:
    """Give the routing state of the last committed step to those that have none. All members call it.

    Args:
        routing: of this slot; a returner's is overwritten.
        communicator: all members.
        waiter: how to wait.
        returners: slots that hold nothing; some other slot is a member.

    Raises:
        ProtocolViolation: the others do not hold the same: the memory of some slot lies.
        Fault: the state has not come; it may be asked for again in the next generation.
    """
    blobs = all_gather_bytes(communicator, routing.to_bytes(), waiter, "the state of the routers")
    held = {slot: blob for slot, blob in zip(communicator.slots, blobs, strict=True) if slot not in returners}
    first = min(held)
    differing = sorted(slot for slot, blob in held.items() if blob != held[first])
    if differing:
        raise ProtocolViolation(f"slots {differing} hold another routing state than slot {first}")
    if communicator.slots[communicator.rank] in returners:
        routing.load(held[first])
