"""Feed-forward networks that every token visits: of dense layers, and the shared experts beside the routed ones.

Shapes: t tokens of the lane, s tokens of this slot, n local neurons, d hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nep.moe.lane import Lane, SingleSlotLane
from nep.moe.recompute import run_local


class FeedForward(nn.Module):
    """`down(silu(gate(x)) * up(x))` over the neurons that are here: a lane's slots have disjoint ones.

    Args:
        num_neurons: All of them; the parameters are replaced for a cut.
        hidden_size: Width of a token.
        dtype: Of the weights.
        device: Of the weights.

    Attributes:
        w13: Parameter [n, 2, d], gate then up of each neuron.
        w2: Parameter [n, d].
        lane: Replace the attribute to share the tokens with other slots.
        recompute: Drop intermediate results and compute them again in backward.
    """

    def __init__(self, num_neurons: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(num_neurons, 2, hidden_size, dtype=dtype, device=device))
        self.w2 = nn.Parameter(torch.empty(num_neurons, hidden_size, dtype=dtype, device=device))
        self.lane: Lane = SingleSlotLane()
        self.recompute = False

    def forward(self, x_sd: Tensor, num_tokens: int) -> Tensor:
        """Outputs of this slot's tokens.

        Args:
            x_sd: This slot's tokens.
            num_tokens: Tokens of the lane; all its slots call with the same.
        """
        x_td = self.lane.gather(x_sd, num_tokens)
        return self.lane.reduce_scatter(run_local(self._neurons, x_td, recompute=self.recompute))

    def _neurons(self, x_td: Tensor) -> Tensor:
        """The sum over the neurons that are here."""
        h_tn2 = F.linear(x_td, self.w13.flatten(0, 1)).view(x_td.size(0), self.w13.size(0), 2)
        gate_tn, up_tn = h_tn2.unbind(-1)
        return (F.silu(gate_tn) * up_tn) @ self.w2


class SharedExperts(FeedForward):
    """The experts that every token visits (DeepSeekMoE, arXiv 2401.06066), all of them as one network.

    Args:
        gated: Scale the result with a sigmoid of the token (Qwen1.5-MoE).

    Attributes:
        gate: Parameter [d], or None.
    """

    def __init__(
        self,
        num_neurons: int,
        hidden_size: int,
        *,
        gated: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(num_neurons, hidden_size, dtype=dtype, device=device)
        self.gate = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device)) if gated else None

    def forward(self, x_sd: Tensor, num_tokens: int) -> Tensor:
        """See `FeedForward.forward`; the gate, held by every slot, sees each token once, on the token's own slot."""
        y_sd = super().forward(x_sd, num_tokens)
        if self.gate is None:
            return y_sd
        return torch.sigmoid(F.linear(x_sd, self.gate[None])) * y_sd
