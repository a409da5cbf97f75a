"""Token-choice top-k routing.

Shapes: t tokens, d hidden size, e experts, k = top_k.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Keeps a token whose scores all round to zero from being divided by zero; below anything that a sum feels.
_TINY = 1e-20


class Routing(NamedTuple):
    """Which experts each token visits.

    Attributes:
        expert_ids_tk: Global expert ids, int64, heaviest first.
        weights_tk: Weights of the experts' outputs. max(float32, model dtype).
        logits_te: Scores before softmax or sigmoid, in the dtype of the weights.
        shares_te: Scores as shares that sum to one, for auxiliary losses; None if there are none to compute.
    """

    expert_ids_tk: Tensor
    weights_tk: Tensor
    logits_te: Tensor
    shares_te: Tensor | None = None


class TopKRouter(nn.Module):
    """Scores of all experts, then the `top_k` largest.

    Mixtral (arXiv 2401.04088, section 2.1): softmax, renormalised. DeepSeek-V3 (arXiv 2412.19437, equations 12 to 16):
    sigmoid, chosen by score plus bias, weighted by score alone, renormalised and scaled. Without renormalisation:
    Qwen1.5-MoE, DeepSeek-V2.

    Args:
        num_experts: Experts to choose from.
        hidden_size: Width of a token.
        top_k: Experts per token.
        scores: What the logits become.
        biased: Choose by score plus `bias`.
        normalised: Divide the weights of a token by their sum.
        scaling: Factor on the weights.
        dtype: Of the weight.
        device: Of the weight.

    Attributes:
        bias: Buffer [e], max(float32, model dtype), or None. Routing never changes it: see
            `nep.moe.routing_state`. Zero, unless the device is "meta", where it is to be replaced.
    """

    bias: Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        top_k: int,
        *,
        scores: Literal["softmax", "sigmoid"] = "softmax",
        biased: bool = False,
        normalised: bool = True,
        scaling: float = 1.0,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.scores = scores
        self.normalised = normalised
        self.scaling = scaling
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))
        wide = torch.promote_types(dtype, torch.float32)
        self.register_buffer("bias", torch.zeros(num_experts, dtype=wide, device=device) if biased else None)

    @property
    def num_experts(self) -> int:
        """Experts to choose from."""
        return self.weight.size(0)

    def forward(self, x_td: Tensor, with_shares: bool = False) -> Routing:
        """Routes each token by itself: the choice depends on no other token, hence on no layout.

        Args:
            x_td: Tokens.
            with_shares: Fill `Routing.shares_te`.
        """
        wide = torch.promote_types(x_td.dtype, torch.float32)
        if self.scores == "softmax":
            logits_te = F.linear(x_td, self.weight).to(wide)
        else:
            # As DeepSeek-V3 does: a bias moves by less than the rounding of half precision.
            logits_te = F.linear(x_td.to(wide), self.weight.to(wide))
        scores_te = logits_te.softmax(dim=-1) if self.scores == "softmax" else logits_te.sigmoid()
        if self.bias is None:
            weights_tk, expert_ids_tk = scores_te.topk(self.top_k, dim=-1)
        else:
            expert_ids_tk = (scores_te.detach() + self.bias).topk(self.top_k, dim=-1).indices
            weights_tk = scores_te.gather(-1, expert_ids_tk)
        if self.normalised:
            total_t1 = weights_tk.sum(dim=-1, keepdim=True)
            weights_tk = weights_tk / (total_t1 if self.scores == "softmax" else total_t1 + _TINY)
        if self.scaling != 1.0:
            weights_tk = weights_tk * self.scaling
        return Routing(expert_ids_tk, weights_tk, logits_te, self._shares(scores_te) if with_shares else None)

    def _shares(self, scores_te: Tensor) -> Tensor:
        if self.scores == "softmax":
            return scores_te
        return scores_te / (scores_te.sum(dim=-1, keepdim=True) + _TINY)
