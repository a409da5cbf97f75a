"""How the slots of a lane share one token stream, as far as a model needs to know.

Between blocks every token is on exactly one slot of its lane (sequence parallelism): it is normed, routed and scored
once, so every gradient is a plain sum over the slots. Inside attention, embedding and head each slot computes its
part of the heads or of the vocabulary for all tokens of the lane.

Shapes: t tokens of the lane, s tokens of this slot, d hidden size.
"""

from typing import Protocol

from torch import Tensor


class Lane(Protocol):
    """Moves activations between the two forms; differentiable, and each is the other's transpose."""

    def gather(self, x_sd: Tensor, num_tokens: int) -> Tensor:
        """All tokens of the lane, from every slot's own.

        Args:
            x_sd: this slot's own tokens.
            num_tokens: t.
        """
        ...

    def reduce_scatter(self, partial_td: Tensor) -> Tensor:
        """This slot's own tokens, summed over the parts that every slot computed."""
        ...

    def own(self, values_t: Tensor) -> Tensor:
        """This slot's part of something that all slots have for all tokens; no communication."""
        ...

    def sum(self, counts: Tensor) -> Tensor:
        """Integers added over the slots; not differentiable."""
        ...


class SingleSlotLane:
    """A lane of one slot: all tokens are its own."""

    def gather(self, x_sd: Tensor, num_tokens: int) -> Tensor:
        """Nothing to gather."""
        return x_sd

    def reduce_scatter(self, partial_td: Tensor) -> Tensor:
        """The only part is the sum."""
        return partial_td

    def own(self, values_t: Tensor) -> Tensor:
        """All of it."""
        return values_t

    def sum(self, counts: Tensor) -> Tensor:
        """The only slot's."""
        return counts
