"""Reference backend: one pair of matrix products per slice, in any dtype on any device.

Shapes: r rows, k = top_k, d hidden size, a assignments in expert order, s assignments of one slice,
n units of it, b neurons of a unit, f = n * b.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nep.moe.permutation import permute_tokens, sort_assignments, unpermute_tokens
from nep.moe.slices import ExpertSlice, merge_slices


class _Run(NamedTuple):
    """Units `lo:hi` of local storage and the assignments `start:stop` that they serve."""

    lo: int
    hi: int
    start: int
    stop: int


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
    merged = merge_slices(slices)
    experts = list(dict.fromkeys(piece.expert for piece in merged))
    permutation = sort_assignments(expert_ids_rk, experts, num_experts)
    position = {expert: index for index, expert in enumerate(experts)}
    runs = []
    for piece in merged:
        index = position[piece.expert]
        runs.append(_Run(piece.lo, piece.hi, permutation.offsets[index], permutation.offsets[index + 1]))
    y_rd: Tensor = _LoopExperts.apply(
        rows_rd, weights_rk, w13, w2, permutation.assignment_ids_a, permutation.row_ids_a, runs
    )
    return y_rd


class _LoopExperts(torch.autograd.Function):
    """One node for the whole line: slicing parameters in autograd would build full-size zero gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_rd: Tensor,
        weights_rk: Tensor,
        w13: Tensor,
        w2: Tensor,
        assignment_ids_a: Tensor,
        row_ids_a: Tensor,
        runs: list[_Run],
    ) -> Tensor:
        weights_a = weights_rk.flatten().index_select(0, assignment_ids_a)
        y_rd = rows_rd.new_zeros(rows_rd.shape, dtype=weights_a.dtype)
        hidden = []
        for lo, hi, start, stop in runs:
            row_ids_s = row_ids_a[start:stop]
            h_sf2 = permute_tokens(rows_rd, row_ids_s) @ w13[lo:hi].flatten(0, 2).T
            gate_snb, up_snb = _gate_up(h_sf2, hi - lo)
            act_sf = F.silu(gate_snb).mul_(up_snb).flatten(1)
            y_sd = (act_sf @ w2[lo:hi].flatten(0, 1)).to(weights_a.dtype)
            unpermute_tokens(y_rd, y_sd.mul_(weights_a[start:stop, None]), row_ids_s)
            hidden.append(h_sf2)
        ctx.save_for_backward(rows_rd, weights_a, w13, w2, assignment_ids_a, row_ids_a, *hidden)
        ctx.runs = runs
        ctx.weights_shape = weights_rk.shape
        return y_rd.to(rows_rd.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_rd: Tensor) -> tuple[Tensor | None, ...]:
        rows_rd, weights_a, w13, w2, assignment_ids_a, row_ids_a, *hidden = ctx.saved_tensors
        dtype, sum_dtype = rows_rd.dtype, weights_a.dtype
        grad_rows_rd = torch.zeros_like(rows_rd, dtype=sum_dtype)
        grad_weights_a = torch.zeros_like(weights_a)
        grad_w13, grad_w2 = torch.empty_like(w13), torch.empty_like(w2)  # the runs write all of them
        for (lo, hi, start, stop), h_sf2 in zip(ctx.runs, hidden, strict=True):
            row_ids_s = row_ids_a[start:stop]
            weights_s1 = weights_a[start:stop, None]
            w13_fd, w2_fd = w13[lo:hi].flatten(0, 2), w2[lo:hi].flatten(0, 1)
            gate_snb, up_snb = _gate_up(h_sf2, hi - lo)
            silu_snb = F.silu(gate_snb)
            act_sf = (silu_snb * up_snb).flatten(1)
            grad_y_sd = permute_tokens(grad_y_rd, row_ids_s)

            # y = weight * (act @ w2), so d(weight) = grad_y . (act @ w2) = (grad_y @ w2.T) . act: the slice's
            # output is neither kept nor computed again
            grad_act_sf = (grad_y_sd @ w2_fd.T).to(sum_dtype)
            grad_weights_a[start:stop] += (grad_act_sf * act_sf).sum(dim=1)
            weighted_sd = (grad_y_sd * weights_s1).to(dtype)
            torch.mm(act_sf.T, weighted_sd, out=grad_w2[lo:hi].flatten(0, 1))

            grad_act_snb = grad_act_sf.mul_(weights_s1).to(dtype).view(gate_snb.shape)
            grad_h_sf2 = torch.empty_like(h_sf2)
            grad_gate_snb, grad_up_snb = _gate_up(grad_h_sf2, hi - lo)
            torch.mul(grad_act_snb, silu_snb, out=grad_up_snb)
            torch.ops.aten.silu_backward.grad_input(
                grad_act_snb.mul_(up_snb), gate_snb, grad_input=grad_gate_snb
            )
            torch.mm(grad_h_sf2.T, permute_tokens(rows_rd, row_ids_s), out=grad_w13[lo:hi].flatten(0, 2))
            unpermute_tokens(grad_rows_rd, (grad_h_sf2 @ w13_fd).to(sum_dtype), row_ids_s)
        grad_weights = grad_weights_a.new_zeros(ctx.weights_shape.numel())
        grad_weights.index_copy_(0, assignment_ids_a, grad_weights_a)
        return (
            grad_rows_rd.to(dtype),
            grad_weights.view(ctx.weights_shape),
            grad_w13,
            grad_w2,
            None,
            None,
            None,
        )


def _gate_up(h_sf2: Tensor, num_units: int) -> tuple[Tensor, Tensor]:
    """Views of the gate and the up half, both [s, n, b]: they alternate unit by unit, as in w13."""
    h_sn2b = h_sf2.view(h_sf2.size(0), num_units, 2, h_sf2.size(1) // (2 * num_units))
    return h_sn2b[:, :, 0], h_sn2b[:, :, 1]
