"""megablocks: its sort, gather and scatter move the rows, its grouped GEMM multiplies. bfloat16 on CUDA.

One gather and one scatter a pass serve all groups: megablocks' kernels take every choice of every row, so choices that
have no expert here form a last bin. Each row's local choices are moved to the front first and only as many kept as the
busiest row has, or an expert-parallel slot would mostly copy rows that it does not need.

Signatures: release 0.10.0 (tests/golden/backend_packages.json). Shapes: r rows, k = top_k, w the most local choices of
a row, c = r * w choices, the last of them without an expert here; the rest as in groups.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nep.moe.backends.base import Backend, Problem, Setting, refuse, setting_of
from nep.moe.backends.groups import Group, backward_group, forward_group, list_experts, make_groups
from nep.moe.backends.packages import Package
from nep.moe.slices import ExpertSlice, merge_slices

# megablocks 0.10.0 requires torch 2.7.0, below nep's range, so no resolver finds both: hence --no-deps, and a build
# against the installed torch. stanford-stk and grouped_gemm are what it would have brought. Its sources call CUB in a
# form that CUDA 13 no longer has.
PACKAGE = Package(
    releases={"megablocks": ("0.10", "0.11"), "grouped_gemm": ("0.3", "0.4"), "stanford-stk": ("0.7.1", "0.8")},
    compiled=("megablocks_ops", "grouped_gemm_backend"),
    needs="nvcc of CUDA 12, and a torch that is built for CUDA 12",
    install="pip install --no-build-isolation --no-deps stanford-stk==0.7.1 grouped_gemm==0.3.0 megablocks==0.10.0",
)


class Kernels(NamedTuple):
    """What is used of the packages."""

    sort: Callable[..., Any]
    histogram: Callable[..., Any]
    inclusive_cumsum: Callable[..., Any]
    gather: Callable[..., Any]
    scatter: Callable[..., Any]
    gmm: Callable[..., Any]


def load() -> Kernels:
    """The kernels.

    Raises:
        ValueError: the packages cannot be imported.
    """
    ops, grouped = PACKAGE.load("megablocks.ops", "grouped_gemm.backend")
    return Kernels(ops.sort, ops.histogram, ops.inclusive_cumsum, ops.gather, ops.scatter, grouped.gmm)


def megablocks_problem(setting: Setting) -> Problem | None:
    """Why this backend cannot run, or None."""
    if setting.device_type != "cuda":
        return Problem(f"megablocks runs on CUDA, not {setting.device_type}")
    if setting.dtype != torch.bfloat16:
        return Problem(f"megablocks multiplies bfloat16, not {setting.dtype}")
    return PACKAGE.problem()


def megablocks_experts(
    rows_rd: Tensor,
    expert_ids_rk: Tensor,
    weights_rk: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    slices: tuple[ExpertSlice, ...],
    num_experts: int,
) -> Tensor:
    """See `ExpertsBackend`. A row's terms are rounded to the rows' dtype before they are summed.

    Raises:
        ValueError: see `megablocks_problem`.
    """
    refuse("megablocks", megablocks_problem(setting_of(w13)))
    return run(load(), rows_rd, expert_ids_rk, weights_rk, w13, w2, slices=slices, num_experts=num_experts)


def run(
    kernels: Kernels,
    rows_rd: Tensor,
    expert_ids_rk: Tensor,
    weights_rk: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    slices: tuple[ExpertSlice, ...],
    num_experts: int,
) -> Tensor:
    """The computation with given kernels, in whatever dtype and on whatever device they take."""
    moves = plan_moves(kernels, expert_ids_rk, merge_slices(slices), num_experts)
    y_rd: Tensor = _Experts.apply(rows_rd, weights_rk, w13, w2, *moves.tensors, moves, kernels)
    return y_rd


class Moves(NamedTuple):
    """How rows get to their experts and back.

    Attributes:
        groups: Of the local slices.
        num_local: Choices that have an expert here; they come first in expert order.
        width: w.
        tensors: int32 `choice_ids_c` (position in [r, w] of each choice in expert order), `bin_ids_c` and `bins_e`,
            as megablocks wants them; int64 `columns_rk`, each row's choices, local ones first.
    """

    groups: list[Group]
    num_local: int
    width: int
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]


def plan_moves(kernels: Kernels, expert_ids_rk: Tensor, slices: Sequence[ExpertSlice], num_experts: int) -> Moves:
    """Sort the choices by expert. The counts go to the host, which waits for the routing."""
    experts = list_experts(slices)
    num_bins = len(experts) + 1
    device = expert_ids_rk.device
    positions = [len(experts)] * (num_experts + 1)  # the last one is reached by id -1
    for position, expert in enumerate(experts):
        positions[expert] = position
    keys_rk = torch.tensor(positions, dtype=torch.int32, device=device)[expert_ids_rk]
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    if not keys_rk.numel():
        groups = make_groups(slices, experts, [0] * num_bins, together=True)
        return Moves(groups, 0, 0, (nothing, nothing, nothing, nothing))

    counts_e = kernels.histogram(keys_rk.flatten(), num_bins)
    widest = (keys_rk < len(experts)).sum(dim=1).max()
    *counts, width = torch.cat([counts_e[:-1].long(), widest.view(1)]).tolist()
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    groups = make_groups(slices, experts, offsets, together=True)
    if not width:
        return Moves(groups, 0, 0, (nothing, nothing, nothing, nothing))

    keys_rk, columns_rk = keys_rk.sort(dim=1, stable=True)
    keys_c = keys_rk[:, :width].flatten()
    # only as many bits as the keys have
    bin_ids_c, choice_ids_c = kernels.sort(keys_c, len(experts).bit_length())
    counts_e[-1] = keys_c.numel() - offsets[-1]
    bins_e = kernels.inclusive_cumsum(counts_e, 0).view(-1)
    return Moves(groups, offsets[-1], width, (choice_ids_c, bin_ids_c, bins_e, columns_rk))


class _Gmm:
    """The three products as megablocks' grouped GEMM; sizes lie on the host, all operands are contiguous."""

    def __init__(self, gmm: Callable[..., Any]) -> None:
        self._gmm = gmm

    def rows_by_transposed(self, x_sj: Tensor, w_gij: Tensor, offsets: Sequence[int]) -> Tensor:
        y_si: Tensor = self._gmm(x_sj.contiguous(), w_gij, _sizes(offsets), trans_b=True)
        return y_si

    def rows_by(self, x_si: Tensor, w_gij: Tensor, offsets: Sequence[int], out_sj: Tensor | None = None) -> Tensor:
        y_sj: Tensor = self._gmm(x_si.contiguous(), w_gij, _sizes(offsets), c=out_sj)
        return y_sj

    def outer(self, a_si: Tensor, b_sj: Tensor, offsets: Sequence[int], out_gij: Tensor) -> None:
        sizes = _sizes(offsets)
        for index in (sizes == 0).nonzero().flatten().tolist():
            out_gij[index].zero_()  # whether the kernel writes a product over nothing depends on how it was built
        if offsets[-1]:
            self._gmm(a_si.contiguous(), b_sj.contiguous(), sizes, trans_a=True, c=out_gij)


def _sizes(offsets: Sequence[int]) -> Tensor:
    return torch.tensor([0, *offsets], dtype=torch.int64).diff()


class _Experts(torch.autograd.Function):
    """One node, as in groups.py, but all groups share one gather and one scatter."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_rd: Tensor,
        weights_rk: Tensor,
        w13: Tensor,
        w2: Tensor,
        choice_ids_c: Tensor,
        bin_ids_c: Tensor,
        bins_e: Tensor,
        columns_rk: Tensor,
        moves: Moves,
        kernels: Kernels,
    ) -> Tensor:
        ctx.moves, ctx.kernels, ctx.weights_shape = moves, kernels, weights_rk.shape
        if not moves.width:
            ctx.save_for_backward(rows_rd, weights_rk, w13, w2)
            return torch.zeros_like(rows_rd)
        products, hidden = _Gmm(kernels.gmm), []
        weights_c = weights_rk.gather(1, columns_rk[:, : moves.width]).flatten()
        rows_cd = kernels.gather(rows_rd.contiguous(), choice_ids_c, bin_ids_c, bins_e, moves.width)
        y_cd = _empty_rows(rows_cd, moves)
        for group, again in _visits(moves.groups):
            rows_sd, out_sd = rows_cd[group.start : group.stop], y_cd[group.start : group.stop]
            h_sf2, y_sd = forward_group(products, group, rows_sd, w13, w2, None if again else out_sd)
            _add_again(out_sd, y_sd, again)
            hidden.append(h_sf2)
        tensors = (choice_ids_c, bin_ids_c, bins_e, columns_rk)
        ctx.save_for_backward(rows_rd, weights_c, w13, w2, *tensors, *hidden)
        y_rd: Tensor = kernels.scatter(y_cd, choice_ids_c, bin_ids_c, weights_c, bins_e, moves.width)
        return y_rd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_rd: Tensor) -> tuple[Tensor | None, ...]:
        moves: Moves = ctx.moves
        kernels: Kernels = ctx.kernels
        if not moves.width:
            return *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors), *[None] * 6
        rows_rd, weights_c, w13, w2, choice_ids_c, bin_ids_c, bins_e, columns_rk, *hidden = ctx.saved_tensors
        products = _Gmm(kernels.gmm)
        path = (choice_ids_c, bin_ids_c)
        grad_y_cd = kernels.gather(grad_y_rd.contiguous(), *path, bins_e, moves.width)
        rows_cd = kernels.gather(rows_rd.contiguous(), *path, bins_e, moves.width)
        sorted_weights_c = weights_c[choice_ids_c]
        grad_rows_cd, grad_weights_c = _empty_rows(rows_cd, moves), torch.zeros_like(weights_c)
        grad_w13, grad_w2 = torch.empty_like(w13), torch.empty_like(w2)  # the groups write all of them
        for (group, again), h_sf2 in zip(_visits(moves.groups), hidden, strict=True):
            part = slice(group.start, group.stop)
            grad_rows_sd, grad_weights_s = backward_group(
                products,
                group,
                rows_cd[part],
                h_sf2,
                (w13, w2),
                grad_y_cd[part],
                sorted_weights_c[part, None],
                (grad_w13, grad_w2),
                None if again else grad_rows_cd[part],
            )
            _add_again(grad_rows_cd[part], grad_rows_sd, again)
            grad_weights_c[part] += grad_weights_s
        grad_rows_rd = kernels.scatter(grad_rows_cd, *path, None, bins_e, moves.width)
        grad_weights_rw = torch.empty_like(weights_c).index_copy_(0, choice_ids_c.long(), grad_weights_c)
        grad_weights_rk = weights_c.new_zeros(ctx.weights_shape)
        grad_weights_rk.scatter_(1, columns_rk[:, : moves.width], grad_weights_rw.view(-1, moves.width))
        return grad_rows_rd, grad_weights_rk, grad_w13, grad_w2, *[None] * 6


def _empty_rows(like_cd: Tensor, moves: Moves) -> Tensor:
    """Rows for the groups to write to; those of choices without an expert here are zero."""
    rows_cd = torch.empty_like(like_cd)
    rows_cd[moves.num_local :].zero_()
    return rows_cd


def _visits(groups: Sequence[Group]) -> list[tuple[Group, int]]:
    """Each group, and how many of its first assignments an earlier group served: an expert may have several slices."""
    visits, served = [], 0
    for group in groups:
        visits.append((group, max(min(served, group.stop) - group.start, 0)))
        served = max(served, group.stop)
    return visits


def _add_again(out_sd: Tensor, rows_sd: Tensor, again: int) -> None:
    """Put a group's rows where an earlier group has written the first `again` of them; without any they are there."""
    if again:
        out_sd[:again].add_(rows_sd[:again])
        out_sd[again:].copy_(rows_sd[again:])


BACKEND = Backend(
    run=megablocks_experts,
    problem=megablocks_problem,
    load=load,
    why="grouped GEMM of megablocks, which takes sizes of any alignment",
)
