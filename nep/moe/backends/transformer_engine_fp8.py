"""Experts whose products are Transformer Engine GroupedLinears under FP8, on views of the unit-major parameters.

How a module that owns its weights computes on ours (read in the sources of 2.16 to 2.20.2):
- It fetches its weights by name at every call, so `torch.func.functional_call` can hand it views. w13 of a slice is a
  view [out, in] as it is. w2 is stored the other way round, and TE ignores strides: it is transposed into a copy, and
  its gradient back. FP8 rewrites every weight at every call anyway.
- With `fuse_wgrad_accumulation` the gradient of a weight is written to its attribute `main_grad`; `overwrite_main_grad`
  says that it replaces what is there. These are views of the gradient that our node returns: no copy, no sum.
- Recipes: MXFP8 where the GPU has it, else current scaling. Both derive scales from the tensors at hand. Delayed
  scaling keeps a history per expert, which would have to move with the expert, and reduces it over ranks: not offered.
- The rows of every expert are padded to a multiple of 32. A padding row repeats another row, so that it changes no
  scale, and gets gradient zero.

Shapes: p rows of a group with padding; the rest as in groups.py.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nep.moe.backends.groups import Group, gate_up, list_experts, make_groups, matrices
from nep.moe.permutation import permute_tokens, sort_assignments, unpermute_tokens
from nep.moe.slices import ExpertSlice, merge_slices

MULTIPLE = 32  # a block of MXFP8; current scaling needs 16


class GroupedLinears(NamedTuple):
    """What is used of Transformer Engine.

    Attributes:
        grouped_linear: The class.
        autocast: The context in which it runs in FP8.
        recipe: The recipe.
    """

    grouped_linear: Callable[..., nn.Module]
    autocast: Callable[..., Any]
    recipe: Any


def run_experts_fp8(
    package: GroupedLinears,
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
    experts = list_experts(merged)
    permutation = sort_assignments(expert_ids_rk, experts, num_experts)
    groups = make_groups(merged, experts, permutation.offsets, together=True)
    y_rd: Tensor = _Experts.apply(
        rows_rd, weights_rk, w13, w2, permutation.assignment_ids_a, permutation.row_ids_a, groups, package
    )
    return y_rd


class Padding(NamedTuple):
    """Rows of a group with every slice's padded to `MULTIPLE`.

    Attributes:
        sizes: Padded rows of each slice.
        sources_p: Which of the group's assignments each padded row repeats.
        places_s: Where each assignment lies among the padded rows.
    """

    sizes: list[int]
    sources_p: Tensor
    places_s: Tensor


def pad(offsets: Sequence[int], device: torch.device) -> Padding:
    """Padding of a group whose slices' assignments end at `offsets`."""
    sizes = [stop - start for start, stop in pairwise((0, *offsets))]
    padded = [-(-size // MULTIPLE) * MULTIPLE for size in sizes]
    starts_g = torch.tensor([0, *offsets[:-1]], device=device)
    shifts_g = torch.tensor([0, *accumulate(padded[:-1])], device=device) - starts_g
    sizes_g, padded_g = torch.tensor(sizes, device=device), torch.tensor(padded, device=device)
    slice_of_p = torch.repeat_interleave(padded_g, output_size=sum(padded))
    slice_of_s = torch.repeat_interleave(sizes_g, output_size=offsets[-1])
    sources_p = torch.arange(sum(padded), device=device) - shifts_g[slice_of_p]
    sources_p = sources_p.minimum((starts_g + sizes_g - 1)[slice_of_p])
    return Padding(padded, sources_p, torch.arange(offsets[-1], device=device) + shifts_g[slice_of_s])


class _Pass(NamedTuple):
    """A group's forward pass, with the graph that its backward needs.

    Attributes:
        padding: Of the group.
        rows_pd: Leaf.
        y_pd: Result, not yet weighted.
        first, second: The weights of both products, one [out, in] per slice.
    """

    padding: Padding
    rows_pd: Tensor
    y_pd: Tensor
    first: list[Tensor]
    second: list[Tensor]


class _Experts(torch.autograd.Function):
    """One node for the whole line; each group has a small graph of its own inside."""

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
        package: GroupedLinears,
    ) -> Tensor:
        weights_a = weights_rk.flatten().index_select(0, assignment_ids_a)
        y_rd = rows_rd.new_zeros(rows_rd.shape, dtype=weights_a.dtype)
        passes: list[_Pass | None] = []
        for group in groups:
            if group.start == group.stop:
                passes.append(None)
                continue
            row_ids_s = row_ids_a[group.start : group.stop]
            padding = pad(group.offsets, rows_rd.device)
            rows_pd = permute_tokens(rows_rd, row_ids_s[padding.sources_p])
            with torch.set_grad_enabled(any(ctx.needs_input_grad)):
                one = _run_group(package, padding, rows_pd, matrices(w13, group), matrices(w2, group), w13.size(2))
            y_sd = one.y_pd.detach()[padding.places_s].to(weights_a.dtype)
            unpermute_tokens(y_rd, y_sd.mul_(weights_a[group.start : group.stop, None]), row_ids_s)
            passes.append(one)
        ctx.save_for_backward(weights_a, w13, w2, assignment_ids_a, row_ids_a)
        ctx.groups, ctx.passes = groups, passes
        ctx.weights_shape, ctx.rows_shape, ctx.rows_dtype = weights_rk.shape, rows_rd.shape, rows_rd.dtype
        return y_rd.to(rows_rd.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_rd: Tensor) -> tuple[Tensor | None, ...]:
        weights_a, w13, w2, assignment_ids_a, row_ids_a = ctx.saved_tensors
        grad_rows_rd = torch.zeros(ctx.rows_shape, dtype=weights_a.dtype, device=weights_a.device)
        grad_weights_a = torch.zeros_like(weights_a)
        grad_w13, grad_w2 = torch.empty_like(w13), torch.empty_like(w2)  # the groups write all of them
        passes, ctx.passes = ctx.passes, None  # each graph goes as soon as it has been used
        while passes:
            one, group = passes.pop(), ctx.groups[len(passes)]
            grad_w13_gfd, grad_w2_gfd = matrices(grad_w13, group), matrices(grad_w2, group)
            if one is None:
                grad_w13_gfd.zero_()
                grad_w2_gfd.zero_()
                continue
            row_ids_s = row_ids_a[group.start : group.stop]
            places_s, weights_s1 = one.padding.places_s, weights_a[group.start : group.stop, None]
            grad_y_sd = permute_tokens(grad_y_rd, row_ids_s).to(weights_a.dtype)
            grad_weights_a[group.start : group.stop] += (grad_y_sd * one.y_pd.detach()[places_s]).sum(dim=1)
            grad_y_pd = torch.zeros_like(one.y_pd)
            grad_y_pd[places_s] = (grad_y_sd * weights_s1).to(grad_y_pd.dtype)
            grad_rows_pd = _gradients(one, grad_y_pd, grad_w13_gfd, grad_w2_gfd)
            unpermute_tokens(grad_rows_rd, grad_rows_pd[places_s].to(weights_a.dtype), row_ids_s)
        grad_weights = grad_weights_a.new_zeros(ctx.weights_shape.numel())
        grad_weights.index_copy_(0, assignment_ids_a, grad_weights_a)
        return (
            grad_rows_rd.to(ctx.rows_dtype),
            grad_weights.view(ctx.weights_shape),
            grad_w13,
            grad_w2,
            *[None] * 4,
        )


def _run_group(
    package: GroupedLinears, padding: Padding, rows_pd: Tensor, w13_gfd: Tensor, w2_gfd: Tensor, block: int
) -> _Pass:
    """Both products of a group, recorded by autograd."""
    rows_pd.requires_grad_(torch.is_grad_enabled())
    first = _weights(w13_gfd)
    second = _weights(w2_gfd.transpose(1, 2).contiguous())
    with package.autocast(enabled=True, recipe=package.recipe):
        h_pf2 = _linear(package, first, rows_pd, padding.sizes)
        gate_pnb, up_pnb = gate_up(h_pf2, block)
        y_pd = _linear(package, second, (F.silu(gate_pnb) * up_pnb).flatten(1), padding.sizes)
    return _Pass(padding, rows_pd, y_pd, first, second)


def _gradients(one: _Pass, grad_y_pd: Tensor, grad_w13_gfd: Tensor, grad_w2_gfd: Tensor) -> Tensor:
    """Run a group's graph backwards.

    Returns:
        grad_rows_pd; the gradients of the weights are written to the views that are given.
    """
    grad_w2_gdf = torch.empty_like(grad_w2_gfd.transpose(1, 2), memory_format=torch.contiguous_format)
    for weights, gradients in ((one.first, grad_w13_gfd), (one.second, grad_w2_gdf)):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.main_grad = gradient
    (grad_rows_pd,) = torch.autograd.grad(one.y_pd, one.rows_pd, grad_y_pd)
    for weight in (*one.first, *one.second):
        del weight.main_grad  # a view keeps its base: autograd would copy the parameter's gradient instead of taking it
    grad_w2_gfd.copy_(grad_w2_gdf.transpose(1, 2))
    return grad_rows_pd


def _weights(matrices_gij: Tensor) -> list[Tensor]:
    """Leaves over the matrices' memory that take their gradient in `main_grad`."""
    leaves = []
    for matrix in matrices_gij.detach():
        leaf = matrix.detach().requires_grad_(torch.is_grad_enabled())
        leaf.overwrite_main_grad = True
        leaves.append(leaf)
    return leaves


def _linear(package: GroupedLinears, weights: list[Tensor], x_px: Tensor, sizes: list[int]) -> Tensor:
    """y_py of a GroupedLinear with these weights."""
    num_out, num_in = weights[0].shape
    module = _module(package.grouped_linear, len(weights), num_in, num_out, x_px.dtype, x_px.device)
    named = {f"weight{index}": weight for index, weight in enumerate(weights)}
    y_py: Tensor = torch.func.functional_call(module, named, (x_px, sizes))
    return y_py


@lru_cache(maxsize=256)
def _module(
    grouped_linear: Callable[..., nn.Module],
    num_gemms: int,
    num_in: int,
    num_out: int,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """A module without weights, for all layers: with these recipes it keeps nothing from one call to the next."""
    module = grouped_linear(
        num_gemms,
        num_in,
        num_out,
        bias=False,
        params_dtype=dtype,
        device=device,
        fuse_wgrad_accumulation=True,
        init_method=lambda weight: None,  # the default draws random numbers, and so moves the generator on
    )
    for parameter in module.parameters():
        parameter.data = parameter.new_empty(0)
    return module
