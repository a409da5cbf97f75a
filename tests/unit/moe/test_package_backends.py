"""megablocks and Transformer Engine against the loop, on fakes that have the signatures of the packages' sources."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nep.moe.backends import megablocks
from nep.moe.backends import transformer_engine_fp8 as fp8
from nep.moe.backends.base import ExpertsBackend
from nep.moe.backends.groups import Group, run_experts
from nep.moe.backends.transformer_engine import GroupedGemm
from nep.moe.recompute import run_local
from tests.unit.moe import fake_packages as fake
from tests.unit.moe.backend_cases import CUTS, FP8_NORM_ERROR, ROWS_AND_TOP_K, Case

Passed = dict[str, set[str]]
EXACT = 1e-12


def on_megablocks(passed: Passed | None = None) -> ExpertsBackend:
    return functools.partial(megablocks.run, fake.megablocks_kernels(passed))


def on_te_gemm(passed: Passed | None = None) -> ExpertsBackend:
    return functools.partial(run_experts, products=GroupedGemm(fake.te_gemm(passed)), together=True)


def on_te_fp8(passed: Passed | None = None) -> ExpertsBackend:
    return functools.partial(fp8.run_experts_fp8, fake.te_grouped_linears(passed=passed))


BACKENDS: dict[str, tuple[Callable[..., ExpertsBackend], tuple[int, int]]] = {
    "megablocks": (on_megablocks, (5, 3)),  # sizes of no alignment at all
    "transformer_engine": (on_te_gemm, (16, 8)),
    "transformer_engine_fp8": (on_te_fp8, (32, 32)),
}


@pytest.fixture(autouse=True)
def _nan_in_fresh_memory() -> Iterator[None]:
    """Whatever is read before it is written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize(("num_rows", "top_k"), ROWS_AND_TOP_K)
def test_equals_the_loop(name: str, cut: list[tuple[int, int]], num_rows: int, top_k: int) -> None:
    make, (hidden_size, neuron_block) = BACKENDS[name]
    case = Case(cut=cut, num_rows=num_rows, top_k=top_k, hidden_size=hidden_size, neuron_block=neuron_block)
    assert case.largest_error(make()) < EXACT


@pytest.mark.parametrize("name", BACKENDS)
def test_passes_what_the_table_says(name: str) -> None:
    """The table's `passed` is what other releases are checked for (scripts/check_backend_facts.py)."""
    make, (hidden_size, neuron_block) = BACKENDS[name]
    passed: Passed = {}
    cut = CUTS["full ones, then slices"]
    Case(cut=cut, num_rows=37, top_k=2, hidden_size=hidden_size, neuron_block=neuron_block).run(make(passed))
    fp8._module.cache_clear()
    assert passed
    for function, arguments in passed.items():
        assert arguments == set(fake.FACTS.of(function).passed)
        assert fake.FACTS.of(function).takes_what_is_passed()


def test_every_function_of_the_table_is_used() -> None:
    called: Passed = {}
    for make, (hidden_size, neuron_block) in BACKENDS.values():
        cut = CUTS["all experts"]
        Case(cut=cut, num_rows=5, top_k=2, hidden_size=hidden_size, neuron_block=neuron_block).run(make(called))
    asked_elsewhere = {f"transformer_engine.pytorch.{name}" for name in ("is_fp8_available", "is_mxfp8_available")}
    assert {fact.name for fact in fake.FACTS.facts} == set(called) | asked_elsewhere


def test_a_call_that_does_not_fit_the_signature_fails() -> None:
    kernels = fake.megablocks_kernels()
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match="top_k"):
        kernels.gather(torch.zeros(1, 4), one, one, one)
    with pytest.raises(TypeError, match="keyword"):
        kernels.histogram(x=one, max_val=1)  # `apply` takes no keywords


def test_full_experts_are_one_product_and_slices_another() -> None:
    calls: list[int] = []
    kernels = fake.megablocks_kernels()

    def counted(a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, **keywords: object) -> torch.Tensor:
        calls.append(len(batch_sizes))
        return kernels.gmm(a, b, batch_sizes, **keywords)

    backend = functools.partial(megablocks.run, kernels._replace(gmm=counted))
    Case(cut=CUTS["full ones, then slices"], num_rows=37, top_k=2).run(backend)
    # two forward and four backward products each of: two full experts, half of expert 0, three quarters of expert 5;
    # nobody chose the last one, so its outer products are not asked for
    assert sorted(calls) == [1] * 6 + [1] * 4 + [2] * 6


def test_megablocks_moves_only_as_many_choices_as_the_busiest_row_has_here() -> None:
    widths: list[int] = []
    kernels = fake.megablocks_kernels()

    def counted(x: torch.Tensor, *path: torch.Tensor) -> torch.Tensor:
        widths.append(int(path[-1]))
        return kernels.gather(x, *path)

    backend = functools.partial(megablocks.run, kernels._replace(gather=counted))
    Case(cut=[(0, 8)], num_rows=19, top_k=6).run(backend)
    assert set(widths) == {2}, "two experts are here, so no row has more than two choices"


def test_assignments_served_twice_are_counted() -> None:
    groups = [Group(0, 1, 1, 0, 4, (4,)), Group(1, 3, 2, 0, 7, (4, 7)), Group(3, 4, 1, 7, 7, (0,))]
    assert [again for _, again in megablocks._visits(groups)] == [0, 4, 0]


def test_the_experts_units_are_multiplied_where_they_lie() -> None:
    """w13 reaches GroupedLinear as views, and its gradient is written to views of one tensor."""
    seen: list[torch.Tensor] = []
    package = fake.te_grouped_linears()

    class Watched(package.grouped_linear):
        def forward(self, *arguments: object, **keywords: object) -> torch.Tensor:
            seen.append(self.weight0)
            return super().forward(*arguments, **keywords)

    def backend(*arguments: torch.Tensor, **keywords: object) -> torch.Tensor:
        storages.append(arguments[3].untyped_storage().data_ptr())
        return fp8.run_experts_fp8(package._replace(grouped_linear=Watched), *arguments, **keywords)

    storages: list[int] = []
    case = Case(cut=[(0, 8)], num_rows=9, top_k=2, hidden_size=32, neuron_block=32)
    fake.FakeLinear.written.clear()
    *_, grad_w13, _ = case.run(backend)
    first, second = seen
    assert first.untyped_storage().data_ptr() == storages[0]
    assert second.shape == (32, 4 * 32) and second.is_contiguous(), "w2 the way round that a linear layer has it"
    assert fake.FakeLinear.written[-2:] == [grad_w13.untyped_storage().data_ptr()] * 2, "no copy, of either expert's"


def test_making_a_module_draws_no_random_numbers_and_keeps_no_weights() -> None:
    before = torch.get_rng_state()
    fp8._module.cache_clear()
    module = fp8._module(fake.te_grouped_linears().grouped_linear, 3, 32, 64, torch.float32, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert [parameter.numel() for parameter in module.parameters()] == [0] * 3


@given(st.lists(st.integers(0, 70), min_size=1, max_size=6))
def test_padding_repeats_rows_and_can_be_undone(sizes: list[int]) -> None:
    offsets = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    padding = fp8.pad(offsets, torch.device("cpu"))
    assert all(
        split % fp8.MULTIPLE == 0 and 0 <= split - size < fp8.MULTIPLE
        for split, size in zip(padding.sizes, sizes, strict=True)
    )
    assert len(padding.sources_p) == sum(padding.sizes)
    rows = torch.arange(sum(sizes))
    padded = rows[padding.sources_p]
    assert torch.equal(padded[padding.places_s], rows)
    slice_of = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    slice_of_padded = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(padding.sizes))
    assert torch.equal(slice_of[padding.sources_p], slice_of_padded), "a padding row is one of the same slice"


def test_eight_bits_are_near() -> None:
    """What rounding to FP8 does to these inputs: the tolerance of the test on a GPU (tests/gpu)."""
    backend = functools.partial(fp8.run_experts_fp8, fake.te_grouped_linears(quantize=True))
    for name, cut in CUTS.items():
        case = Case(cut=cut, num_rows=37, top_k=2, hidden_size=32, neuron_block=32, dtype=torch.bfloat16)
        error = case.norm_error(backend)
        assert error < FP8_NORM_ERROR
        assert error > 0.01 or name in ("nothing", "an expert without rows"), "it did round"


@pytest.mark.parametrize("name", BACKENDS)
def test_activation_checkpointing_changes_no_bit(name: str) -> None:
    make, (hidden_size, neuron_block) = BACKENDS[name]
    case = Case(cut=CUTS["all experts"], num_rows=37, top_k=2, hidden_size=hidden_size, neuron_block=neuron_block)

    def checkpointed(*arguments: torch.Tensor, **keywords: object) -> torch.Tensor:
        return run_local(functools.partial(make(), **keywords), *arguments, recompute=True)

    for found, expected in zip(case.run(checkpointed), case.run(make()), strict=True):
        assert torch.equal(found, expected)


def test_without_gradients() -> None:
    case = Case(cut=CUTS["all experts"], num_rows=9, top_k=2, hidden_size=32, neuron_block=32)
    rows, ids = torch.randn(9, 32, dtype=case.dtype), torch.arange(18).view(9, 2) % 6
    weights, units = torch.rand(9, 2, dtype=case.dtype), 24
    w13, w2 = torch.randn(units, 2, 32, 32, dtype=case.dtype), torch.randn(units, 32, 32, dtype=case.dtype)
    results = [make()(rows, ids, weights, w13, w2, slices=case.slices, num_experts=6) for make, _ in BACKENDS.values()]
    for result in results[1:]:
        assert not result.requires_grad
        torch.testing.assert_close(result, results[0], rtol=EXACT, atol=EXACT * results[0].abs().max().item())
