"""Top-k routing against a slow one, row by row."""

import math

import pytest
import torch

from nep.moe.router import TopKRouter


def router_of(dtype: torch.dtype, top_k: int) -> TopKRouter:
    router = TopKRouter(6, 8, top_k, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(6, 8, generator=generator))
    return router


@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_weights_are_the_largest_probabilities_renormalised(top_k: int) -> None:
    router = router_of(torch.float64, top_k)
    x_td = torch.randn(10, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expert_ids_tk, weights_tk, _ = router(x_td)
    for token, (ids, weights) in enumerate(zip(expert_ids_tk.tolist(), weights_tk.tolist(), strict=True)):
        exponentials = [math.exp(x_td[token].dot(router.weight.detach()[expert])) for expert in range(6)]
        chosen = sorted(range(6), key=lambda expert: -exponentials[expert])[:top_k]
        assert ids == chosen
        total = sum(exponentials[expert] for expert in chosen)
        assert weights == pytest.approx([exponentials[expert] / total for expert in chosen], rel=1e-12)


@pytest.mark.parametrize(
    ("dtype", "weights_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_weights_have_at_least_float32(dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
    expert_ids_tk, weights_tk, _ = router_of(dtype, 2)(torch.ones(3, 8, dtype=dtype))
    assert weights_tk.dtype == weights_dtype
    assert expert_ids_tk.dtype == torch.int64


def test_no_tokens_still_give_a_gradient() -> None:
    router = router_of(torch.float32, 2)
    router(torch.empty(0, 8)).weights_tk.sum().backward()
    assert router.weight.grad is not None
    assert not router.weight.grad.any()
