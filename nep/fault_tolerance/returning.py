"""What a slot that comes back, or comes anew, needs beside the tensors that a plan gives it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from nep.distributed.collectives import all_gather, all_gather_bytes
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


def share_bytes(
    tell: Callable[[], bytes], communicator: Communicator, waiter: Waiter, returners: Collection[int]
) -> bytes | None:
    """Bytes from the lowest member that knows them to those that do not. All members call it.

    Args:
        tell: makes the bytes; only one slot's is called.
        communicator: all members.
        waiter: how to wait.
        returners: slots to which they go; some other slot is a member.

    Returns:
        On a returner what was told, elsewhere None.

    Raises:
        Fault: they have not come.
    """
    me = communicator.slots[communicator.rank]
    teller = min(slot for slot in communicator.slots if slot not in returners)
    mine = bytearray(tell() if me == teller else b"")
    size = torch.tensor([len(mine)], dtype=torch.int64)
    length = int(all_gather(communicator, size, waiter, "the size of the story")[communicator.slots.index(teller)])
    sends: dict[int, torch.Tensor] = {}
    receives: dict[int, torch.Tensor] = {}
    if length and me == teller:
        story = torch.frombuffer(mine, dtype=torch.uint8).to(communicator.device)
        sends = {slot: story for slot in sorted(returners) if slot in communicator.slots}
    elif length and me in returners:
        receives = {teller: torch.empty(length, dtype=torch.uint8, device=communicator.device)}
    waiter.wait(communicator.exchange(sends, receives), "what a slot that comes back must know")
    if me not in returners:
        return None
    return receives[teller].cpu().numpy().tobytes() if length else b""
