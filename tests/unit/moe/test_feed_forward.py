"""Networks that every token visits: their formula, any cut of their neurons, and nothing at all."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from nep.moe.feed_forward import FeedForward, SharedExperts

D, NEURONS = 6, 10


def network_of(kind: type[FeedForward], **options: bool) -> FeedForward:
    network = kind(NEURONS, D, dtype=torch.float64, device="cpu", **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return network


def tokens_of(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("gated", [None, False, True])
def test_neuron_by_neuron(gated: bool | None) -> None:
    network = network_of(FeedForward) if gated is None else network_of(SharedExperts, gated=gated)
    x_td = tokens_of(4)
    expected = torch.zeros(4, D, dtype=torch.float64)
    for neuron in range(NEURONS):
        gate_t, up_t = x_td @ network.w13[neuron, 0], x_td @ network.w13[neuron, 1]
        expected = expected + (gate_t / (1 + torch.exp(-gate_t)) * up_t)[:, None] * network.w2[neuron]
    if gated:
        expected = expected / (1 + torch.exp(-(x_td @ network.gate)))[:, None]
    torch.testing.assert_close(network(x_td, 4), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
def test_parts_add_up_to_the_whole(recompute: bool) -> None:
    whole, x_td = network_of(FeedForward), tokens_of(5)
    expected_td = whole(x_td, 5)
    expected = torch.autograd.grad(expected_td.square().sum(), list(whole.parameters()))
    bounds = [0, 3, 3, 10]
    parts = []
    for lo, hi in itertools.pairwise(bounds):
        part = FeedForward(0, D, dtype=torch.float64, device="cpu")
        part.recompute = recompute
        part.w13, part.w2 = (nn.Parameter(getattr(whole, name).detach()[lo:hi].clone()) for name in ("w13", "w2"))
        parts.append(part)
    found_td = sum(part(x_td, 5) for part in parts)
    torch.testing.assert_close(found_td, expected_td, rtol=1e-12, atol=1e-12)
    found_td.square().sum().backward()
    for index, name in enumerate(("w13", "w2")):
        grads = [getattr(part, name).grad for part in parts]
        assert grads[1] is not None and grads[1].numel() == 0, "a slot without neurons still takes part"
        torch.testing.assert_close(torch.cat(grads), expected[index], rtol=1e-12, atol=1e-12)


def test_no_tokens_give_zero_gradients() -> None:
    network = network_of(SharedExperts, gated=True)
    network(tokens_of(0), 0).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in network.parameters())
