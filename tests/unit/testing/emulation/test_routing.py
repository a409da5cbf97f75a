"""Choices follow the loads: each token's chances exactly, and their counts over a few tokens as closely as possible."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nep.moe.router import TopKRouter
from nep.testing.emulation.routing import ExpertSampler, route_as_drawn


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 6), (5, 5), (7, 3)])
def test_equal_loads_are_equal_over_every_sequence(experts: int, top_k: int) -> None:
    sampler = ExpertSampler(np.full(experts, top_k / experts), seed=1)
    for _ in range(5):
        drawn = sampler.draw(16)
        assert drawn.shape == (16, top_k)
        counts = np.bincount(drawn.ravel(), minlength=experts)
        assert abs(counts - 16 * top_k / experts).max() < 1
        assert all(len(set(row)) == top_k for row in drawn.tolist())


def test_skewed_loads_are_met() -> None:
    chances = np.array([1.0, 0.5, 0.3, 0.2, 0.0])
    drawn = ExpertSampler(chances, seed=2).draw(1600)
    assert np.bincount(drawn.ravel(), minlength=5) / 1600 == pytest.approx(chances, abs=0.01)


def test_pairs_mix() -> None:
    """Every pair of experts meets: a token's second choice does not follow from its first."""
    drawn = np.sort(ExpertSampler(np.full(8, 0.25), seed=3).draw(16 * 100), axis=1)
    pairs, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(pairs) == 28
    assert counts.max() < 3 * counts.mean()


def test_a_router_sends_tokens_where_they_were_drawn_and_still_learns() -> None:
    router = TopKRouter(8, 4, 2, dtype=torch.float32, device="cpu")
    torch.nn.init.normal_(router.weight)
    route_as_drawn(router, ExpertSampler(np.full(8, 0.25), seed=4))
    routing = router(torch.ones(16, 4))  # equal tokens, which the router alone would send to two experts
    assert torch.bincount(routing.expert_ids_tk.flatten(), minlength=8).tolist() == [4] * 8
    torch.testing.assert_close(routing.weights_tk.sum(-1), torch.ones(16))
    routing.weights_tk[:, 0].sum().backward()
    assert router.weight.grad is not None and router.weight.grad.abs().sum() > 0
