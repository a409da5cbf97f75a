"""What one slot keeps of the model and its optimizer under one plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nep.parallel.holding import CPU, Holding, allocate
from nep.planning.layout import Layout, Lines, axes
from nep.planning.plan import Plan
from nep.planning.transfer import overlaps

Tensors = dict[str, torch.Tensor]

ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Master weights, moments and gradient sums: max(float32, parameter dtype)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True)
class OptimizerShard:
    """Optimizer state of an owner layout or a mirror layout, and the finished gradient sums for it.

    Each maps a parameter name to `[units, *unit_shape]` in the accumulation dtype.

    Attributes:
        layout, slot: which units, and whose.
        master: weights that the updates are made on.
        moments: what the optimizer keeps beside them, by its own names (see `OptimizerConfig.moments`).
        grad_sum: finished gradient sums.
    """

    layout: Layout
    slot: int
    master: Tensors
    moments: Mapping[str, Tensors]
    grad_sum: Tensors

    @classmethod
    def empty(
        cls,
        layout: Layout,
        slot: int,
        lines: Lines,
        dtype: torch.dtype,
        moments: Sequence[str] = ADAMW_MOMENTS,
        device: torch.device = CPU,
    ) -> OptimizerShard:
        """Zeros for the units that `slot` has in `layout`."""
        return cls(
            layout=layout,
            slot=slot,
            master=allocate(layout, slot, lines, dtype, device),
            moments={kind: allocate(layout, slot, lines, dtype, device) for kind in moments},
            grad_sum=allocate(layout, slot, lines, dtype, device),
        )

    @property
    def kinds(self) -> dict[str, Tensors]:
        """Master weights and moments by kind: what recovery moves."""
        return {"master": self.master, **self.moments}

    def state(self) -> Holding:
        return Holding(self.layout, self.slot, *self.kinds.values())

    def weights(self) -> Holding:
        return Holding(self.layout, self.slot, self.master)

    def sums(self) -> Holding:
        return Holding(self.layout, self.slot, self.grad_sum)


@dataclass(kw_only=True)
class SlotState:
    """Everything that a committed plan makes a slot keep.

    Attributes:
        plan: the plan it obeys.
        params: what the model computes with, `[held units, *unit_shape]` in the parameter dtype.
        versions: (axis, lo, hi) of each interval in `params` -> the step it is from; None while it is written.
        owned, mirrored: optimizer state by the plan's owner and mirror layouts.
    """

    plan: Plan
    slot: int
    params: Tensors
    versions: dict[tuple[str, int, int], int | None]
    owned: OptimizerShard
    mirrored: OptimizerShard

    @classmethod
    def empty(
        cls,
        plan: Plan,
        slot: int,
        lines: Lines,
        dtype: torch.dtype,
        moments: Sequence[str] = ADAMW_MOMENTS,
        device: torch.device = CPU,
    ) -> SlotState:
        wide = accumulation_dtype(dtype)
        return cls(
            plan=plan,
            slot=slot,
            params=allocate(plan.holders, slot, lines, dtype, device),
            versions={},
            owned=OptimizerShard.empty(plan.owners, slot, lines, wide, moments, device),
            mirrored=OptimizerShard.empty(plan.mirrors, slot, lines, wide, moments, device),
        )

    @classmethod
    def nothing(
        cls,
        plan: Plan,
        slot: int,
        lines: Lines,
        dtype: torch.dtype,
        moments: Sequence[str] = ADAMW_MOMENTS,
        device: torch.device = CPU,
    ) -> SlotState:
        """What a slot has that has just come: not one unit, even if the plan names it."""
        others = [other for other in plan.slots if other != slot]
        wide = accumulation_dtype(dtype)
        return cls(
            plan=plan,
            slot=slot,
            params=allocate(plan.holders.restrict(others), slot, lines, dtype, device),
            versions={},
            owned=OptimizerShard.empty(plan.owners.restrict(others), slot, lines, wide, moments, device),
            mirrored=OptimizerShard.empty(plan.mirrors.restrict(others), slot, lines, wide, moments, device),
        )

    @classmethod
    def initial(
        cls,
        plan: Plan,
        slot: int,
        lines: Lines,
        dtype: torch.dtype,
        initial_units: Callable[[str, int, int], torch.Tensor],
        moments: Sequence[str] = ADAMW_MOMENTS,
        device: torch.device = CPU,
    ) -> SlotState:
        """State before the first step.

        Args:
            initial_units: (parameter name, lo, hi) -> initial values `[hi - lo, *unit_shape]` in float64.
            moments: of the optimizer.
            device: where all of it is.
        """
        state = cls.empty(plan, slot, lines, dtype, moments, device)
        for layout, tensors in (
            (plan.holders, state.params),
            (plan.owners, state.owned.master),
            (plan.mirrors, state.mirrored.master),
        ):
            holding = Holding(layout, slot, tensors)
            for name, line in lines.items():
                for lo, hi in layout.intervals(line.axis, slot):
                    for view in holding.views(line.axis, [name], lo, hi) or ():
                        # The parameter is the rounded master weight, as after every later step.
                        view.copy_(initial_units(name, lo, hi))
        state.mark_all(0, tuple(axes(lines)))
        return state

    def mark_all(self, version: int, axis_order: tuple[str, ...]) -> None:
        """All parameters are from step `version`."""
        returned = overlaps(self.plan.owners, self.plan.holders.restrict([self.slot]), axis_order)
        self.versions = {(piece.axis, piece.lo, piece.hi): version for piece in returned}

    @property
    def params_version(self) -> int | None:
        """The step that every interval of `params` is from; None while they are of mixed steps."""
        found = set(self.versions.values())
        return found.pop() if len(found) == 1 else None

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(iter(self.params.values())).device

    def held(self) -> Holding:
        return Holding(self.plan.holders, self.slot, self.params)
