"""torch's grouped matrix product: all equally large slices in one call, on views, forward and backward.

Full experts lie first in a slot's storage, so they are one group; slices of equal size that lie side by side are
another. float32 and bfloat16 with sizes that are multiples of 16 bytes; float64 is refused by torch.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nep.moe.backends.groups import run_experts
from nep.moe.slices import ExpertSlice

DTYPES = (torch.float32, torch.bfloat16)
_ALIGNMENT_BYTES = 16


def grouped_mm_problem(dtype: torch.dtype, *, hidden_size: int, neuron_block: int) -> str | None:
    """Why this backend cannot run a model, or None.

    Args:
        dtype: of rows and weights.
        hidden_size, neuron_block: every dimension that is multiplied is a multiple of one of them.
    """
    if dtype not in DTYPES:
        return f"grouped_mm has no {dtype}"
    multiple = _ALIGNMENT_BYTES // dtype.itemsize
    for name, size in (("hidden_size", hidden_size), ("neuron_block", neuron_block)):
        if size % multiple:
            return f"{name} ({size}) is not a multiple of {multiple}, as grouped_mm needs in {dtype}"
    return None


def grouped_mm_experts(
    rows_rd: Tensor,
    expert_ids_rk: Tensor,
    weights_rk: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    slices: tuple[ExpertSlice, ...],
    num_experts: int,
) -> Tensor:
    """See `ExpertsBackend`.

    Raises:
        ValueError: see `grouped_mm_problem`.
    """
    problem = grouped_mm_problem(w13.dtype, hidden_size=w13.size(3), neuron_block=w13.size(2))
    if problem is not None:
        raise ValueError(f"{problem}; use moe_backend 'loop'")
    return run_experts(
        rows_rd,
        expert_ids_rk,
        weights_rk,
        w13,
        w2,
        slices=slices,
        num_experts=num_experts,
        products=_Grouped(),
        together=True,
    )


class _Grouped:
    """One call per group. torch counts in int32 and has no output argument."""

    def rows_by_transposed(self, x_sj: Tensor, w_gij: Tensor, offsets: Sequence[int]) -> Tensor:
        return F.grouped_mm(x_sj, w_gij.transpose(-2, -1), offs=_ends(offsets, x_sj))

    def rows_by(self, x_si: Tensor, w_gij: Tensor, offsets: Sequence[int]) -> Tensor:
        return F.grouped_mm(x_si, w_gij, offs=_ends(offsets, x_si))

    def outer(self, a_si: Tensor, b_sj: Tensor, offsets: Sequence[int], out_gij: Tensor) -> None:
        out_gij.copy_(F.grouped_mm(a_si.T, b_sj, offs=_ends(offsets, a_si)))


def _ends(offsets: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32, device=like.device)
