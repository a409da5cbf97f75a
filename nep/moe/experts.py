"""The SwiGLU experts that a slot stores, whole or in slices.

Shapes: r rows, k = top_k, d hidden size, n local units, b neurons of a unit (`neuron_block`).
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nep.moe.backends import ExpertsBackend, get_backend
from nep.moe.slices import ExpertSlice, check_slices, expert_slices

__all__ = ["ExpertSlice", "Experts", "expert_slices"]


class Experts(nn.Module):
    """One local expert line: unit-major weights of all slices, full experts first.

    An expert is `down(silu(gate(x)) * up(x))`, a sum over its neurons; a slice has some of the neurons, so
    what the slots with slices of one expert compute adds up to the expert.

    Args:
        num_experts: Experts of the layer, held here or not.
        hidden_size: Width of a row.
        neuron_block: Neurons of a unit.
        slices: What is stored here, in storage order (`expert_slices`).
        dtype: Of the weights.
        device: Of the weights.
        backend: Name of the implementation.

    Attributes:
        w13: Parameter [n, 2, b, d], gate then up.
        w2: Parameter [n, b, d].
    """

    def __init__(
        self,
        *,
        num_experts: int,
        hidden_size: int,
        neuron_block: int,
        slices: Iterable[ExpertSlice],
        dtype: torch.dtype,
        device: torch.device | str,
        backend: str = "loop",
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.backend: ExpertsBackend = get_backend(backend)
        slices = tuple(slices)
        num_units = sum(piece.hi - piece.lo for piece in slices)
        self.replace(
            slices,
            torch.empty(num_units, 2, neuron_block, hidden_size, dtype=dtype, device=device),
            torch.empty(num_units, neuron_block, hidden_size, dtype=dtype, device=device),
        )

    @property
    def slices(self) -> tuple[ExpertSlice, ...]:
        """What is stored here, in storage order."""
        return self._slices

    def replace(self, slices: Iterable[ExpertSlice], w13: Tensor, w2: Tensor) -> None:
        """Stores other slices: both weights become new parameters over the given memory, without gradients.

        Args:
            slices: In storage order.
            w13: [n, 2, b, d], contiguous.
            w2: [n, b, d], contiguous.

        Raises:
            ValueError: The slices do not partition the units, or the weights' shapes do not fit each other.
        """
        slices = tuple(slices)
        if w13.shape != (w2.size(0), 2, *w2.shape[1:]) or not (w13.is_contiguous() and w2.is_contiguous()):
            raise ValueError(
                f"w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)} must be contiguous [n, 2, b, d] and "
                "[n, b, d]; allocate both for the same units"
            )
        check_slices(slices, num_experts=self.num_experts, num_units=w13.size(0))
        self._slices = slices
        self.w13 = nn.Parameter(w13)
        self.w2 = nn.Parameter(w2)

    def forward(self, rows_rd: Tensor, expert_ids_rk: Tensor, weights_rk: Tensor) -> Tensor:
        """Weighted sum over the local slices of each row's experts.

        Args:
            rows_rd: Rows; none is fine, the result still hangs on all parameters.
            expert_ids_rk: Global ids, int64; ids that are not held here, and -1, contribute nothing.
            weights_rk: max(float32, dtype of the rows).

        Returns:
            y_rd in the rows' dtype, summed in the weights' dtype.
        """
        return self.backend(
            rows_rd,
            expert_ids_rk,
            weights_rk,
            self.w13,
            self.w2,
            slices=self._slices,
            num_experts=self.num_experts,
        )

    def extra_repr(self) -> str:
        """What is stored, for printing the model."""
        units, block, hidden_size = self.w2.shape
        return f"{units} units of {block} neurons, hidden_size={hidden_size}, slices={len(self._slices)}"
