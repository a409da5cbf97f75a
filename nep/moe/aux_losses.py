"""Auxiliary losses of the router that do not depend on how tokens are spread over slots.

Anything computed from the tokens that happen to be together (on a slot, in a micro-batch) makes the gradient depend
on the layout. What remains: losses of single tokens, and of whole sequences, with their counts added over the lane.

Shapes: s tokens of this slot, b sequences of the lane, e experts, k choices of a token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nep.moe.router import Routing


@dataclass(frozen=True, kw_only=True)
class AuxLosses:
    """Coefficients; 0 switches a loss off.

    Attributes:
        z: of the squared log-partition of each token's router scores (ST-MoE, arXiv 2202.08906, equation 5).
        balance: of load balancing per sequence (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20): for a sequence of
            T tokens, E / (k T) times the sum over experts of count times mean probability, weighted by T.
    """

    z: float = 0.0
    balance: float = 0.0

    def problems(self) -> list[str]:
        """What is wrong with these values, one sentence each."""
        return [
            f"{name} ({value}) must be finite and at least 0; 0 switches it off"
            for name, value in (("z_loss_coefficient", self.z), ("aux_loss_coefficient", self.balance))
            if not (math.isfinite(value) and value >= 0)
        ]

    @property
    def any(self) -> bool:
        """Whether there is anything to compute."""
        return self.z > 0 or self.balance > 0


def router_losses(
    losses: AuxLosses,
    routing: Routing,
    sequence_s: Tensor,
    num_sequences: int,
    seq_len: int,
    sum_over_lane: Callable[[Tensor], Tensor],
) -> Tensor:
    """This slot's part of the losses of one layer, summed over tokens.

    The parts of all slots add up to the batch's, and so do their gradients.

    Args:
        losses: coefficients.
        routing: of this slot's tokens.
        sequence_s: which of the lane's sequences each token is of.
        num_sequences, seq_len: of the lane.
        sum_over_lane: adds integers over the slots of the lane; all of them call it.
    """
    logits_se = routing.logits_te
    total = logits_se.new_zeros(())
    if losses.z > 0:
        total = total + losses.z * logits_se.logsumexp(dim=-1).square().sum()
    if losses.balance > 0:
        num_experts, top_k = logits_se.size(1), routing.expert_ids_tk.size(1)
        counts = torch.zeros(num_sequences * num_experts, dtype=torch.int64, device=logits_se.device)
        places_sk = sequence_s[:, None] * num_experts + routing.expert_ids_tk
        counts.index_add_(0, places_sk.flatten(), torch.ones_like(places_sk.flatten()))
        counts_be = sum_over_lane(counts).view(num_sequences, num_experts).to(logits_se.dtype)
        # Each token's probabilities meet the counts of its sequence: the same sum, token by token.
        weighted_s = (counts_be[sequence_s] * logits_se.softmax(dim=-1)).sum(dim=-1)
        total = total + losses.balance * num_experts / (top_k * seq_len) * weighted_s.sum()
    return total
