"""Cross-entropy of the next token, summed over tokens.

Shapes: s tokens of this slot, t tokens of its lane, d hidden size, v vocabulary rows.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class TokenLoss(NamedTuple):
    """A loss that counts each token once over all slots.

    Attributes:
        total: what this slot starts its backward from, auxiliary losses of the logits included. Its value is no slot's
            own: a slot with a part of the vocabulary has the gradients of all tokens of its lane for that part.
        own: sum of the cross-entropy over the tokens that this slot scores, detached; the slots' sums add up to the
            batch's.
        num_tokens: how many they are.
    """

    total: Tensor
    own: Tensor
    num_tokens: int


class Criterion(Protocol):
    """Scores hidden states against the vocabulary."""

    def __call__(self, x_sd: Tensor, weight_vd: Tensor, targets_t: Tensor, z_loss: float = 0.0) -> TokenLoss:
        """The loss of this slot's tokens.

        Args:
            x_sd: normed hidden states of this slot's tokens.
            weight_vd: the vocabulary rows that this slot holds, in storage order.
            targets_t: next tokens of the whole lane, int64.
            z_loss: coefficient of each token's squared log-partition, see `nep.moe.aux_losses`.
        """
        ...


def cross_entropy_sum(x_sd: Tensor, weight_vd: Tensor, targets_t: Tensor, z_loss: float = 0.0) -> TokenLoss:
    """The whole vocabulary and all tokens are here; computed in at least float32. No tokens give 0, in the graph."""
    logits_sv = F.linear(x_sd, weight_vd)
    wide_sv = logits_sv.to(torch.promote_types(logits_sv.dtype, torch.float32))
    loss = F.cross_entropy(wide_sv, targets_t, reduction="sum")
    total = loss + z_loss * wide_sv.logsumexp(dim=-1).square().sum() if z_loss else loss
    return TokenLoss(total, loss.detach(), targets_t.numel())
