"""The layer: what it counts, and that it leaves moving tokens to its dispatcher."""

import dataclasses

import pytest
import torch
from torch import Tensor

from nep.moe.dispatcher import Dispatched, Routing
from nep.moe.experts import Experts, expert_slices
from nep.moe.layer import MoE
from nep.moe.router import TopKRouter


def layer_of(num_experts: int = 4, top_k: int = 2) -> MoE:
    torch.manual_seed(0)
    dtype = torch.float64
    experts = Experts(
        num_experts=num_experts,
        hidden_size=8,
        neuron_block=2,
        slices=expert_slices([(0, 3 * num_experts)], 3),
        dtype=dtype,
        device="cpu",
    )
    layer = MoE(TopKRouter(num_experts, 8, top_k, dtype=dtype, device="cpu"), experts, axis="layers.0.experts")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


class ReversingDispatcher:
    """Sends tokens in reverse order, with a choice of no expert appended to each."""

    def dispatch(self, x_td: Tensor, routing: Routing) -> Dispatched:
        num_tokens = x_td.size(0)
        nothing = torch.full((num_tokens, 1), -1)
        return Dispatched(
            rows_rd=x_td.flip(0),
            expert_ids_rk=torch.cat((routing.expert_ids_tk.flip(0), nothing), dim=1),
            weights_rk=torch.cat((routing.weights_tk.flip(0), torch.ones(num_tokens, 1)), dim=1),
            handle=num_tokens,
        )

    def combine(self, dispatched: Dispatched, y_rd: Tensor) -> Tensor:
        assert dispatched.handle == y_rd.size(0)
        return y_rd.flip(0)


def test_a_dispatcher_changes_the_way_and_not_the_result() -> None:
    layer = layer_of()
    x_td = torch.randn(6, 8, dtype=torch.float64)
    y_td, num_tokens_per_expert, _ = layer(x_td)
    expected = torch.autograd.grad(y_td.square().sum(), list(layer.parameters()))

    layer.dispatcher = ReversingDispatcher()
    other_td, other_counts, _ = layer(x_td)
    torch.testing.assert_close(other_td, y_td, rtol=1e-12, atol=1e-12)
    assert torch.equal(other_counts, num_tokens_per_expert)
    found = torch.autograd.grad(other_td.square().sum(), list(layer.parameters()))
    for gradient, expected_gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_counts_are_the_router_s() -> None:
    layer = layer_of()
    x_td = torch.randn(20, 8, dtype=torch.float64)
    _, num_tokens_per_expert, _ = layer(x_td)
    assert num_tokens_per_expert.dtype == torch.int64
    ids = layer.router(x_td).expert_ids_tk.flatten().tolist()
    assert num_tokens_per_expert.tolist() == [ids.count(expert) for expert in range(4)]


def test_no_tokens_give_zero_gradients_for_everything() -> None:
    layer = layer_of()
    y_td, num_tokens_per_expert, _ = layer(torch.empty(0, 8, dtype=torch.float64))
    y_td.sum().backward()
    assert not num_tokens_per_expert.any()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_what_is_dispatched_is_frozen() -> None:
    layer = layer_of()
    x_td = torch.randn(2, 8, dtype=torch.float64)
    dispatched = layer.dispatcher.dispatch(x_td, layer.router(x_td))
    with pytest.raises(dataclasses.FrozenInstanceError):
        dispatched.rows_rd = x_td  # type: ignore[misc]
