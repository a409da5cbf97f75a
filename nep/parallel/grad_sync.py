"""Gradient sums to owners and mirrors, and parameters back: transfers between layouts of one plan.

Every gradient is a plain sum over all holders. Each holder sends its piece straight to the owner, which adds
in slot order and forwards the finished sum to the mirror, so both have the same bits. The return is the
transpose. The model is cut into buckets by layer, small layers together; sums start while backward still runs, and
parameters still return while the next forward runs (`nep.parallel.overlap` says when). All members launch the same
transfers in the same order on one communicator, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nep.distributed.groups import Communicator
from nep.distributed.waiting import Waiter
from nep.parallel.holding import Holding, allocate
from nep.parallel.state import SlotState, Tensors, accumulation_dtype
from nep.parallel.transfer import CompiledTransfer, InFlight, compile_transfer, launch
from nep.planning.layout import Layout, Lines, axes
from nep.planning.transfer import overlaps

Probe = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The parameters of one layer, or of some small ones in a row.

    Attributes:
        layer: the lowest, as in `Line.layer`; -1 is the embedding, the number of layers the final norm and the head.
        names: its parameters.
        to_owner, to_mirror, to_holders: this slot's part of the three transfers.
        returned_by: owner -> the intervals (axis, lo, hi) that it returns to this slot.
    """

    layer: int
    names: tuple[str, ...]
    to_owner: CompiledTransfer
    to_mirror: CompiledTransfer
    to_holders: CompiledTransfer
    returned_by: dict[int, list[tuple[str, int, int]]]


@dataclass(frozen=True, kw_only=True)
class GradSync:
    """The compiled transfers of one slot for one plan.

    Attributes:
        state: what the plan makes the slot keep.
        grads: where backward accumulates, `[held units, *unit_shape]` in the accumulation dtype.
        buckets: in forward order.
    """

    state: SlotState
    grads: Tensors
    buckets: tuple[Bucket, ...]

    @classmethod
    def build(cls, state: SlotState, lines: Lines, dtype: torch.dtype, smallest_bucket_bytes: int = 0) -> GradSync:
        """Compile the transfers of `state.plan`; the same buckets on every slot.

        Args:
            state: what the plan makes the slot keep.
            lines: the model's parameters.
            dtype: of the parameters.
            smallest_bucket_bytes: see `layer_groups`.
        """
        grads = allocate(state.plan.holders, state.slot, lines, accumulation_dtype(dtype), state.device)
        by_layer: dict[int, list[str]] = {}
        for axis, names in axes(lines).items():
            by_layer.setdefault(lines[names[0]].layer, []).append(axis)
        buckets = [
            _bucket(state, grads, lines, group[0], tuple(axis for layer in group for axis in by_layer[layer]), dtype)
            for group in layer_groups(lines, dtype, smallest_bucket_bytes)
        ]
        return cls(state=state, grads=grads, buckets=tuple(buckets))

    def zero_grads(self) -> None:
        torch._foreach_zero_(list(self.grads.values()))

    def release_grads(self) -> None:
        """Give back the gradients' memory before another layout is received: between steps nothing is in it, and after
        a change, or a fault in it, other transfers are compiled."""
        for tensor in self.grads.values():
            tensor.untyped_storage().resize_(0)

    def norm2_owned(self) -> float:
        """Squared norm of the finished sums of the owned intervals, added in the order of the lines."""
        sums = self.state.owned.grad_sum.values()
        return float(sum(float(tensor.to(torch.float64).square().sum()) for tensor in sums))


def layer_groups(lines: Lines, dtype: torch.dtype, smallest_bytes: int) -> list[list[int]]:
    """Layers whose transfers go together: a message costs its sender and its receiver more than some kilobytes do.

    Args:
        lines: the model's parameters.
        dtype: of the parameters; gradients travel in the accumulation dtype.
        smallest_bytes: a group has at least so many of gradients, if the model has; 0 leaves layers apart.

    Returns:
        Layers in forward order. Groups are filled in the order of backward, so that sums start early; what is left in
        front of the first full one joins it.
    """
    element = accumulation_dtype(dtype).itemsize
    size: dict[int, int] = {}
    for line in lines.values():
        size[line.layer] = size.get(line.layer, 0) + line.num_units * line.unit_numel * element
    groups: list[list[int]] = []
    full = True
    for layer in sorted(size, reverse=True):
        if full:
            groups.append([])
        groups[-1].insert(0, layer)
        full = sum(size[member] for member in groups[-1]) >= smallest_bytes
    if not full and len(groups) > 1:
        groups[-2:] = [groups[-1] + groups[-2]]
    return groups[::-1]


def _bucket(
    state: SlotState, grads: Tensors, lines: Lines, layer: int, order: tuple[str, ...], dtype: torch.dtype
) -> Bucket:
    plan, slot, names, wide = state.plan, state.slot, axes(lines), accumulation_dtype(dtype)
    returned_by: dict[int, list[tuple[str, int, int]]] = {}
    for piece in overlaps(plan.owners, plan.holders.restrict([slot]), order):
        returned_by.setdefault(piece.src, []).append((piece.axis, piece.lo, piece.hi))

    def compiled(
        source: Layout, target: Layout, give: Holding, take: Holding, travels: torch.dtype
    ) -> CompiledTransfer:
        # Only this slot's pieces: all pairs of slots would be far more.
        return compile_transfer(
            overlaps(source.restrict([slot]), target, order),
            overlaps(source, target.restrict([slot]), order),
            names,
            sources=[give],
            destination=take,
            dtype=travels,
        )

    sums, mirrored = state.owned.sums(), state.mirrored.sums()
    return Bucket(
        layer=layer,
        names=tuple(name for axis in order for name in names[axis]),
        to_owner=compiled(plan.holders, plan.owners, Holding(plan.holders, slot, grads), sums, wide),
        to_mirror=compiled(plan.owners, plan.mirrors, sums, mirrored, wide),
        to_holders=compiled(plan.owners, plan.holders, state.owned.weights(), state.held(), dtype),
        returned_by=returned_by,
    )


class Reduction:
    """The gradient sums of one step, bucket by bucket in backward order.

    When bucket k is launched, the mirrors' part of bucket k - 2 has been waited for; then bucket k - 1 is waited for,
    added up and sent on to the mirrors: a fixed sequence of launches and waits, the same on all slots, with the
    messages of two buckets in memory and no more.

    Args:
        sync: of the current plan.
        communicator: all members, used for transfers only.
        waiter: how to wait.
        probe: failure injection.
        collect: called with each bucket just before it is launched: its gradients have to be in `sync.grads`.
    """

    def __init__(
        self,
        sync: GradSync,
        communicator: Communicator,
        waiter: Waiter,
        probe: Probe,
        collect: Callable[[Sequence[str]], None],
    ):
        self._sync = sync
        self._communicator = communicator
        self.waiter = self._waiter = waiter
        self._probe = probe
        self._collect = collect
        self._left = list(sync.buckets)  # the last one is next
        self._summing: tuple[Bucket, InFlight] | None = None
        self._mirroring: InFlight | None = None

    def reached(self, layer: int) -> None:
        """Backward has all gradients of the layers from `layer` on: launch what has not been.

        Raises:
            Fault: the step's sums cannot be completed.
        """
        while self._left and self._left[-1].layer >= layer:
            self._launch(self._left.pop())

    def finish(self) -> None:
        """Complete the sums of everything that this slot owns or mirrors. All members call it.

        Raises:
            Fault: they are not complete.
        """
        self.reached(-1)
        self._add_up()
        self._finish_mirror()

    def _launch(self, bucket: Bucket) -> None:
        self._collect(bucket.names)
        self._finish_mirror()
        flight = launch(bucket.to_owner, self._communicator, lambda: self._probe("sync"))
        self._add_up()
        self._summing = (bucket, flight)

    def _add_up(self) -> None:
        """Finish the bucket in flight and forward its sums."""
        if self._summing is None:
            return
        bucket, flight = self._summing
        self._summing = None
        flight.wait(self._waiter, f"gradient sums of layer {bucket.layer}")
        torch._foreach_zero_([self._sync.state.owned.grad_sum[name] for name in bucket.names])
        flight.write("add")
        del flight  # and its messages, before there are new ones
        self._finish_mirror()
        self._mirroring = launch(bucket.to_mirror, self._communicator, lambda: self._probe("mirror"))

    def _finish_mirror(self) -> None:
        if self._mirroring is not None:
            flight, self._mirroring = self._mirroring, None
            flight.finish(self._waiter, "mirrored gradient sums", "copy")


class Return:
    """New parameters from the owners to all holders, bucket by bucket in forward order, two in flight.

    Every interval carries the step it is from: after a partial return only those of one step may be trusted.

    Args:
        sync: of the current plan; its master weights are of step `version`.
        communicator: all members, used for transfers only.
        waiter: how to wait.
        version: the step.
        probe: failure injection.
    """

    _IN_FLIGHT = 2

    def __init__(self, sync: GradSync, communicator: Communicator, waiter: Waiter, version: int, probe: Probe):
        self._versions = sync.state.versions
        self._communicator = communicator
        self._waiter = waiter
        self._version = version
        self._probe = probe
        self._left = list(sync.buckets)
        self._flights: list[tuple[Bucket, InFlight]] = []
        self._refill()

    def need(self, layer: int) -> None:
        """Everything up to `layer` is about to be used: wait for it. All members call it in the same order.

        Raises:
            Fault: some parameters are still those of the step before; `SlotState.versions` says which.
        """
        while self._flights and self._flights[0][0].layer <= layer:
            bucket, flight = self._flights.pop(0)
            flight.wait(self._waiter, f"returned parameters of layer {bucket.layer}")
            for intervals in bucket.returned_by.values():
                self._versions.update(dict.fromkeys(intervals, None))
            flight.write("copy", self._mark(bucket))
            del flight  # and its messages, before there are new ones
            self._refill()

    def finish(self) -> None:
        """Wait for all parameters. All members call it."""
        while self._flights:
            self.need(self._flights[0][0].layer)

    def _mark(self, bucket: Bucket) -> Callable[[int], None]:
        return lambda owner: self._versions.update(dict.fromkeys(bucket.returned_by[owner], self._version))

    def _refill(self) -> None:
        while self._left and len(self._flights) < self._IN_FLIGHT:
            bucket = self._left.pop(0)
            flight = launch(bucket.to_holders, self._communicator, lambda: self._probe("return"))
            self._flights.append((bucket, flight))
