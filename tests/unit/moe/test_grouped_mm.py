"""The grouped backend against the loop, which is itself tested against a loop over neurons."""

from __future__ import annotations

import pytest
import torch

from nep.moe.backends import choose_backend, get_backend, grouped_mm
from nep.moe.backends.groups import Group, _continues
from nep.moe.slices import expert_slices

NUM_EXPERTS, UNITS, BLOCK, HIDDEN = 6, 4, 8, 16
CUTS = {
    "all experts": [(0, NUM_EXPERTS * UNITS)],
    "full ones, then slices": [(4, 12), (0, 2), (21, 24)],
    "halves of all": [(2 * half, 2 * half + 2) for half in range(0, 2 * NUM_EXPERTS, 2)],
    "two slices of one expert": [(0, 1), (2, 3), (8, 9)],
    "nothing": [],
}


def run(name: str, cut: list[tuple[int, int]], dtype: torch.dtype, num_rows: int, top_k: int) -> list[torch.Tensor]:
    """Result and all gradients."""
    torch.manual_seed(num_rows + top_k)
    slices = expert_slices(cut, UNITS)
    units = sum(piece.hi - piece.lo for piece in slices)
    wide = torch.promote_types(dtype, torch.float32)
    rows = torch.randn(num_rows, HIDDEN, dtype=dtype, requires_grad=True)
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:top_k] for _ in range(num_rows)]) if num_rows else None
    ids = torch.empty(0, top_k, dtype=torch.int64) if ids is None else ids
    ids[ids == 5] = -1  # an expert that nobody chooses, and ids that stand for none
    weights = torch.rand(num_rows, top_k, dtype=wide, requires_grad=True)
    w13 = (torch.randn(units, 2, BLOCK, HIDDEN) * 0.3).to(dtype).requires_grad_()
    w2 = (torch.randn(units, BLOCK, HIDDEN) * 0.3).to(dtype).requires_grad_()
    y = get_backend(name)(rows, ids, weights, w13, w2, slices=slices, num_experts=NUM_EXPERTS)
    (y.to(wide) * torch.linspace(-1, 1, y.numel(), dtype=wide).view(y.shape)).sum().backward()
    return [y.detach(), *(tensor.grad for tensor in (rows, weights, w13, w2))]


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("num_rows", "top_k"), [(0, 2), (1, 1), (37, 2), (19, NUM_EXPERTS)])
def test_equals_the_loop(
    cut: list[tuple[int, int]], dtype: torch.dtype, tolerance: float, num_rows: int, top_k: int
) -> None:
    for found, expected in zip(
        run("grouped_mm", cut, dtype, num_rows, top_k), run("loop", cut, dtype, num_rows, top_k), strict=True
    ):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        if expected.numel():
            largest = expected.abs().max().clamp(min=1e-3)
            assert (found - expected).abs().max() <= tolerance * largest


def test_equally_large_neighbours_are_one_group() -> None:
    first = Group(0, 4, 1, 0, 5, (5,))
    assert _continues(first, Group(4, 8, 1, 5, 9, (4,)))
    assert not _continues(first, Group(4, 6, 1, 5, 9, (4,))), "another size"
    assert not _continues(first, Group(8, 12, 1, 5, 9, (4,))), "a gap in storage"
    assert not _continues(first, Group(4, 8, 1, 0, 5, (5,))), "the same expert's tokens again"


def test_auto_says_why() -> None:
    assert choose_backend("auto", torch.float32, hidden_size=16, neuron_block=8)[0] == "grouped_mm"
    name, why = choose_backend("auto", torch.float64, hidden_size=16, neuron_block=8)
    assert name == "loop" and "float64" in why
    name, why = choose_backend("auto", torch.bfloat16, hidden_size=12, neuron_block=8)
    assert name == "loop" and "hidden_size (12)" in why
    assert choose_backend("loop", torch.float64, hidden_size=5, neuron_block=1)[0] == "loop"


def test_what_cannot_run_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"neuron_block \(1\).*use 'loop' or 'auto'"):
        choose_backend("grouped_mm", torch.float32, hidden_size=16, neuron_block=1)
    with pytest.raises(ValueError, match="choose one of auto, loop, grouped_mm"):
        choose_backend("fast", torch.float32, hidden_size=16, neuron_block=8)


def test_a_cpu_runs_large_slices_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[int] = []
    grouped = torch.nn.functional.grouped_mm

    def counted(a: torch.Tensor, b: torch.Tensor, **keywords: torch.Tensor) -> torch.Tensor:
        products.append(len(a))
        return grouped(a, b, **keywords)

    monkeypatch.setattr(grouped_mm.F, "grouped_mm", counted)
    cut = CUTS["all experts"]
    run("grouped_mm", cut, torch.float32, 37, 2)
    assert len(products) == 6
    activations = 37 * 2 * UNITS * BLOCK  # of all experts
    monkeypatch.setattr(grouped_mm, "_CPU_ONE_BY_ONE", activations)
    for found, expected in zip(
        run("grouped_mm", cut, torch.float32, 37, 2), run("loop", cut, torch.float32, 37, 2), strict=True
    ):
        assert torch.equal(found, expected)
    assert len(products) == 6
