"""Bringing tokens to the slots that hold their experts, and the results back.

Shapes: t local tokens, r rows received, k = top_k, d hidden size.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nep.moe.router import Routing

__all__ = ["Dispatched", "LocalDispatcher", "Routing", "TokenDispatcher"]


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """Rows that this slot must run through its slices, and what `combine` needs to send the results back.

    Attributes:
        rows_rd: Each token once, however many of its experts have slices here.
        expert_ids_rk: All of the row's experts, int64; -1 and those not held here contribute nothing.
        weights_rk: Weights of the experts' outputs, max(float32, model dtype).
        handle: For the dispatcher that made it; nothing is kept on the dispatcher.
    """

    rows_rd: Tensor
    expert_ids_rk: Tensor
    weights_rk: Tensor
    handle: object = None


class TokenDispatcher(Protocol):
    """Moves tokens to experts; differentiable in both directions, in the rows and in the weights."""

    def dispatch(self, x_td: Tensor, routing: Routing) -> Dispatched:
        """Sends each token once to every slot that holds a slice of one of its experts."""
        ...

    def combine(self, dispatched: Dispatched, y_rd: Tensor) -> Tensor:
        """Returns the rows to their tokens and adds what several slots computed for one token.

        Returns:
            y_td, in the order and dtype of the dispatched `x_td`.
        """
        ...


class LocalDispatcher:
    """All experts are here: tokens stay where they are."""

    def dispatch(self, x_td: Tensor, routing: Routing) -> Dispatched:
        """Every token is a row."""
        return Dispatched(rows_rd=x_td, expert_ids_rk=routing.expert_ids_tk, weights_rk=routing.weights_tk)

    def combine(self, dispatched: Dispatched, y_rd: Tensor) -> Tensor:
        """Every row is a token."""
        return y_rd
