"""The experts' backends on a GPU against the loop there.

megablocks and Transformer Engine are tested where they are installed; docs/backends.md has the lines that install them.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nep.moe.backends import BACKENDS, get_backend
from nep.moe.backends.base import Setting
from tests.unit.moe.backend_cases import CUTS, FP8_NORM_ERROR, ROWS_AND_TOP_K, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPU"),
]

# Of the largest entry. bfloat16 has 8 bits; the backends differ in when they round the terms of a row.
TOLERANCES = {torch.bfloat16: 0.03, torch.float32: 1e-5}


def case(cut: list[tuple[int, int]], num_rows: int, top_k: int, dtype: torch.dtype, size: int = 64) -> Case:
    return Case(
        cut=cut, num_rows=num_rows, top_k=top_k, hidden_size=size, neuron_block=size, dtype=dtype, device="cuda"
    )


def need(name: str) -> None:
    """Skip where the backend's package is missing; only that, or a broken installation would pass as absent."""
    setting = Setting(dtype=torch.bfloat16, device_type="cuda", hidden_size=64, neuron_block=64)
    problem = BACKENDS[name].problem(setting)
    if problem is not None:
        pytest.skip(f"needs GPU with the package of {name}: {problem.what}")


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("name", ["grouped_mm", "megablocks", "transformer_engine"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize(("num_rows", "top_k"), ROWS_AND_TOP_K)
def test_bfloat16_equals_the_loop(name: str, cut: list[tuple[int, int]], num_rows: int, top_k: int) -> None:
    need(name)
    error = case(cut, num_rows, top_k, torch.bfloat16).largest_error(get_backend(name))
    assert error < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_float32_equals_the_loop(cut: list[tuple[int, int]]) -> None:
    assert case(cut, 37, 2, torch.float32).largest_error(get_backend("grouped_mm")) < TOLERANCES[torch.float32]


def test_megablocks_takes_sizes_of_no_alignment() -> None:
    need("megablocks")
    odd = dataclasses.replace(
        case(CUTS["full ones, then slices"], 37, 2, torch.bfloat16), hidden_size=20, neuron_block=6
    )
    assert odd.largest_error(get_backend("megablocks")) < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize(("num_rows", "top_k"), ROWS_AND_TOP_K)
def test_fp8_is_near_the_loop(cut: list[tuple[int, int]], num_rows: int, top_k: int) -> None:
    need("transformer_engine_fp8")
    error = case(cut, num_rows, top_k, torch.bfloat16).norm_error(get_backend("transformer_engine_fp8"))
    assert error < FP8_NORM_ERROR


def test_fp8_rounds() -> None:
    """Or it would silently have run in bfloat16."""
    need("transformer_engine_fp8")
    error = case(CUTS["all experts"], 37, 2, torch.bfloat16).norm_error(get_backend("transformer_engine_fp8"))
    assert error > 0.01


@pytest.mark.parametrize("name", list(BACKENDS))
def test_large_slices_of_many_experts(name: str) -> None:
    """Sizes at which the kernels run as they do in training."""
    need(name)
    large = Case(
        cut=CUTS["full ones, then slices"],
        num_rows=2000,
        top_k=2,
        hidden_size=512,
        neuron_block=256,
        dtype=torch.bfloat16,
        device="cuda",
    )
    allowed = FP8_NORM_ERROR if name.endswith("fp8") else 0.02
    assert large.norm_error(get_backend(name)) < allowed
