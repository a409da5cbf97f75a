"""When gradient sums start and parameters are waited for: fixed points of forward and backward.

The points are the inputs of the model's blocks and the output of the last one. All slots pass all of them in the same
order, on the thread that runs the model, so transfers and token dispatch interleave alike everywhere. Whatever has no
point of its own (the embedding, a model without blocks) is flushed at the end: hooks on parameters would not fire
for those that a step did not use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nep.parallel.grad_sync import Reduction, Return
from nep.parallel.state import Tensors


class Overlap:
    """Hooks on one slot's model.

    Args:
        model: with `blocks()`, its layers in forward order, if it has such.
        grads: where the sums start from, see `GradSync.grads`.

    Attributes:
        reduction: sums of the step whose last round runs now, or None.
        returning: parameters on their way, or None.
    """

    def __init__(self, model: nn.Module, grads: Tensors):
        self._parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        self._grads = grads
        self.reduction: Reduction | None = None
        self.returning: Return | None = None
        blocks: Sequence[nn.Module] = model.blocks() if hasattr(model, "blocks") else ()
        model.register_forward_pre_hook(lambda *_: self._need(-1 if blocks else None))
        for layer, block in enumerate(blocks):
            block.register_forward_pre_hook(self._before(layer))
        if blocks:
            blocks[-1].register_forward_hook(self._after(len(blocks)))

    def collect(self, names: Sequence[str]) -> None:
        """Add gradients that backward could not accumulate in place: parameters narrower than the sums."""
        for name in names:
            parameter, total = self._parameters[name], self._grads[name]
            if parameter.dtype != total.dtype and parameter.grad is not None:
                with torch.no_grad():
                    total.add_(parameter.grad.view(total.shape))
                parameter.grad = None

    def collect_all(self) -> None:
        """`collect` for every parameter: between the rounds of a step."""
        self.collect(tuple(self._parameters))

    def _need(self, layer: int | None) -> None:
        if self.returning is None:
            return
        if layer is None:
            self.returning.finish()
        else:
            self.returning.need(layer)

    def _reached(self, layer: int) -> None:
        if self.reduction is not None:
            self.reduction.reached(layer)

    def _before(self, layer: int) -> Callable[..., tuple[Any, ...]]:
        """Before a block: its parameters have to be there. In backward, after it: all its gradients are."""

        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            self._need(layer)
            return (_Point.apply(arguments[0], lambda: self._reached(layer)), *arguments[1:])

        return hook

    def _after(self, layer: int) -> Callable[..., Any]:
        """After the last block: the same for what follows it."""

        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
            self._need(layer)
            return (_Point.apply(output[0], lambda: self._reached(layer)), *output[1:])

        return hook


class _Point(torch.autograd.Function):
    """Passes on its input; in backward it calls `reached` first.

    Autograd runs the nodes made after this one before it (those with a higher sequence number first, and the
    accumulation of gradients before all others), so everything behind the point has its gradients by then.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reached: Callable[[], None]) -> torch.Tensor:
        ctx.reached = reached
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.reached()
        return grads[0], None
