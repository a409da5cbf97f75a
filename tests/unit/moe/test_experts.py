"""Experts and their backends against a loop over rows and neurons, and the laws of slicing."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nep.moe.backends import get_backend
from nep.moe.experts import Experts, ExpertSlice, expert_slices
from nep.planning.layout import arrange

D = 3
BLOCK = 2
CUTS = {
    "all experts": [(0, 8)],
    "full and slices": [(2, 4), (0, 1), (6, 7)],
    "one expert's units apart": [(0, 1), (4, 5), (1, 2), (5, 6)],
    "no slices": [],
}
UNITS_PER_EXPERT = 2
FLOAT64_BACKENDS = ["loop"]  # grouped_mm refuses float64, see test_grouped_mm.py
NUM_EXPERTS = 4


def random(*size: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_ids(num_rows: int, top_k: int, seed: int) -> Tensor:
    scores = torch.rand(num_rows, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.topk(top_k).indices


def inputs(num_rows: int, top_k: int, num_units: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random rows, ids, weights, w13, w2 in float64; all but the ids want gradients."""
    return (
        random(num_rows, D, seed=seed).requires_grad_(),
        random_ids(num_rows, top_k, seed + 1),
        random(num_rows, top_k, seed=seed + 2).requires_grad_(),
        random(num_units, 2, BLOCK, D, seed=seed + 3).requires_grad_(),
        random(num_units, BLOCK, D, seed=seed + 4).requires_grad_(),
    )


def reference(
    rows_rd: Tensor,
    ids_rk: Tensor,
    weights_rk: Tensor,
    w13: Tensor,
    w2: Tensor,
    slices: tuple[ExpertSlice, ...],
) -> Tensor:
    """Row by row, choice by choice, neuron by neuron, differentiated by autograd."""
    out = []
    for row, ids, weights in zip(rows_rd, ids_rk, weights_rk, strict=True):
        total = torch.zeros_like(row) + 0 * (row.sum() + w13.sum() + w2.sum())
        for expert, weight in zip(ids, weights, strict=True):
            for piece in slices:
                if piece.expert == expert:
                    for unit in range(piece.lo, piece.hi):
                        for gate, up, down in zip(w13[unit, 0], w13[unit, 1], w2[unit], strict=True):
                            hidden = gate @ row
                            total = total + weight * hidden * torch.sigmoid(hidden) * (up @ row) * down
        out.append(total)
    return torch.stack(out)


def num_units_of(cut: list[tuple[int, int]]) -> int:
    return sum(hi - lo for lo, hi in cut)


@pytest.mark.parametrize("backend", FLOAT64_BACKENDS)
@pytest.mark.parametrize("top_k", [1, 2, NUM_EXPERTS])
@pytest.mark.parametrize("num_rows", [0, 5])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_gradients_are_exact(cut: list[tuple[int, int]], num_rows: int, top_k: int, backend: str) -> None:
    slices = expert_slices(cut, UNITS_PER_EXPERT)
    rows_rd, ids_rk, weights_rk, w13, w2 = inputs(num_rows, top_k, num_units_of(cut))

    def run(rows_rd: Tensor, weights_rk: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return get_backend(backend)(rows_rd, ids_rk, weights_rk, w13, w2, slices=slices, num_experts=NUM_EXPERTS)

    assert torch.autograd.gradcheck(run, (rows_rd, weights_rk, w13, w2))


@pytest.mark.parametrize("backend", FLOAT64_BACKENDS)
@pytest.mark.parametrize("cut", [cut for cut in CUTS.values() if cut])
def test_equals_a_loop_over_neurons(cut: list[tuple[int, int]], backend: str) -> None:
    slices = expert_slices(cut, UNITS_PER_EXPERT)
    arguments = inputs(7, 3, num_units_of(cut), seed=10)
    y_rd = get_backend(backend)(*arguments, slices=slices, num_experts=NUM_EXPERTS)
    expected_rd = reference(*arguments, slices)
    torch.testing.assert_close(y_rd, expected_rd, rtol=1e-12, atol=1e-12)

    wanted = [tensor for tensor in arguments if tensor.requires_grad]
    grad_y_rd = random(7, D, seed=20)
    gradients = torch.autograd.grad(y_rd, wanted, grad_y_rd)
    for found, expected in zip(gradients, torch.autograd.grad(expected_rd, wanted, grad_y_rd), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def experts_of(cut: list[tuple[int, int]], w13: Tensor, w2: Tensor) -> Experts:
    """The experts of one slot, with its units of the whole line."""
    slices = expert_slices(cut, UNITS_PER_EXPERT)
    experts = Experts(
        num_experts=NUM_EXPERTS,
        hidden_size=D,
        neuron_block=BLOCK,
        slices=slices,
        dtype=w13.dtype,
        device="meta",
    )
    units = [unit for lo, hi in cut for unit in range(lo, hi)]
    experts.replace(slices, w13[units].detach(), w2[units].detach())
    return experts


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.integers(1, NUM_EXPERTS), st.integers(0, 99))
def test_parts_of_slots_add_up_to_the_whole(slot_of_unit: list[int], top_k: int, seed: int) -> None:
    rows_rd, ids_rk, weights_rk, w13, w2 = inputs(6, top_k, 8, seed)
    grad_y_rd = random(6, D, seed=seed + 5)
    whole = experts_of([(0, 8)], w13, w2)
    y_rd = whole(rows_rd, ids_rk, weights_rk)
    grad_rows, grad_weights, grad_w13, grad_w2 = torch.autograd.grad(
        y_rd, (rows_rd, weights_rk, whole.w13, whole.w2), grad_y_rd
    )

    cuts = [
        list(arrange([(unit, unit + 1) for unit in range(8) if slot_of_unit[unit] == slot], UNITS_PER_EXPERT))
        for slot in range(4)
    ]
    slots = [experts_of(cut, w13, w2) for cut in cuts]
    sum_rd = torch.stack([experts(rows_rd, ids_rk, weights_rk) for experts in slots]).sum(0)
    torch.testing.assert_close(sum_rd, y_rd, rtol=1e-12, atol=1e-12)

    sum_rd.backward(grad_y_rd)
    torch.testing.assert_close(rows_rd.grad, grad_rows, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights_rk.grad, grad_weights, rtol=1e-12, atol=1e-12)
    for cut, experts in zip(cuts, slots, strict=True):
        units = [unit for lo, hi in cut for unit in range(lo, hi)]
        torch.testing.assert_close(experts.w13.grad, grad_w13[units], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(experts.w2.grad, grad_w2[units], rtol=1e-12, atol=1e-12)


def test_ids_that_are_not_held_contribute_nothing() -> None:
    rows_rd, _, weights_rk, w13, w2 = inputs(3, 2, 8)
    experts = experts_of([(2, 4)], w13, w2)
    y_rd = experts(rows_rd, torch.tensor([[0, -1], [3, 2], [1, -1]]), weights_rk)
    assert not y_rd[:2].any()
    assert y_rd[2].all()
    y_rd.sum().backward()
    assert weights_rk.grad is not None
    assert weights_rk.grad.count_nonzero() == 1
    assert weights_rk.grad[2, 0] != 0


def test_one_gradient_node_holds_all_parameters() -> None:
    rows_rd, ids_rk, weights_rk, w13, w2 = inputs(3, 2, 8)
    node = experts_of([(0, 8)], w13, w2)(rows_rd, ids_rk, weights_rk).grad_fn
    assert node is not None
    inside = [following.name() for following, _ in node.next_functions if following is not None]
    assert inside == ["torch::autograd::AccumulateGrad"] * 4


def test_half_precision_sums_in_float32() -> None:
    # Equal experts weighted 256 and seven times 0.5: bfloat16 would drop each 0.5 next to 256.
    dtype = torch.bfloat16
    w13 = random(1, 2, BLOCK, D, seed=1).to(dtype).repeat(8, 1, 1, 1)
    w2 = random(1, BLOCK, D, seed=2).to(dtype).repeat(8, 1, 1)
    row_1d = random(1, D, seed=3).to(dtype)
    slices = expert_slices([(0, 8)], 1)
    weights_1k = torch.tensor([[256.0] + [0.5] * 7])

    def run(weights_1k: Tensor) -> Tensor:
        ids_1k = torch.arange(weights_1k.size(1))[None]
        return get_backend("loop")(row_1d, ids_1k, weights_1k, w13, w2, slices=slices, num_experts=8)

    y_1d = run(weights_1k)
    assert y_1d.dtype == dtype
    ratio_1d = y_1d.double() / run(torch.ones(1, 1)).double()
    torch.testing.assert_close(ratio_1d, torch.full((1, D), 259.5, dtype=torch.float64), rtol=2**-8, atol=0)


def test_half_precision_gradients_are_near_those_of_float64() -> None:
    slices = expert_slices(CUTS["full and slices"], UNITS_PER_EXPERT)
    exact = inputs(40, 2, 4, seed=30)
    rows_rd, ids_rk, weights_rk, w13, w2 = exact
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in (rows_rd, w13, w2)]
    half_weights_rk = weights_rk.detach().float().requires_grad_()
    y_rd = get_backend("loop")(
        half[0], ids_rk, half_weights_rk, half[1], half[2], slices=slices, num_experts=NUM_EXPERTS
    )
    found = torch.autograd.grad(y_rd.float().sum(), [*half, half_weights_rk])
    exact_y_rd = get_backend("loop")(*exact, slices=slices, num_experts=NUM_EXPERTS)
    expected = torch.autograd.grad(exact_y_rd.sum(), [rows_rd, w13, w2, weights_rk])
    for gradient, exact_gradient in zip(found, expected, strict=True):
        error = (gradient.double() - exact_gradient).abs().max() / exact_gradient.abs().max()
        assert error < 0.03
    assert [gradient.dtype for gradient in found] == [torch.bfloat16] * 3 + [torch.float32]


def test_one_expert_is_a_dense_mlp() -> None:
    ffn = 6
    gate, up, down = (random(ffn, D, seed=seed).requires_grad_() for seed in range(3))
    x_td = random(5, D, seed=3).requires_grad_()
    y_td = (F.silu(x_td @ gate.T) * (x_td @ up.T)) @ down
    expected = torch.autograd.grad(y_td.square().sum(), (x_td, gate, up, down))

    experts = Experts(
        num_experts=1,
        hidden_size=D,
        neuron_block=BLOCK,
        slices=[ExpertSlice(0, 0, 3)],
        dtype=x_td.dtype,
        device="meta",
    )
    w13 = torch.stack((gate, up), dim=1).view(3, BLOCK, 2, D).transpose(1, 2).contiguous()
    experts.replace(experts.slices, w13.detach(), down.detach().view(3, BLOCK, D))
    found_td = experts(x_td, torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1, dtype=x_td.dtype))
    torch.testing.assert_close(found_td, y_td, rtol=1e-12, atol=1e-12)
    grad_x, grad_w13, grad_w2 = torch.autograd.grad(found_td.square().sum(), (x_td, experts.w13, experts.w2))
    found = (grad_x, *grad_w13.transpose(0, 1).flatten(1, 2), grad_w2.flatten(0, 1))
    for gradient, expected_gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_weights_and_slices_must_fit() -> None:
    experts = experts_of([(0, 8)], torch.ones(8, 2, BLOCK, D), torch.ones(8, BLOCK, D))
    with pytest.raises(ValueError, match="store 7 units"):
        experts.replace(experts.slices, torch.ones(7, 2, BLOCK, D), torch.ones(7, BLOCK, D))
    with pytest.raises(ValueError, match="must be contiguous"):
        experts.replace(experts.slices, torch.ones(8, 2, BLOCK, D), torch.ones(7, BLOCK, D))
    with pytest.raises(ValueError, match="must be contiguous"):
        experts.replace(experts.slices, torch.ones(8, 2, D, BLOCK).mT, torch.ones(8, BLOCK, D))


def test_an_unknown_backend_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'fast'.*loop"):
        get_backend("fast")
