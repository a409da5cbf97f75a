"""AdamW on the owned and the mirrored shards of a slot.

Owner and mirror run the same kernel on the same sums, so they keep the same bits without talking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from nep.parallel.state import OptimizerShard
from nep.planning.layout import Lines


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), linear warmup, cosine decay.

    Attributes:
        lr: peak learning rate.
        warmup_steps: steps of linear warmup.
        min_lr_ratio: the last step's learning rate as a share of `lr`.
        clip_norm: limit of the global gradient norm.
    """

    lr: float = 3e-3
    warmup_steps: int = 10
    min_lr_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def problems(self) -> list[str]:
        """What is wrong with these values, one sentence each."""
        found = []
        if not (math.isfinite(self.lr) and self.lr > 0):
            found.append(f"lr ({self.lr}) must be a positive number; give --lr, for example 3e-3")
        if self.warmup_steps < 0:
            found.append(f"warmup_steps ({self.warmup_steps}) must not be negative; use 0 for none")
        if not 0 <= self.min_lr_ratio <= 1:
            found.append(f"min_lr_ratio ({self.min_lr_ratio}) must lie between 0 and 1")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"{name} ({getattr(self, name)}) must lie in [0, 1)")
        if not self.eps > 0:
            found.append(f"eps ({self.eps}) must be positive")
        if not self.weight_decay >= 0:
            found.append(f"weight_decay ({self.weight_decay}) must not be negative")
        if not self.clip_norm > 0:
            found.append(
                f"clip_norm ({self.clip_norm}) must be positive; use a large value to switch clipping off"
            )
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


def apply_adamw(
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
        adamw(
            [shard.master[name] for shard, name in chosen],
            gradients,
            [shard.exp_avg[name] for shard, name in chosen],
            [shard.exp_avg_sq[name] for shard, name in chosen],
            [],
            # The kernel counts the step itself, so it gets the one before.
            [torch.tensor(float(update - 1)) for _ in chosen],
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=lr,
            weight_decay=config.weight_decay if decay else 0.0,
            eps=config.eps,
            maximize=False,
        )
