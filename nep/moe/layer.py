"""The mixture-of-experts layer: router, dispatch, experts, combine, and shared experts beside them.

Shapes: s tokens of this slot, d hidden size, e experts.
"""

from typing import NamedTuple

from torch import Tensor, nn

from nep.moe.dispatcher import LocalDispatcher, TokenDispatcher
from nep.moe.experts import Experts
from nep.moe.feed_forward import SharedExperts
from nep.moe.permutation import num_tokens_per_expert
from nep.moe.recompute import run_local
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
    """Routed experts in place of a feed-forward network, and those that every token visits.

    Args:
        router: Chooses experts.
        experts: The slices that this slot stores.
        axis: Name of the layer's expert line in plans.
        dispatcher: Replace the attribute to spread the experts over slots.
        shared: Shared experts, if the model has some.

    Attributes:
        recompute: Run the routed experts again in backward instead of keeping their intermediate results; what was
            dispatched is kept.
    """

    def __init__(
        self,
        router: TopKRouter,
        experts: Experts,
        *,
        axis: str,
        dispatcher: TokenDispatcher | None = None,
        shared: SharedExperts | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.axis = axis
        self.dispatcher: TokenDispatcher = LocalDispatcher() if dispatcher is None else dispatcher
        self.recompute = False

    def forward(self, x_td: Tensor, num_tokens: int | None = None, with_shares: bool = False) -> MoEOutput:
        """Runs each token through its experts.

        Args:
            x_td: Tokens; none is fine, and every parameter still gets a (zero) gradient.
            num_tokens: Tokens of the lane; None: these are all.
            with_shares: Fill `Routing.shares_te`.
        """
        routing = self.router(x_td, with_shares)
        dispatched = self.dispatcher.dispatch(x_td, routing)
        y_rd = run_local(
            self.experts,
            dispatched.rows_rd,
            dispatched.expert_ids_rk,
            dispatched.weights_rk,
            recompute=self.recompute,
        )
        y_td = self.dispatcher.combine(dispatched, y_rd)
        if self.shared is not None:
            y_td = y_td + self.shared(x_td, len(x_td) if num_tokens is None else num_tokens)
        counts_e = num_tokens_per_expert(routing.expert_ids_tk, self.router.num_experts)
        return MoEOutput(y_td, counts_e, routing)
