"""Token-choice top-k routing.

Shapes: t tokens, d hidden size, e experts, k = top_k.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Routing(NamedTuple):
    """Which experts each token visits.

    Attributes:
        expert_ids_tk: Global expert ids, int64, heaviest first.
        weights_tk: Weights of the experts' outputs; they sum to one. max(float32, model dtype).
        logits_te: Scores before the softmax, in the dtype of the weights.
    """

    expert_ids_tk: Tensor
    weights_tk: Tensor
    logits_te: Tensor


class TopKRouter(nn.Module):
    """Softmax over all experts, then the `top_k` largest, renormalised (arXiv 2401.04088, section 2.1).

    Args:
        num_experts: Experts to choose from.
        hidden_size: Width of a token.
        top_k: Experts per token.
        dtype: Of the weight.
        device: Of the weight.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        top_k: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))

    @property
    def num_experts(self) -> int:
        """Experts to choose from."""
        return self.weight.size(0)

    def forward(self, x_td: Tensor) -> Routing:
        """Routes each token by itself: the choice depends on no other token, hence on no layout."""
        logits_te = F.linear(x_td, self.weight)
        logits_te = logits_te.to(torch.promote_types(logits_te.dtype, torch.float32))
        probs_te = logits_te.softmax(dim=-1)
        top_probs_tk, expert_ids_tk = probs_te.topk(self.top_k, dim=-1)
        return Routing(expert_ids_tk, top_probs_tk / top_probs_tk.sum(dim=-1, keepdim=True), logits_te)
