"""Updates of the owned and the mirrored shards of a slot: AdamW, or SGD with momentum.

Owner and mirror run the same kernel on the same sums, so they keep the same bits without talking. Their cuts differ,
and that must not show either, see `_whole_vectors`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from nep.parallel.state import ADAMW_MOMENTS, OptimizerShard
from nep.planning.layout import Lines

_VECTOR_BYTES = 64  # a multiple of every CPU's vectors; the kernel's threads share out multiples of it too


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), or SGD as `torch.optim.SGD` has it;
    linear warmup, cosine decay.

    Attributes:
        algorithm: `adamw` or `sgd`. SGD has one moment (none without momentum) where AdamW has two.
        lr: peak learning rate.
        warmup_steps: steps of linear warmup.
        min_lr_ratio: the last step's learning rate as a share of `lr`.
        beta1, beta2, eps: of AdamW.
        momentum: of SGD.
        weight_decay: decoupled in AdamW; in SGD added to the gradient.
        clip_norm: limit of the global gradient norm.
    """

    algorithm: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-3
    warmup_steps: int = 10
    min_lr_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    @property
    def moments(self) -> tuple[str, ...]:
        """What the algorithm keeps for each element, beside its master weight."""
        if self.algorithm == "adamw":
            return ADAMW_MOMENTS
        return ("momentum_buffer",) if self.momentum else ()

    def problems(self) -> list[str]:
        """What is wrong with these values, one sentence each."""
        found = []
        if self.algorithm not in ("adamw", "sgd"):
            found.append(f"algorithm ({self.algorithm!r}) must be adamw or sgd")
        if not (math.isfinite(self.lr) and self.lr > 0):
            found.append(f"lr ({self.lr}) must be a positive number; give --lr, for example 3e-3")
        if self.warmup_steps < 0:
            found.append(f"warmup_steps ({self.warmup_steps}) must not be negative; use 0 for none")
        if not 0 <= self.min_lr_ratio <= 1:
            found.append(f"min_lr_ratio ({self.min_lr_ratio}) must lie between 0 and 1")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"{name} ({getattr(self, name)}) must lie in [0, 1)")
        if not self.eps > 0:
            found.append(f"eps ({self.eps}) must be positive")
        if not 0 <= self.weight_decay < math.inf:
            found.append(f"weight_decay ({self.weight_decay}) must be finite and not negative")
        if not self.clip_norm > 0:
            found.append(f"clip_norm ({self.clip_norm}) must be positive; use a large value to switch clipping off")
        return found

    def learning_rate(self, step: int, total_steps: int) -> float:
        """Learning rate of step 1, 2, ..., total_steps."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        span = max(1, total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        low = self.min_lr_ratio * self.lr
        return low + (self.lr - low) * 0.5 * (1 + math.cos(math.pi * progress))

    def gradient_scale(self, norm: float, tokens: int) -> float:
        """What a summed gradient is multiplied with: 1 / tokens, and clipping of the mean's global norm.

        Args:
            norm: global norm of the summed gradient.
            tokens: number of tokens of the step, over all replicas.
        """
        if tokens == 0:
            return 0.0
        return min(1.0, self.clip_norm / (norm / tokens + 1e-6)) / tokens


def apply_update(
    shards: Sequence[OptimizerShard],
    lines: Lines,
    config: OptimizerConfig,
    *,
    lr: float,
    update: int,
    scale: float,
) -> None:
    """One update of master weights and moments from the shards' gradient sums (which it rescales in place).

    Args:
        lr: learning rate of this step.
        update: number of this update, from 1 (skipped steps do not count).
        scale: see `OptimizerConfig.gradient_scale`.
    """
    for decay in (True, False):
        names = [name for name, line in lines.items() if line.weight_decay == decay]
        chosen = [(shard, name) for shard in shards for name in names if shard.master[name].numel()]
        if not chosen:
            continue
        gradients = [shard.grad_sum[name] for shard, name in chosen]
        torch._foreach_mul_(gradients, scale)
        params, left = _whole_vectors([shard.master[name] for shard, name in chosen])
        gradients, _ = _whole_vectors(gradients)
        moments = []
        for kind in config.moments:
            views, rests = _whole_vectors([shard.moments[kind][name] for shard, name in chosen])
            moments.append(views)
            left += rests
        kernel = _adamw if config.algorithm == "adamw" else _sgd
        kernel(params, gradients, moments, config, lr=lr, update=update, decay=config.weight_decay if decay else 0.0)
        for end, padded in left:
            end.copy_(padded[: len(end)])


def _adamw(
    params: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: list[list[torch.Tensor]],
    config: OptimizerConfig,
    *,
    lr: float,
    update: int,
    decay: float,
) -> None:
    exp_avgs, exp_avg_sqs = moments
    adamw(
        params,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        # The kernel counts the step itself, so it gets the one before.
        [torch.tensor(float(update - 1), device=param.device) for param in params],
        foreach=False,
        fused=True,
        amsgrad=False,
        beta1=config.beta1,
        beta2=config.beta2,
        lr=lr,
        weight_decay=decay,
        eps=config.eps,
        maximize=False,
    )


def _sgd(
    params: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: list[list[torch.Tensor]],
    config: OptimizerConfig,
    *,
    lr: float,
    update: int,
    decay: float,
) -> None:
    # A buffer of zeros and one that begins as the first gradient are the same: there is no dampening.
    buffers: list[torch.Tensor | None] = [*moments[0]] if moments else [None] * len(params)
    sgd(
        params,
        gradients,
        buffers,
        foreach=False,
        fused=True,
        weight_decay=decay,
        momentum=config.momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )


def _whole_vectors(
    tensors: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The tensors as flat ones of whole vectors, so that all elements go through the same instructions.

    The CPU kernel treats the elements behind the last whole vector one by one and rounds them differently (the second
    moment, in the last bit). An element that is such a rest in the owner's cut need not be one in the mirror's.

    Returns:
        Views of all whole vectors, then a padded copy of each tensor's rest; and the rests with their copies.
    """
    views, rests = [], []
    for tensor in tensors:
        flat = tensor.view(-1)
        width = _VECTOR_BYTES // flat.element_size()
        whole = len(flat) // width * width
        if whole:
            views.append(flat[:whole])
        if whole < len(flat):
            end = flat[whole:]
            padded = end.new_zeros(width)
            padded[: len(end)] = end
            rests.append((end, padded))
    return [*views, *(padded for _, padded in rests)], rests
