"""Activation checkpointing (arXiv 1604.06174) of what one slot computes by itself.

Only regions without communication are wrapped: a collective that ran again in backward would need all other slots to
run it too, at the same moment, and a counter would count twice. So attention between its gather and its scatter, and
the experts between dispatch and combine, keep their inputs only; what collectives delivered stays in memory.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def run_local(function: Callable[..., Tensor], *arguments: object, recompute: bool) -> Tensor:
    """`function(*arguments)`; with `recompute` its intermediate results are dropped and computed again in backward.

    The second run does what the first did, on the same inputs and parameters, so gradients have the same bits.

    Args:
        function: without collectives, counters and random numbers.
        recompute: ignored where no gradient is recorded.
    """
    if not (recompute and torch.is_grad_enabled()):
        return function(*arguments)
    # A model draws no random numbers, and saving the generators' state would wait for an accelerator.
    return cast(Tensor, checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False))
