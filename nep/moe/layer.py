"""The mixture-of-experts layer: router, dispatch, experts, combine.

Shapes: t tokens, d hidden size, e experts.
"""

from typing import NamedTuple

from torch import Tensor, nn

from nep.moe.dispatcher import LocalDispatcher, TokenDispatcher
from nep.moe.experts import Experts
from nep.moe.permutation import num_tokens_per_expert
from nep.moe.router import Routing, TopKRouter


class MoEOutput(NamedTuple):
    """What a layer returns.

    Attributes:
        y_td: Outputs of the tokens.
        num_tokens_per_expert_e: How many of these tokens chose each expert, int64.
        routing: Of the tokens, for auxiliary losses.
    """

    y_td: Tensor
    num_tokens_per_expert_e: Tensor
    routing: Routing


class MoE(nn.Module):
    """Routed experts in place of a feed-forward network.

    Args:
        router: Chooses experts.
        experts: The slices that this slot stores.
        axis: Name of the layer's expert line in plans.
        dispatcher: Replace the attribute to spread the experts over slots.
    """

    def __init__(
        self,
        router: TopKRouter,
        experts: Experts,
        *,
        axis: str,
        dispatcher: TokenDispatcher | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.axis = axis
        self.dispatcher: TokenDispatcher = LocalDispatcher() if dispatcher is None else dispatcher

    def forward(self, x_td: Tensor) -> MoEOutput:
        """Runs each token through its experts.

        Args:
            x_td: Tokens; none is fine, and every parameter still gets a (zero) gradient.

        """
        routing = self.router(x_td)
        dispatched = self.dispatcher.dispatch(x_td, routing)
        y_rd = self.experts(dispatched.rows_rd, dispatched.expert_ids_rk, dispatched.weights_rk)
        y_td = self.dispatcher.combine(dispatched, y_rd)
        counts_e = num_tokens_per_expert(routing.expert_ids_tk, self.router.num_experts)
        return MoEOutput(y_td, counts_e, routing)
