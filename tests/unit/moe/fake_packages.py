"""megablocks, grouped_gemm and Transformer Engine as far as the backends use them, in plain torch.

Calls are bound to the signatures that the packages' sources have (tests/golden/backend_packages.json). What the kernels
check is checked, what they do not look at (strides, memory beyond the operands) has the same effect, and memory that
they leave unwritten is NaN.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nep.moe.backends.megablocks import Kernels
from nep.moe.backends.transformer_engine_fp8 import GroupedLinears
from nep.testing.package_facts import Fact, read_facts

FACTS = read_facts(Path(__file__).parents[2] / "golden" / "backend_packages.json")


def bound(name: str, function: Callable[..., Any], passed: dict[str, set[str]] | None = None) -> Callable[..., Any]:
    """`function` behind the signature of `name`; the arguments that callers pass are collected."""
    fact: Fact = FACTS.of(name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        given = fact.signature.bind(*arguments, **keywords).arguments
        if passed is not None:
            passed.setdefault(name, set()).update(given)
        return function(**given)

    return call


def megablocks_kernels(passed: dict[str, set[str]] | None = None) -> Kernels:
    """What `nep.moe.backends.megablocks.load` returns with the packages installed."""
    ops = [
        bound(f"megablocks.ops.{function.__name__.removeprefix('_')}", function, passed)
        for function in (_sort, _histogram, _inclusive_cumsum, _gather, _scatter)
    ]
    return Kernels(*ops, bound("grouped_gemm.backend.gmm", _gmm, passed))


def _sort(x: Tensor, end_bit: int) -> tuple[Tensor, Tensor]:
    assert x.dim() == 1 and x.numel() and x.dtype in (torch.int16, torch.int32, torch.int64)
    assert x.max() < 2**end_bit, "higher bits are not looked at"
    values, order = x.sort(stable=True)  # a radix sort is
    return values, order.to(x.dtype)


def _histogram(x: Tensor, max_val: int) -> Tensor:
    assert x.dim() == 1 and x.numel() and x.dtype in (torch.int16, torch.int32, torch.int64)
    return torch.bincount(x, minlength=max_val)[:max_val].to(torch.int32)


def _inclusive_cumsum(x: Tensor, dim: int) -> Tensor:
    return x.view(1, -1).cumsum(1, dtype=x.dtype).squeeze()


def _check_path(indices: Tensor, bin_ids: Tensor, bins: Tensor) -> None:
    assert indices.dim() == bin_ids.dim() == bins.dim() == 1 and len(indices) == len(bin_ids) > 0
    assert torch.equal(indices.sort().values, torch.arange(len(indices), dtype=indices.dtype)), "a kernel per choice"
    assert torch.equal(bins[bin_ids.unique()], bin_ids.unique(return_counts=True)[1].cumsum(0).to(bins.dtype))


def _gather(x: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
    _check_path(indices, bin_ids, bins)
    assert x.dim() == 2 and x.is_contiguous() and len(indices) == len(x) * top_k
    return x[indices.long() // top_k]


def _scatter(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    _check_path(indices, bin_ids, bins)
    assert x.dim() == 2 and x.is_contiguous() and len(x) >= len(indices), "it would read beyond x"
    assert weights is None or (weights.dim() == 1 and len(weights) == len(indices))
    scale = 1 if weights is None else weights[indices.long(), None]
    out = torch.full((len(indices), x.size(1)), math.nan, dtype=x.dtype)
    out[indices.long()] = (x * scale).to(x.dtype)
    return out.view(-1, top_k, x.size(1)).sum(dim=1)


def _gmm(
    a: Tensor,
    b: Tensor,
    batch_sizes: Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    c: Tensor | None = None,
) -> Tensor:
    sizes = batch_sizes.tolist()
    assert batch_sizes.dtype == torch.int64 and batch_sizes.device.type == "cpu" and batch_sizes.dim() == 1
    assert not (trans_a and trans_b) and a.dim() == 2 and b.dim() == (2 if trans_a else 3) and a.dtype == b.dtype
    assert sum(sizes) == len(a) and (len(b) == len(a) if trans_a else len(b) == len(sizes))
    if trans_a:
        shape: tuple[int, ...] = (len(sizes), a.size(1), b.size(1))
    else:
        shape = (len(a), b.size(1) if trans_b else b.size(2))
    c = a.new_full(shape, math.nan) if c is None else c
    assert c.shape == shape and a.is_contiguous() and b.is_contiguous() and c.is_contiguous()
    for index, (rows, size) in enumerate(zip(a.split(sizes), sizes, strict=True)):
        stop = sum(sizes[: index + 1])
        if trans_a:
            if size:  # a kernel over no rows may write nothing
                c[index] = rows.T @ b[stop - size : stop]
        else:
            c[stop - size : stop] = rows @ (b[index].T if trans_b else b[index])
    return c


def te_gemm(passed: dict[str, set[str]] | None = None) -> Callable[..., Any]:
    """general_grouped_gemm without quantization."""
    return bound("transformer_engine.pytorch.cpp_extensions.general_grouped_gemm", _general_grouped_gemm, passed)


def _general_grouped_gemm(
    A: list[Tensor],
    B: list[Tensor],
    out: list[Tensor],
    quantization_params: list[None],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    single_output: bool = False,
) -> None:
    assert isinstance(A, list) and isinstance(B, list) and isinstance(out, list) and m_splits is not None
    assert len(A) == len(B) == len(quantization_params) == len(m_splits)
    assert [len(b) for b in B] == m_splits and out_dtype == out[0].dtype
    pieces = [
        {"TN": lambda a, b: b @ a.T, "NN": lambda a, b: b @ a, "NT": lambda a, b: b.T @ a}[layout](_raw(a), _raw(b))
        for a, b in zip(A, B, strict=True)
    ]
    if single_output:
        assert len(out) == 1 and len(out[0]) == sum(m_splits)
        out = list(out[0].split(m_splits))
    for result, piece in zip(out, pieces, strict=True):
        assert result.shape == piece.shape
        _raw(result).copy_(piece)  # zeros where there are no rows


def _raw(matrix: Tensor) -> Tensor:
    """The matrix as a kernel sees it that is told its address and its sizes."""
    return matrix.as_strided(matrix.shape, (matrix.size(1), 1))


def te_grouped_linears(quantize: bool = False, passed: dict[str, set[str]] | None = None) -> GroupedLinears:
    """What `load_fp8` returns with the package installed; exact unless `quantize`."""
    active: list[str] = []

    @contextlib.contextmanager
    def autocast(enabled: bool, recipe: str) -> Iterator[None]:
        assert enabled
        active.append(recipe)
        yield
        active.pop()

    class Linear(FakeGroupedLinear):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            bound("transformer_engine.pytorch.GroupedLinear", super().__init__, passed)(*arguments, **keywords)

        def forward(self, *arguments: Any, **keywords: Any) -> Tensor:
            assert active == ["recipe"], "outside of autocast it would not run in FP8"
            forward = bound("transformer_engine.pytorch.GroupedLinear.forward", self.compute, passed)
            return forward(*arguments, **keywords)

    Linear.quantize = quantize
    return GroupedLinears(Linear, bound("transformer_engine.pytorch.autocast", autocast, passed), "recipe")


class FakeGroupedLinear(nn.Module):
    """Reads weights by name at each call, as the module does, and writes their gradients to `main_grad`."""

    quantize = False

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool,
        params_dtype: torch.dtype,
        device: torch.device,
        fuse_wgrad_accumulation: bool,
        init_method: Callable[[Tensor], None],
    ) -> None:
        super().__init__()
        assert not bias and fuse_wgrad_accumulation
        self.num_gemms = num_gemms
        for index in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
            init_method(weight)
            self.register_parameter(f"weight{index}", weight)

    def compute(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        assert len(m_splits) == self.num_gemms and sum(m_splits) == len(inp)
        assert all(split % 16 == 0 for split in m_splits), "FP8 operands are whole tiles"
        assert all(size % 16 == 0 for size in weights[0].shape) and inp.is_contiguous()
        return FakeLinear.apply(inp, list(m_splits), self.quantize, *weights)


class FakeLinear(torch.autograd.Function):
    written: ClassVar[list[int]] = []  # addresses of the storages that gradients of weights went to

    @staticmethod
    def forward(ctx: Any, inp: Tensor, m_splits: list[int], quantize: bool, *weights: Tensor) -> Tensor:
        ctx.weight_refs = [weakref.ref(weight) for weight in weights]
        ctx.main_grads = [lambda weight=weight: weight.main_grad for weight in weights]
        ctx.overwrite = getattr(weights[0], "overwrite_main_grad", False)
        cast = _to_e4m3 if quantize else _as_is
        rows = [cast(part) for part in inp.split(m_splits)]
        matrices = [cast(_raw(weight)) for weight in weights]
        ctx.save_for_backward(*rows, *matrices)
        ctx.m_splits, ctx.cast = m_splits, _to_e5m2 if quantize else _as_is
        return torch.cat([part @ matrix.T for part, matrix in zip(rows, matrices, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.m_splits)
        saved = ctx.saved_tensors  # only once, as checkpointing wants it
        rows, matrices = saved[:count], saved[count:]
        grads = [ctx.cast(part) for part in grad.split(ctx.m_splits)]
        for part, row, main_grad, reference in zip(grads, rows, ctx.main_grads, ctx.weight_refs, strict=True):
            assert reference() is not None
            product = part.T @ row
            target = _raw(main_grad())
            FakeLinear.written.append(target.untyped_storage().data_ptr())
            target.copy_(product if ctx.overwrite else target + product)
        grad_inp = torch.cat([part @ matrix for part, matrix in zip(grads, matrices, strict=True)])
        return grad_inp, None, None, *[None] * count


def _as_is(x: Tensor) -> Tensor:
    return x


def _scaled(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Current scaling: the largest element becomes the largest number of the format."""
    if not x.numel() or not x.any():
        return x
    scale = torch.finfo(dtype).max / x.abs().max().float()
    return ((x.float() * scale).to(dtype).float() / scale).to(x.dtype)


def _to_e4m3(x: Tensor) -> Tensor:
    return _scaled(x, torch.float8_e4m3fn)


def _to_e5m2(x: Tensor) -> Tensor:
    return _scaled(x, torch.float8_e5m2)
