"""What a backend of the experts must do."""

from typing import Protocol

from torch import Tensor

from nep.moe.slices import ExpertSlice


class ExpertsBackend(Protocol):
    """Weighted sum over local slices, differentiable in rows, weights, w13 and w2.

    All backends sum over slices in the dtype of `weights_rk` and return the rows' dtype; are one autograd
    node that gives each parameter one whole gradient; drop no token, for then the result would depend on the
    layout; and give (zero) gradients for everything even without rows or slices.
    """

    def __call__(
        self,
        rows_rd: Tensor,
        expert_ids_rk: Tensor,
        weights_rk: Tensor,
        w13: Tensor,
        w2: Tensor,
        *,
        slices: tuple[ExpertSlice, ...],
        num_experts: int,
    ) -> Tensor:
        """Computes y_rd.

        Args:
            rows_rd: Rows.
            expert_ids_rk: Global expert ids, int64; ids without a slice, and -1, contribute nothing.
            weights_rk: Weight of each of the row's experts.
            w13: [n, 2, b, d], gate then up.
            w2: [n, b, d].
            slices: A partition of the n units.
            num_experts: Experts of the layer.
        """
        ...
