"""The same weights give the same logits and gradients as transformers' Mixtral."""

import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from models.mixtral import MixtralModel
from nep.planning.shapes import ModelShape, preset

SEQ_LEN = 24
SHAPE = dataclasses.replace(
    preset("debug"),
    hidden_size=48,
    ffn_hidden_size=40,
    neuron_block=8,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,  # not hidden_size / num_heads
    vocab_size=101,
    rope_theta=1e3,
)


def huggingface_of(shape: ModelShape, attention: str) -> MixtralForCausalLM:
    """Random weights, all larger than the default's, so that every part matters to the logits."""
    config = MixtralConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_seq_len,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        sliding_window=shape.sliding_window,
        num_experts_per_tok=shape.top_k,
        num_local_experts=shape.num_experts,
        tie_word_embeddings=shape.tied_embeddings,
        attn_implementation=attention,
        dtype=torch.float32,
    )
    model = MixtralForCausalLM(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            norm = parameter.ndim == 1
            parameter.normal_(mean=1.0 if norm else 0.0, std=0.2, generator=generator)
    return model


def convert(name: str, tensor: Tensor, shape: ModelShape) -> tuple[str, Tensor]:
    """Name and value here of a parameter (or of its gradient) there."""
    if not name.startswith("model.layers."):
        names = {
            "model.embed_tokens.weight": "embedding",
            "model.norm.weight": "final_norm",
            "lm_head.weight": "head",
        }
        return f"{names[name]}.weight", tensor
    _, _, layer, rest = name.split(".", 3)
    d, block, units = shape.hidden_size, shape.neuron_block, shape.num_experts * shape.units_per_expert
    if rest == "mlp.experts.gate_up_proj":
        halves = tensor.view(shape.num_experts, 2, shape.units_per_expert, block, d)
        return f"layers.{layer}.moe.experts.w13", halves.transpose(1, 2).reshape(units, 2, block, d)
    if rest == "mlp.experts.down_proj":
        return f"layers.{layer}.moe.experts.w2", tensor.transpose(1, 2).reshape(units, block, d)
    if rest == "self_attn.o_proj.weight":
        return f"layers.{layer}.attention.wo", tensor.T.reshape(-1, shape.head_dim, d)
    if rest.startswith("self_attn."):
        return f"layers.{layer}.attention.w{rest[len('self_attn.')]}", tensor.view(-1, shape.head_dim, d)
    names = {
        "input_layernorm.weight": "attention_norm",
        "post_attention_layernorm.weight": "moe_norm",
        "mlp.gate.weight": "moe.router",
    }
    return f"layers.{layer}.{names[rest]}.weight", tensor


def assert_equal_to_huggingface(shape: ModelShape, attention: str = "eager") -> None:
    theirs = huggingface_of(shape, attention)
    ours = MixtralModel(shape, dtype=torch.float32, device="cpu")
    weights = dict(convert(name, tensor.detach(), shape) for name, tensor in theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights.pop(name))
    assert not weights

    tokens = torch.randint(0, shape.vocab_size, (3, SEQ_LEN), generator=torch.Generator().manual_seed(4))
    expected = theirs(tokens, output_router_logits=True)
    found = ours(tokens)
    largest = expected.logits.abs().max()
    assert largest > 1
    assert (found.logits_btv - expected.logits).abs().max() <= 1e-4 * largest
    counts = [
        logits.topk(shape.top_k).indices.flatten().bincount(minlength=shape.num_experts).tolist()
        for logits in expected.router_logits
    ]
    assert found.num_tokens_per_expert_le.tolist() == counts

    grad = torch.randn(expected.logits.shape, generator=torch.Generator().manual_seed(5))
    expected.logits.backward(grad)
    found.logits_btv.backward(grad)
    gradients = dict(convert(name, parameter.grad, shape) for name, parameter in theirs.named_parameters())
    # with one choice per token its weight is one, and the router's gradient is nothing but rounding
    rounding = 1e-6 * max(gradient.abs().max() for gradient in gradients.values())
    for name, parameter in ours.named_parameters():
        largest = gradients[name].abs().max()
        assert (parameter.grad - gradients[name]).abs().max() <= 1e-4 * largest + rounding, name


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_windowed(tied: bool, window: int | None, attention: str) -> None:
    shape = dataclasses.replace(SHAPE, tied_embeddings=tied, sliding_window=window)
    assert_equal_to_huggingface(shape, attention)


@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
def test_choices_per_token(top_k: int) -> None:
    assert_equal_to_huggingface(dataclasses.replace(SHAPE, top_k=top_k))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
def test_query_groups(num_kv_heads: int) -> None:
    assert_equal_to_huggingface(dataclasses.replace(SHAPE, num_kv_heads=num_kv_heads))


def test_the_debug_preset() -> None:
    assert_equal_to_huggingface(preset("debug"))
