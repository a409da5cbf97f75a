"""Reference backend: one pair of matrix products per slice, in any dtype on any device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nep.moe.backends.base import Backend
from nep.moe.backends.groups import run_experts
from nep.moe.slices import ExpertSlice


def loop_experts(
    rows_rd: Tensor,
    expert_ids_rk: Tensor,
    weights_rk: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    slices: tuple[ExpertSlice, ...],
    num_experts: int,
) -> Tensor:
    """See `ExpertsBackend`."""
    return run_experts(
        rows_rd,
        expert_ids_rk,
        weights_rk,
        w13,
        w2,
        slices=slices,
        num_experts=num_experts,
        products=_OneByOne(),
        together=False,
    )


class _OneByOne:
    """Groups of one slice."""

    def rows_by_transposed(self, x_sj: Tensor, w_gij: Tensor, offsets: Sequence[int]) -> Tensor:
        return x_sj @ w_gij[0].T

    def rows_by(self, x_si: Tensor, w_gij: Tensor, offsets: Sequence[int], out_sj: Tensor | None = None) -> Tensor:
        return torch.mm(x_si, w_gij[0], out=out_sj)

    def outer(self, a_si: Tensor, b_sj: Tensor, offsets: Sequence[int], out_gij: Tensor) -> None:
        torch.mm(a_si.T, b_sj, out=out_gij[0])


BACKEND = Backend(
    run=loop_experts,
    problem=lambda setting: None,
    load=lambda: None,
    why="one pair of products per slice, in any dtype on any device",
)
