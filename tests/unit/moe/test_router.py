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
    expert_ids_tk, weights_tk, *_ = router(x_td)
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
    expert_ids_tk, weights_tk, *_ = router_of(dtype, 2)(torch.ones(3, 8, dtype=dtype))
    assert weights_tk.dtype == weights_dtype
    assert expert_ids_tk.dtype == torch.int64


def test_no_tokens_still_give_a_gradient() -> None:
    router = router_of(torch.float32, 2)
    router(torch.empty(0, 8)).weights_tk.sum().backward()
    assert router.weight.grad is not None
    assert not router.weight.grad.any()


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_experts_are_chosen_with_the_bias_and_weighted_without(scores: str, normalised: bool) -> None:
    plain = router_of(torch.float64, 2)
    router = TopKRouter(
        6, 8, 2, scores=scores, biased=True, normalised=normalised, scaling=2.5, dtype=torch.float64, device="cpu"
    )
    router.weight = plain.weight
    router.bias = torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0, -3.0], dtype=torch.float64)
    x_td = torch.randn(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    routing = router(x_td, with_shares=True)
    for token in range(40):
        logits = [float(x_td[token].dot(router.weight.detach()[expert])) for expert in range(6)]
        if scores == "softmax":
            total = sum(math.exp(logit) for logit in logits)
            values = [math.exp(logit) / total for logit in logits]
        else:
            values = [1 / (1 + math.exp(-logit)) for logit in logits]
        # A bias of 3 is more than any score: expert 2 is always chosen, expert 5 never.
        second = max((0, 1, 3, 4), key=lambda expert: values[expert])
        assert routing.expert_ids_tk[token].tolist() == [2, second]
        weights = [2.5 * values[2], 2.5 * values[second]]
        if normalised:
            weights = [2.5 * weight / sum(weights) for weight in weights]
        assert routing.weights_tk[token].tolist() == pytest.approx(weights, rel=1e-12)
        shares = [value / sum(values) for value in values]
        assert routing.shares_te is not None
        assert routing.shares_te[token].tolist() == pytest.approx(shares, rel=1e-12)


def test_a_bias_of_zero_is_none() -> None:
    plain = router_of(torch.float64, 3)
    biased = TopKRouter(6, 8, 3, biased=True, dtype=torch.float64, device="cpu")
    biased.weight = plain.weight
    x_td = torch.randn(30, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(plain(x_td).expert_ids_tk, biased(x_td).expert_ids_tk)
    assert torch.equal(plain(x_td).weights_tk, biased(x_td).weights_tk)
    assert plain(x_td).shares_te is None


def test_the_bias_is_not_trained_and_wide() -> None:
    router = TopKRouter(6, 8, 2, biased=True, dtype=torch.bfloat16, device="cpu")
    assert [name for name, _ in router.named_parameters()] == ["weight"]
    assert router.bias is not None and router.bias.dtype == torch.float32 and not router.bias.any()


def test_sigmoid_scores_are_not_rounded_to_half_precision() -> None:
    router = TopKRouter(6, 8, 2, scores="sigmoid", dtype=torch.bfloat16, device="cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(6, 8, generator=generator))
    x_td = torch.randn(10, 8, generator=generator).bfloat16()
    expected = x_td.double() @ router.weight.detach().double().T
    assert (router(x_td).logits_te - expected).abs().max() <= 1e-6 * expected.abs().max()
