"""Transformer Engine: its grouped GEMM in bfloat16, its GroupedLinear in FP8. CUDA.

bfloat16 needs no module: `general_grouped_gemm`, which GroupedLinear itself calls, multiplies views of the parameters
in all three layouts and writes gradients to views of theirs. FP8 is in transformer_engine_fp8.py.

Signatures: release 2.20.2, and 2.16 has them too (tests/golden/backend_packages.json).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nep.moe.backends.base import Backend, Problem, Setting, refuse, setting_of, size_problem
from nep.moe.backends.groups import run_experts
from nep.moe.backends.packages import Package
from nep.moe.backends.transformer_engine_fp8 import MULTIPLE, GroupedLinears, run_experts_fp8
from nep.moe.slices import ExpertSlice

# 2.16 is the first release that takes `overwrite_main_grad` from the weights it was called with.
PACKAGE = Package(
    releases={"transformer_engine": ("2.16", "3"), "transformer_engine_torch": ("2.16", "3")},
    compiled=("transformer_engine_torch",),
    needs="a torch that is built for CUDA, and nvcc where there is no wheel for it",
    install="pip install --no-build-isolation 'transformer_engine[pytorch]==2.20.2'",
)
_ALIGNMENT_BYTES = 16


def load_gemm() -> Callable[..., Any]:
    """The grouped GEMM.

    Raises:
        ValueError: the package cannot be imported.
    """
    # The first import registers the compiled part.
    _, extensions = PACKAGE.load("transformer_engine.pytorch", "transformer_engine.pytorch.cpp_extensions")
    gemm: Callable[..., Any] = extensions.general_grouped_gemm
    return gemm


def load_fp8() -> GroupedLinears:
    """GroupedLinear with the FP8 recipe of this device.

    Raises:
        ValueError: the package cannot be imported, or this GPU has no FP8.
    """
    package, recipes = PACKAGE.load("transformer_engine.pytorch", "transformer_engine.common.recipe")
    if package.is_mxfp8_available():
        return GroupedLinears(package.GroupedLinear, package.autocast, recipes.MXFP8BlockScaling())
    if package.is_fp8_available():
        return GroupedLinears(package.GroupedLinear, package.autocast, recipes.Float8CurrentScaling())
    raise ValueError("moe_backend 'transformer_engine_fp8': this GPU has no FP8; use 'transformer_engine' or 'auto'")


def transformer_engine_problem(setting: Setting) -> Problem | None:
    """Why the bfloat16 backend cannot run, or None."""
    if setting.device_type != "cuda":
        return Problem(f"Transformer Engine runs on CUDA, not {setting.device_type}")
    if setting.dtype != torch.bfloat16:
        return Problem(f"this backend multiplies bfloat16, not {setting.dtype}")
    multiple = _ALIGNMENT_BYTES // setting.dtype.itemsize
    problem = size_problem(setting, multiple=multiple, why="cuBLAS wants for its fast kernels")
    return problem or PACKAGE.problem()


def fp8_problem(setting: Setting) -> Problem | None:
    """Why the FP8 backend cannot run, or None; whether the GPU has FP8 shows when it is loaded."""
    problem = size_problem(setting, multiple=MULTIPLE, why="FP8 needs for every dimension")
    return problem or transformer_engine_problem(setting)


def transformer_engine_experts(
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
        ValueError: see `transformer_engine_problem`.
    """
    refuse("transformer_engine", transformer_engine_problem(setting_of(w13)))
    return run_experts(
        rows_rd,
        expert_ids_rk,
        weights_rk,
        w13,
        w2,
        slices=slices,
        num_experts=num_experts,
        products=GroupedGemm(load_gemm()),
        together=True,
    )


def fp8_experts(
    rows_rd: Tensor,
    expert_ids_rk: Tensor,
    weights_rk: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    slices: tuple[ExpertSlice, ...],
    num_experts: int,
) -> Tensor:
    """See `ExpertsBackend`; rows, weights and gradients are rounded to FP8 before they are multiplied.

    Raises:
        ValueError: see `fp8_problem`.
    """
    refuse("transformer_engine_fp8", fp8_problem(setting_of(w13)))
    return run_experts_fp8(
        load_fp8(), rows_rd, expert_ids_rk, weights_rk, w13, w2, slices=slices, num_experts=num_experts
    )


class GroupedGemm:
    """The three products of a group as `general_grouped_gemm`.

    It takes operands A and B and a layout, a letter for each (T: transposed), and computes in the terms of a linear
    layer: TN is B A^T (a forward pass), NN is B A (the gradient of its input), NT is B^T A (that of its weight). Sizes
    lie on the host. w2 is stored as its units' neurons are, so its forward product is the NN of a linear layer.
    """

    def __init__(self, gemm: Callable[..., Any]) -> None:
        self._gemm = gemm

    def rows_by_transposed(self, x_sj: Tensor, w_gij: Tensor, offsets: Sequence[int]) -> Tensor:
        return self._rows("TN", x_sj, w_gij, offsets, x_sj.new_empty(len(x_sj), w_gij.size(1)))

    def rows_by(self, x_si: Tensor, w_gij: Tensor, offsets: Sequence[int], out_sj: Tensor | None = None) -> Tensor:
        return self._rows(
            "NN", x_si, w_gij, offsets, x_si.new_empty(len(x_si), w_gij.size(2)) if out_sj is None else out_sj
        )

    def outer(self, a_si: Tensor, b_sj: Tensor, offsets: Sequence[int], out_gij: Tensor) -> None:
        if not offsets[-1]:
            out_gij.zero_()
            return
        sizes = _sizes(offsets)
        self._call("NT", b_sj.split(sizes), a_si.split(sizes), list(out_gij), sizes, single_output=False)

    def _rows(self, layout: str, x_sx: Tensor, w_gij: Tensor, offsets: Sequence[int], out_sy: Tensor) -> Tensor:
        if offsets[-1]:
            sizes = _sizes(offsets)
            self._call(layout, w_gij, x_sx.contiguous().split(sizes), [out_sy], sizes, single_output=True)
        return out_sy

    def _call(
        self,
        layout: str,
        a: Sequence[Tensor],
        b: Sequence[Tensor],
        out: list[Tensor],
        sizes: list[int],
        single_output: bool,
    ) -> None:
        self._gemm(
            list(a),
            list(b),
            out,
            quantization_params=[None] * len(sizes),
            out_dtype=out[0].dtype,
            layout=layout,
            m_splits=sizes,
            single_output=single_output,
        )


def _sizes(offsets: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise((0, *offsets))]


BACKEND = Backend(
    run=transformer_engine_experts,
    problem=transformer_engine_problem,
    load=load_gemm,
    why="grouped GEMM of Transformer Engine",
)
FP8_BACKEND = Backend(run=fp8_experts, problem=fp8_problem, load=load_fp8, why="eight bits, never picked unasked")
