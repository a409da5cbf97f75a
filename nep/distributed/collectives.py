"""Small collectives on values, made of one all-gather. Everybody computes the same from the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nep.distributed.groups import Communicator
from nep.distributed.waiting import Waiter


def all_gather_bytes(
    communicator: Communicator,
    blob: bytes,
    waiter: Waiter,
    what: str,
    on_sent: Callable[[], None] | None = None,
) -> list[bytes]:
    """Every member's `blob` (all of one length), in rank order. Every member calls it.

    Args:
        on_sent: called once after the message is on its way (failure injection).
    """
    flat = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    return [row.numpy().tobytes() for row in all_gather(communicator, flat, waiter, what, on_sent)]


def sum_exact(communicator: Communicator, values: torch.Tensor, waiter: Waiter, what: str) -> torch.Tensor:
    """Element-wise sum of an integer tensor over all members. Every member calls it."""
    if values.dtype.is_floating_point:
        raise ValueError(f"sum_exact takes integers, not {values.dtype}")
    return torch.stack(all_gather(communicator, values.reshape(-1), waiter, what)).sum(0).reshape(values.shape)


def all_gather(
    communicator: Communicator,
    flat: torch.Tensor,
    waiter: Waiter,
    what: str,
    on_sent: Callable[[], None] | None = None,
) -> list[torch.Tensor]:
    """Every member's one-dimensional `flat` (all of one size), in rank order. Every member calls it.

    Args:
        on_sent: called once after the message is on its way (failure injection).
    """
    if communicator.size == 1:
        if on_sent is not None:
            on_sent()
        return [flat]
    # Fresh memory each time: an abandoned gather may still write to its output.
    there = flat.contiguous().to(communicator.device)
    output = torch.empty(communicator.size * there.numel(), dtype=there.dtype, device=there.device)
    pending = communicator.all_gather(output, there)
    if on_sent is not None:
        on_sent()
    waiter.wait(pending, what)
    return list(output.to(flat.device).chunk(communicator.size))
