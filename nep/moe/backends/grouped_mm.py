"""torch's grouped matrix product: all equally large slices in one call, on views, forward and backward.

Full experts lie first in a slot's storage, so they are one group; slices of equal size that lie side by side are
another. float32 and bfloat16 with sizes that are multiples of 16 bytes; float64 is refused by torch.

On a CPU the call is a loop inside torch. It saves what surrounds a product, but keeps the intermediate results of a
whole group where the loop over slices keeps those of one: once no cache holds a group, slices run one by one.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nep.moe.backends.base import Backend, Problem, Setting, refuse, setting_of, size_problem
from nep.moe.backends.groups import run_experts
from nep.moe.backends.loop import loop_experts
from nep.moe.slices import ExpertSlice

DTYPES = (torch.float32, torch.bfloat16)
_ALIGNMENT_BYTES = 16
# Expected activations (rows times neurons) of the local slices, from which on a CPU runs them one by one. Measured with
# one thread, see docs/backends.md: 1.2 times as fast together at 2**19, alike at 2**20, .84 times at 2**21.
_CPU_ONE_BY_ONE = 2**20


def grouped_mm_problem(setting: Setting) -> Problem | None:
    """Why this backend cannot run, or None."""
    if setting.dtype not in DTYPES:
        return Problem(f"grouped_mm has no {setting.dtype}")
    multiple = _ALIGNMENT_BYTES // setting.dtype.itemsize
    return size_problem(setting, multiple=multiple, why=f"grouped_mm needs in {setting.dtype}")


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
    refuse("grouped_mm", grouped_mm_problem(setting_of(w13)))
    activations = expert_ids_rk.numel() * w13.size(0) * w13.size(2) // num_experts
    if rows_rd.device.type == "cpu" and activations >= _CPU_ONE_BY_ONE:
        return loop_experts(rows_rd, expert_ids_rk, weights_rk, w13, w2, slices=slices, num_experts=num_experts)
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

    def rows_by(self, x_si: Tensor, w_gij: Tensor, offsets: Sequence[int], out_sj: Tensor | None = None) -> Tensor:
        y_sj = F.grouped_mm(x_si, w_gij, offs=_ends(offsets, x_si))
        return y_sj if out_sj is None else out_sj.copy_(y_sj)

    def outer(self, a_si: Tensor, b_sj: Tensor, offsets: Sequence[int], out_gij: Tensor) -> None:
        out_gij.copy_(F.grouped_mm(a_si.T, b_sj, offs=_ends(offsets, a_si)))


def _ends(offsets: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int32, device=like.device)


BACKEND = Backend(
    run=grouped_mm_experts,
    problem=grouped_mm_problem,
    load=lambda: None,
    why="all equally large slices run in one call, with nothing but torch",
)
