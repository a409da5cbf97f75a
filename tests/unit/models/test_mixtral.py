"""The decoder: lines, sizes without memory, empty batches, and its layers cut over slots."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import models.mixtral
from models.mixtral import MixtralModel, build
from nep.moe.aux_losses import AuxLosses
from nep.moe.lane import SingleSlotLane
from nep.moe.positions import positions_of
from nep.moe.routing_state import RoutingState
from nep.planning.layout import LineKind
from nep.planning.shapes import PRESETS, ModelShape, parameter_lines, preset

TINY = dataclasses.replace(
    preset("debug"),
    hidden_size=16,
    ffn_hidden_size=12,
    neuron_block=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
)
FINE = dataclasses.replace(
    preset("debug-fine"), hidden_size=16, ffn_hidden_size=4, neuron_block=2, num_heads=4, num_kv_heads=2, head_dim=6,
    shared_ffn_hidden_size=6, dense_ffn_hidden_size=10,
)  # fmt: skip


def model_of(shape: ModelShape, dtype: torch.dtype = torch.float64) -> MixtralModel:
    model = MixtralModel(shape, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def tokens_of(num_sequences: int, seq_len: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_sequences, seq_len), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_the_lines(name: str, tied: bool) -> None:
    shape = dataclasses.replace(preset(name), tied_embeddings=tied)
    model = build(shape, torch.bfloat16)
    parameters = dict(model.named_parameters())
    lines = model.parameter_lines()
    assert list(parameters) == list(lines)
    for key, line in lines.items():
        assert parameters[key].shape == (line.unit_shape if line.kind is LineKind.WHOLE else line.shape), key
        assert parameters[key].is_meta and parameters[key].dtype == torch.bfloat16, key
    assert sum(parameter.numel() for parameter in parameters.values()) == shape.num_parameters
    buffers = [key for key, _ in model.named_buffers()]
    assert buffers == [f"layers.{layer}.moe.router.bias" for layer in (1, 2) if name == "debug-fine"]


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 46.7), ("mixtral-8x22b", 140.6)])
def test_large_models_have_their_published_size(name: str, billions: float) -> None:
    num_parameters = sum(parameter.numel() for parameter in build(preset(name), torch.bfloat16).parameters())
    assert round(num_parameters / 1e9, 1) == billions


def test_moe_layers_are_named_by_their_axis() -> None:
    model = build(preset("debug"), torch.float32)
    assert list(model.moe_layers()) == ["layers.0.experts", "layers.1.experts"]
    axes = {line.axis for line in model.parameter_lines().values() if line.kind is LineKind.EXPERTS}
    assert set(model.moe_layers()) == axes
    assert model.moe_layers()["layers.1.experts"] is model.layers[1].moe


def test_small_experts_have_layers_without_experts_before_them() -> None:
    model = model_of(FINE)
    assert list(model.moe_layers()) == ["layers.1.experts", "layers.2.experts"]
    tokens = tokens_of(3, 16)
    output = model(tokens, tokens)
    assert output.num_tokens_per_expert_le.sum(1).tolist() == [3 * 16 * FINE.top_k] * 2
    output.loss.total.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    empty = model_of(FINE)
    empty(tokens[:0], tokens[:0]).loss.total.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in empty.parameters())


def test_biases_are_seen_and_forward_leaves_them_alone() -> None:
    model, tokens = model_of(FINE), tokens_of(2, 16)
    state = RoutingState.initial(parameter_lines(FINE), torch.float64)
    model.use_routing_state(state)
    before = model(tokens).num_tokens_per_expert_le
    state.bias_le[:, 3] = 100.0
    model(tokens, tokens).loss.total.backward()
    assert model(tokens).num_tokens_per_expert_le[:, 3].tolist() == [32, 32] != before[:, 3].tolist()
    assert state.bias_le.sum() == 200.0 and not state.counts_le.any()


def test_auxiliary_losses_are_for_training_only() -> None:
    model, tokens = model_of(FINE), tokens_of(2, 16)
    plain = model(tokens, tokens)
    model.use_aux_losses(AuxLosses(z=1.0, balance=1.0, logits_z=1.0))
    output = model(tokens, tokens)
    assert torch.equal(output.loss.own, plain.loss.own), "they count in no reported loss"
    assert output.aux_loss > 0 and output.loss.total > plain.loss.total and plain.aux_loss is None
    with torch.no_grad():
        assert model(tokens, tokens).aux_loss is None


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_sequences_give_zero_gradients(window: int | None, tied: bool, dtype: torch.dtype) -> None:
    model = model_of(dataclasses.replace(TINY, sliding_window=window, tied_embeddings=tied), dtype)
    output = model(tokens_of(0, 8))
    assert output.logits_btv.shape == (0, 8, 256)
    assert output.num_tokens_per_expert_le.tolist() == [[0] * 8] * 2
    F.cross_entropy(output.logits_btv.flatten(0, 1), torch.empty(0, dtype=torch.int64), reduction="sum").backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("window", [None, 3])
def test_no_token_sees_a_later_one_or_one_before_its_windows(window: int | None) -> None:
    model = model_of(dataclasses.replace(TINY, sliding_window=window))
    tokens = tokens_of(1, 12)
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 256
    difference = (model(tokens).logits_btv - model(changed).logits_btv).abs().amax(-1)[0]
    # two layers with a window of three positions see two positions back each
    last = 11 if window is None else 4 + 2 * (window - 1)
    assert [position for position in range(12) if difference[position] > 1e-12] == list(range(4, last + 1))


def test_a_window_that_hides_nothing_is_no_window() -> None:
    tokens = tokens_of(2, 9)
    expected = model_of(TINY)(tokens).logits_btv
    found = model_of(dataclasses.replace(TINY, sliding_window=9))(tokens).logits_btv
    assert torch.equal(found, expected)


def test_every_parameter_gets_a_gradient_and_counts_add_up() -> None:
    model = model_of(TINY)
    output = model(tokens_of(3, 16))
    assert output.num_tokens_per_expert_le.sum(1).tolist() == [3 * 16 * TINY.top_k] * TINY.num_layers
    output.logits_btv.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_sequences_do_not_depend_on_each_other() -> None:
    model = model_of(TINY)
    tokens = tokens_of(3, 10)
    together = model(tokens).logits_btv
    for index in range(3):
        alone = model(tokens[index : index + 1]).logits_btv[0]
        torch.testing.assert_close(together[index], alone, rtol=1e-12, atol=1e-12)


def test_bfloat16_is_near_float64() -> None:
    # All experts for every token: then a rounded router cannot choose another one.
    shape = dataclasses.replace(TINY, top_k=8)
    exact = model_of(shape)
    rounded = model_of(shape, torch.bfloat16)
    with torch.no_grad():
        for parameter, half in zip(exact.parameters(), rounded.parameters(), strict=True):
            half.copy_(parameter)
            parameter.copy_(half)
    tokens = tokens_of(2, 16)
    expected, found = exact(tokens).logits_btv, rounded(tokens).logits_btv
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).abs().max() < 0.05 * expected.abs().max()


def test_norm_computes_in_float32() -> None:
    # a sum of 4096 squares does not survive eight bits of mantissa
    norm = models.mixtral.RMSNorm(4096, 1e-5, dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        norm.weight.fill_(1)
    x = (1 + torch.rand(1, 1, 4096, generator=torch.Generator().manual_seed(0))).bfloat16()
    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert ((norm(x).double() - expected) / expected).abs().max() <= 2**-8


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float32, 1e-3), (torch.float64, 1e-12)]
)
def test_angles_are_not_rounded_before_their_sine(dtype: torch.dtype, tolerance: float) -> None:
    # position 4095 in bfloat16 is 4096, a radian off
    tokens_bt = torch.zeros(1, 4096, dtype=torch.int64)
    positions = positions_of(dataclasses.replace(TINY, max_seq_len=4096), tokens_bt, dtype, SingleSlotLane())
    angles = [position * TINY.rope_theta ** (-2 / TINY.head_dim) for position in range(4096)]
    expected = torch.tensor(angles, dtype=torch.float64)
    for channel, sign in ((1, -1), (1 + TINY.head_dim // 2, 1)):
        sines = sign * positions.sin_tc[:, 0, channel].double()
        assert (sines - expected.sin()).abs().max() <= tolerance
        assert (positions.cos_tc[:, 0, channel].double() - expected.cos()).abs().max() <= tolerance


def test_too_long_sequences_are_refused() -> None:
    shape = dataclasses.replace(TINY, max_seq_len=8)
    with pytest.raises(ValueError, match=r"seq_len \(9\) exceeds max_seq_len \(8\)"):
        model_of(shape)(tokens_of(1, 9))


def test_latent_attention_is_refused() -> None:
    shape = dataclasses.replace(preset("debug"), kv_latent_size=8, num_kv_heads=1)
    with pytest.raises(ValueError, match=r"debug has latent attention \(kv_latent_size 8\), which this model does not"):
        build(shape, torch.float32)
