"""Makes a small model's modules take as long as the full model's kernels.

Every module that computes gets a kernel on the accelerator's time line: one when its forward has run, one when its
backward begins. What arrives at them tells how much there is to do: the rows that were dispatched, the tokens of the
lane, the heads and slices that are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from nep.moe.backends.base import ExpertsBackend
from nep.moe.slices import ExpertSlice, merge_slices
from nep.testing.emulation.accelerator import Accelerator
from nep.testing.emulation.kernels import KernelSeconds, Seconds
from nep.testing.emulation.scaling import Scale


class Workbench:
    """Launches kernels for one slot's model.

    Args:
        accelerator: of the slot.
        kernels: their prices.
        scale: what tokens and sizes of the small model stand for.
    """

    def __init__(self, accelerator: Accelerator, kernels: KernelSeconds, scale: Scale):
        self.accelerator = accelerator
        self.kernels = kernels
        self.scale = scale
        self._own_tokens = 0.0

    def launch(self, kind: str, seconds: Seconds, output: Tensor) -> Tensor:
        """A forward kernel now, and a backward one before the backward of whatever made `output`."""
        self.accelerator.compute(kind, seconds.forward)
        return cast(Tensor, _Kernel.apply(output, lambda: self.accelerator.compute(kind, seconds.backward)))

    def begin_block(self, x_sd: Tensor) -> None:
        """Tokens of this slot."""
        self._own_tokens = len(x_sd) * self.scale.tokens

    def attention(self, module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        """Forward hook of attention."""
        query_heads, kv_heads = (len(cast(Tensor, weight)) for weight in (module.wq, module.wk))
        tokens = len(arguments[0]) * self.scale.tokens
        seconds = self.kernels.attention(tokens, self._own_tokens, query_heads, kv_heads)
        return self.launch("attention", seconds, output)

    def before_experts(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward hook of a layer's experts, before it."""
        return (self.launch("dense", self.kernels.router(self._own_tokens), arguments[0]), *arguments[1:])


def emulate_model(model: nn.Module, bench: Workbench) -> None:
    """Add kernels to a model that `parallelize` has made one slot's part.

    Args:
        model: with `blocks()`, whose members have `attention` and `moe`, and a `criterion`.
        bench: of the slot.
    """
    for block in cast("Sequence[nn.Module]", model.blocks()):  # type: ignore[operator]
        block.register_forward_pre_hook(lambda _, arguments: bench.begin_block(arguments[0]))
        attention, moe = cast(nn.Module, block.attention), cast(nn.Module, block.moe)
        attention.register_forward_hook(bench.attention)
        moe.register_forward_pre_hook(bench.before_experts)
        experts: Any = moe.experts
        experts.backend = EmulatedExperts(experts.backend, bench)
    changed: Any = model
    changed.criterion = _EmulatedCriterion(changed.criterion, bench)


class EmulatedExperts:
    """A backend that computes with another one and takes as long as the full model's slices.

    Args:
        inner: computes.
        bench: of the slot.
    """

    def __init__(self, inner: ExpertsBackend, bench: Workbench):
        self._inner = inner
        self._bench = bench

    def __call__(
        self,
        rows_rd: Tensor,
        expert_ids_rk: Tensor,
        weights_rk: Tensor,
        w13: Tensor,
        w2: Tensor,
        *,
        slices: tuple[ExpertSlice, ...],
        num_experts: int,
    ) -> Tensor:
        """See `ExpertsBackend`."""
        scale = self._bench.scale
        merged = merge_slices(slices)
        counts = torch.bincount(expert_ids_rk.flatten() + 1, minlength=num_experts + 1).tolist()
        rows = [counts[piece.expert + 1] * scale.tokens for piece in merged]
        neurons = [(piece.hi - piece.lo) * scale.full.neuron_block for piece in merged]
        seconds = self._bench.kernels.experts(rows, neurons)
        y_rd = self._inner(rows_rd, expert_ids_rk, weights_rk, w13, w2, slices=slices, num_experts=num_experts)
        return self._bench.launch("expert_gemm", seconds, y_rd)


class _EmulatedCriterion:
    """A criterion that takes as long as the full model's head.

    The kernel comes before the collectives of a lane, which only changes the order of the two.
    """

    def __init__(self, inner: Callable[..., Any], bench: Workbench):
        self._inner = inner
        self._bench = bench

    def __call__(self, x_sd: Tensor, weight_vd: Tensor, targets_t: Tensor, *others: Any) -> Any:
        """See `nep.moe.loss.Criterion`."""
        tokens = self._bench.scale.tokens
        seconds = self._bench.kernels.head(targets_t.numel() * tokens, len(x_sd) * tokens, len(weight_vd))
        return self._inner(self._bench.launch("dense", seconds, x_sd), weight_vd, targets_t, *others)


class _Kernel(torch.autograd.Function):
    """Passes on its input; in backward it launches a kernel first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Callable[[], None]) -> Tensor:
        ctx.launch = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.launch()
        return grads[0], None
