"""What the backends share: one autograd node that runs SwiGLU experts group by group.

A group is a row of slices in local storage that are equally large; how the products of a group are computed is the
backend's. Shapes: r rows, k = top_k, d hidden size, a assignments in expert order, s assignments of one group, g slices
of it, n units of a slice, b neurons of a unit, f = n * b.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nep.moe.permutation import permute_tokens, sort_assignments, unpermute_tokens
from nep.moe.slices import ExpertSlice, merge_slices


class Group(NamedTuple):
    """Equally large slices that lie end to end, and the assignments that they serve.

    Attributes:
        lo, hi: units of local storage.
        num_slices: g.
        start, stop: assignments in expert order, those of the first slice first.
        offsets: where each slice's assignments end, counted from `start`.
    """

    lo: int
    hi: int
    num_slices: int
    start: int
    stop: int
    offsets: tuple[int, ...]


class Products(Protocol):
    """Matrix products of a group: row i of a slice's assignments meets that slice's matrix."""

    def rows_by_transposed(self, x_sj: Tensor, w_gij: Tensor, offsets: Sequence[int]) -> Tensor:
        """[s, i]: each row times its slice's matrix, transposed."""
        ...

    def rows_by(self, x_si: Tensor, w_gij: Tensor, offsets: Sequence[int], out_sj: Tensor | None = None) -> Tensor:
        """[s, j]: each row times its slice's matrix; written to `out_sj` if that is given."""
        ...

    def outer(self, a_si: Tensor, b_sj: Tensor, offsets: Sequence[int], out_gij: Tensor) -> None:
        """Write for each slice the sum of outer products of its rows; zero without rows."""
        ...


def run_experts(
    rows_rd: Tensor,
    expert_ids_rk: Tensor,
    weights_rk: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    slices: tuple[ExpertSlice, ...],
    num_experts: int,
    products: Products,
    together: bool,
) -> Tensor:
    """See `ExpertsBackend`.

    Args:
        products: how to multiply.
        together: whether a group may have more than one slice.
    """
    merged = merge_slices(slices)
    experts = list_experts(merged)
    permutation = sort_assignments(expert_ids_rk, experts, num_experts)
    groups = make_groups(merged, experts, permutation.offsets, together=together)
    y_rd: Tensor = _Experts.apply(
        rows_rd, weights_rk, w13, w2, permutation.assignment_ids_a, permutation.row_ids_a, groups, products
    )
    return y_rd


def list_experts(slices: Sequence[ExpertSlice]) -> list[int]:
    """The experts in the order in which they first appear in storage: the order of assignments."""
    return list(dict.fromkeys(piece.expert for piece in slices))


def make_groups(
    slices: Sequence[ExpertSlice], experts: Sequence[int], offsets: Sequence[int], *, together: bool
) -> list[Group]:
    """The groups of merged slices, in storage order.

    Args:
        slices: see `merge_slices`.
        experts: see `list_experts`.
        offsets: `offsets[i]:offsets[i + 1]` are the assignments of the i-th expert.
        together: whether a group may have more than one slice.
    """
    position = {expert: index for index, expert in enumerate(experts)}
    groups: list[Group] = []
    for piece in slices:
        index = position[piece.expert]
        group = Group(piece.lo, piece.hi, 1, *offsets[index : index + 2], (0,))
        group = group._replace(offsets=(group.stop - group.start,))
        if together and groups and _continues(groups[-1], group):
            last = groups[-1]
            end = group.stop - last.start
            groups[-1] = Group(last.lo, group.hi, last.num_slices + 1, last.start, group.stop, (*last.offsets, end))
        else:
            groups.append(group)
    return groups


def _continues(last: Group, group: Group) -> bool:
    """Whether the slice is as large as those of the group, next in storage and next in expert order."""
    size = (last.hi - last.lo) // last.num_slices
    return (group.lo, group.hi - group.lo, group.start) == (last.hi, size, last.stop)


class _Experts(torch.autograd.Function):
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
        groups: list[Group],
        products: Products,
    ) -> Tensor:
        weights_a = weights_rk.flatten().index_select(0, assignment_ids_a)
        y_rd = rows_rd.new_zeros(rows_rd.shape, dtype=weights_a.dtype)
        hidden = []
        for group in groups:
            row_ids_s = row_ids_a[group.start : group.stop]
            h_sf2, y_sd = forward_group(products, group, permute_tokens(rows_rd, row_ids_s), w13, w2)
            weights_s1 = weights_a[group.start : group.stop, None]
            unpermute_tokens(y_rd, y_sd.to(weights_a.dtype).mul_(weights_s1), row_ids_s)
            hidden.append(h_sf2)
        ctx.save_for_backward(rows_rd, weights_a, w13, w2, assignment_ids_a, row_ids_a, *hidden)
        ctx.groups, ctx.products = groups, products
        ctx.weights_shape = weights_rk.shape
        return y_rd.to(rows_rd.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_rd: Tensor) -> tuple[Tensor | None, ...]:
        rows_rd, weights_a, w13, w2, assignment_ids_a, row_ids_a, *hidden = ctx.saved_tensors
        products: Products = ctx.products
        dtype, sum_dtype = rows_rd.dtype, weights_a.dtype
        grad_rows_rd = torch.zeros_like(rows_rd, dtype=sum_dtype)
        grad_weights_a = torch.zeros_like(weights_a)
        grad_w13, grad_w2 = torch.empty_like(w13), torch.empty_like(w2)  # the groups write all of them
        for group, h_sf2 in zip(ctx.groups, hidden, strict=True):
            row_ids_s = row_ids_a[group.start : group.stop]
            grad_rows_sd, grad_weights_s = backward_group(
                products,
                group,
                permute_tokens(rows_rd, row_ids_s),
                h_sf2,
                (w13, w2),
                permute_tokens(grad_y_rd, row_ids_s),
                weights_a[group.start : group.stop, None],
                (grad_w13, grad_w2),
            )
            grad_weights_a[group.start : group.stop] += grad_weights_s
            unpermute_tokens(grad_rows_rd, grad_rows_sd.to(sum_dtype), row_ids_s)
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
            None,
        )


def forward_group(
    products: Products, group: Group, rows_sd: Tensor, w13: Tensor, w2: Tensor, out_sd: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A group's slices on their rows, not yet weighted.

    Args:
        products: how to multiply.
        group: the slices.
        rows_sd: in the group's order.
        w13: [n, 2, b, d], all local units.
        w2: [n, b, d], all local units.
        out_sd: to write the result to.

    Returns:
        h_sf2, to keep for `backward_group`, and y_sd.
    """
    h_sf2 = products.rows_by_transposed(rows_sd, matrices(w13, group), group.offsets)
    gate_snb, up_snb = gate_up(h_sf2, w13.size(2))
    act_sf = F.silu(gate_snb).mul_(up_snb).flatten(1)
    return h_sf2, products.rows_by(act_sf, matrices(w2, group), group.offsets, out_sd)


def backward_group(
    products: Products,
    group: Group,
    rows_sd: Tensor,
    h_sf2: Tensor,
    weights: tuple[Tensor, Tensor],
    grad_y_sd: Tensor,
    weights_s1: Tensor,
    gradients: tuple[Tensor, Tensor],
    out_sd: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of a group; those of its slices are written to `gradients`.

    Args:
        products, group, rows_sd: as in `forward_group`.
        h_sf2: from `forward_group`.
        weights: w13 and w2.
        grad_y_sd: of the weighted sum, one row per assignment.
        weights_s1: of the assignments, in the dtype of sums.
        gradients: of w13 and w2, shaped like them.
        out_sd: to write the rows' gradient to.

    Returns:
        grad_rows_sd, and grad_weights_s in the dtype of sums.
    """
    w13, w2 = weights
    grad_w13, grad_w2 = gradients
    dtype = rows_sd.dtype
    gate_snb, up_snb = gate_up(h_sf2, w13.size(2))
    silu_snb = F.silu(gate_snb)
    act_sf = (silu_snb * up_snb).flatten(1)

    # y = weight * (act @ w2), so d(weight) = grad_y . (act @ w2) = (grad_y @ w2.T) . act: the slice's
    # output is neither kept nor computed again
    grad_act_sf = products.rows_by_transposed(grad_y_sd, matrices(w2, group), group.offsets).to(weights_s1.dtype)
    grad_weights_s = (grad_act_sf * act_sf).sum(dim=1)
    products.outer(act_sf, (grad_y_sd * weights_s1).to(dtype), group.offsets, matrices(grad_w2, group))

    grad_act_snb = grad_act_sf.mul_(weights_s1).to(dtype).view(gate_snb.shape)
    grad_h_sf2 = torch.empty_like(h_sf2)
    grad_gate_snb, grad_up_snb = gate_up(grad_h_sf2, w13.size(2))
    torch.mul(grad_act_snb, silu_snb, out=grad_up_snb)
    torch.ops.aten.silu_backward.grad_input(grad_act_snb.mul_(up_snb), gate_snb, grad_input=grad_gate_snb)
    products.outer(grad_h_sf2, rows_sd, group.offsets, matrices(grad_w13, group))
    grad_rows_sd = products.rows_by(grad_h_sf2, matrices(w13, group), group.offsets, out_sd)
    return grad_rows_sd, grad_weights_s


def matrices(weight: Tensor, group: Group) -> Tensor:
    """One matrix per slice, a view: [g, rows, d]."""
    units = weight[group.lo : group.hi]
    return units.view(group.num_slices, -1, weight.size(-1))


def gate_up(h_sf2: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Views of the gate and the up half, both [s, n, b]: they alternate unit by unit, as in w13."""
    h_sn2b = h_sf2.view(h_sf2.size(0), h_sf2.size(1) // (2 * block), 2, block)
    return h_sn2b[:, :, 0], h_sn2b[:, :, 1]
