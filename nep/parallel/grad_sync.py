"""Gradient sums to owners and mirrors, and parameters back: transfers between layouts of one plan.

Every gradient is a plain sum over all holders. Each holder sends its piece straight to the owner, which adds
in slot order and forwards the finished sum to the mirror, so both have the same bits. The return is the
transpose. All members launch the same transfers in the same order on one communicator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nep.distributed.groups import Communicator
from nep.distributed.waiting import Waiter
from nep.parallel.holding import Holding, allocate
from nep.parallel.state import SlotState, Tensors, accumulation_dtype
from nep.parallel.transfer import CompiledTransfer, compile_transfer, launch
from nep.planning.layout import Layout, Lines, axes
from nep.planning.transfer import overlaps

Probe = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class GradSync:
    """The compiled transfers of one slot for one plan.

    Attributes:
        grads: where backward accumulates, `[held units, *unit_shape]` in the accumulation dtype.
        to_owner, to_mirror, to_holders: the three transfers.
        returned_by: owner -> the intervals (axis, lo, hi) that it returns to this slot.
    """

    state: SlotState
    grads: Tensors
    to_owner: CompiledTransfer
    to_mirror: CompiledTransfer
    to_holders: CompiledTransfer
    returned_by: dict[int, list[tuple[str, int, int]]]

    @classmethod
    def build(cls, state: SlotState, lines: Lines, dtype: torch.dtype) -> GradSync:
        plan, slot, names, wide = state.plan, state.slot, axes(lines), accumulation_dtype(dtype)
        grads = allocate(plan.holders, slot, lines, wide)
        sums = state.owned.sums()
        returned = overlaps(plan.owners, plan.holders.restrict([slot]), tuple(names))
        returned_by: dict[int, list[tuple[str, int, int]]] = {}
        for piece in returned:
            returned_by.setdefault(piece.src, []).append((piece.axis, piece.lo, piece.hi))

        def compiled(
            source: Layout, target: Layout, from_: Holding, to: Holding, travels: torch.dtype
        ) -> CompiledTransfer:
            # Only this slot's pieces: all pairs of slots would be far more.
            return compile_transfer(
                overlaps(source.restrict([slot]), target, tuple(names)),
                overlaps(source, target.restrict([slot]), tuple(names)),
                names,
                sources=[from_],
                destination=to,
                dtype=travels,
            )

        local_grads = Holding(plan.holders, slot, grads)
        return cls(
            state=state,
            grads=grads,
            to_owner=compiled(plan.holders, plan.owners, local_grads, sums, wide),
            to_mirror=compiled(plan.owners, plan.mirrors, sums, state.mirrored.sums(), wide),
            to_holders=compiled(plan.owners, plan.holders, state.owned.weights(), state.held(), dtype),
            returned_by=returned_by,
        )

    def zero_grads(self) -> None:
        torch._foreach_zero_(list(self.grads.values()))

    def reduce(self, communicator: Communicator, waiter: Waiter, probe: Probe) -> None:
        """Complete the sums of everything this slot owns or mirrors. All members call it.

        Raises:
            Fault: the sums are not complete.
        """
        torch._foreach_zero_(list(self.state.owned.grad_sum.values()))
        flight = launch(self.to_owner, communicator, lambda: probe("sync"))
        flight.finish(waiter, "gradient sums", "add")
        flight = launch(self.to_mirror, communicator, lambda: probe("mirror"))
        flight.finish(waiter, "mirrored gradient sums", "copy")

    def return_parameters(
        self, communicator: Communicator, waiter: Waiter, version: int, probe: Probe
    ) -> None:
        """Owners send the new weights to all holders. All members call it.

        Every interval carries the step it is from: after a partial return only those of one step may be trusted.

        Raises:
            Fault: the parameters are still those of the step before.
        """
        flight = launch(self.to_holders, communicator, lambda: probe("return"))
        flight.wait(waiter, "returned parameters")
        versions = self.state.versions
        for intervals in self.returned_by.values():
            versions.update(dict.fromkeys(intervals, None))
        flight.write("copy", lambda owner: versions.update(dict.fromkeys(self.returned_by[owner], version)))

    def norm2_owned(self) -> float:
        """Squared norm of the finished sums of the owned intervals, added in the order of the lines."""
        return float(
            sum(float(t.to(torch.float64).square().sum()) for t in self.state.owned.grad_sum.values())
        )
