"""Carries out a planned transfer: one engine for gradient sums, parameter return, mirrors and recovery.

Both ends compute the same pieces in the same order, so nothing but payload travels. A transfer is compiled
once per generation to lists of tensor views; executing it packs one message per peer that has data, sends
and receives them in one group, and copies or adds what has come, in slot order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from nep.distributed.groups import Communicator
from nep.distributed.waiting import Pending, Waiter
from nep.parallel.holding import CPU, Holding
from nep.planning.transfer import Piece, Transfer

Views = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class CompiledTransfer:
    """One slot's part of a transfer.

    Attributes:
        sends, receives: views by peer slot, peers ascending.
        local: source and destination views of what stays on the slot.
        slot: this slot.
        dtype: what travels.
    """

    slot: int
    dtype: torch.dtype
    sends: dict[int, Views]
    receives: dict[int, Views]
    local: tuple[Views, Views]

    @property
    def sent_bytes(self) -> int:
        return sum(v.numel() for views in self.sends.values() for v in views) * self.dtype.itemsize

    @property
    def received_bytes(self) -> int:
        return sum(v.numel() for views in self.receives.values() for v in views) * self.dtype.itemsize


def compile_transfer(
    outgoing: Transfer,
    incoming: Transfer,
    axes: Mapping[str, tuple[str, ...]],
    *,
    sources: Sequence[Holding],
    destination: Holding,
    dtype: torch.dtype,
) -> CompiledTransfer:
    """Look up this slot's end of each piece.

    Args:
        outgoing: pieces in canonical order, at least all that this slot gives.
        incoming: the same, at least all that it gets; may be the same object.
        axes: parameter names of each axis, in order.
        sources: what this slot can send from; the first that has a piece is used.
        destination: where received pieces go.
        dtype: what travels; packing and unpacking convert.
    """
    slot = destination.slot

    def source_views(piece: Piece) -> Views:
        found = (holding.views(piece.axis, axes[piece.axis], piece.lo, piece.hi) for holding in sources)
        views = next((views for views in found if views is not None), None)
        assert views is not None, f"slot {slot} does not have {piece}"
        return views

    sends: dict[int, Views] = {}
    receives: dict[int, Views] = {}
    local: tuple[Views, Views] = ([], [])
    for piece in outgoing.touching(slot):
        if piece.src == slot != piece.dst:
            sends.setdefault(piece.dst, []).extend(source_views(piece))
    for piece in incoming.touching(slot):
        if piece.dst != slot:
            continue
        views = destination.views(piece.axis, axes[piece.axis], piece.lo, piece.hi)
        assert views is not None, f"slot {slot} has no room for {piece}"
        if piece.src == slot:
            local[0].extend(source_views(piece))
            local[1].extend(views)
        else:
            receives.setdefault(piece.src, []).extend(views)
    return CompiledTransfer(
        slot=slot,
        dtype=dtype,
        sends=dict(sorted(sends.items())),
        receives=dict(sorted(receives.items())),
        local=local,
    )


class InFlight:
    """A launched transfer. The destination is untouched until `write`."""

    def __init__(self, compiled: CompiledTransfer, pending: Pending, staging: dict[int, torch.Tensor]):
        self._compiled = compiled
        self._pending = pending
        self._staging = staging

    def wait(self, waiter: Waiter, what: str) -> None:
        """Wait until everything has come.

        Raises:
            Fault: something did not; nothing was written.
        """
        waiter.wait(self._pending, what)

    def write(self, mode: Literal["copy", "add"], written: Callable[[int], None] | None = None) -> None:
        """Copy into the destination or add to it, in ascending order of the source slots; after `wait`.

        Args:
            mode: what to do with what came.
            written: called with each source slot whose pieces are in place.
        """
        compiled = self._compiled
        arrived: dict[int, tuple[Views, Views]] = {
            peer: (_split(self._staging[peer], views), views) for peer, views in compiled.receives.items()
        }
        if compiled.local[0]:
            arrived[compiled.slot] = compiled.local
        for peer, (values, views) in sorted(arrived.items()):
            if mode == "copy":
                torch._foreach_copy_(views, values)
            else:
                torch._foreach_add_(views, values)
            if written is not None:
                written(peer)

    def finish(self, waiter: Waiter, what: str, mode: Literal["copy", "add"]) -> None:
        """`wait` and `write`."""
        self.wait(waiter, what)
        self.write(mode)


def launch(
    compiled: CompiledTransfer, communicator: Communicator, on_sent: Callable[[], None] | None = None
) -> InFlight:
    """Pack and start sends and receives. Every member of `communicator` launches the same transfers in the
    same order.

    Staging memory is fresh for each launch, since an abandoned transfer may still write to it.

    Args:
        on_sent: called once after the messages are on their way (failure injection).
    """
    # Host tensors may travel on a device's communicator.
    device = communicator.device if compiled.sends or compiled.receives else CPU
    with torch.no_grad():
        packed = {
            peer: torch.cat([view.reshape(-1).to(compiled.dtype) for view in views]).to(device)
            for peer, views in compiled.sends.items()
        }
    staging = {
        peer: torch.empty(sum(view.numel() for view in views), dtype=compiled.dtype, device=device)
        for peer, views in compiled.receives.items()
    }
    pending = communicator.exchange(packed, staging)
    if on_sent is not None:
        on_sent()
    return InFlight(compiled, pending, staging)


def _split(message: torch.Tensor, views: Views) -> Views:
    parts = message.split([view.numel() for view in views])
    return [part.view(view.shape) for part, view in zip(parts, views, strict=True)]
