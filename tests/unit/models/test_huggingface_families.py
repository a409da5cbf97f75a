"""The same weights give the same logits and gradients as transformers' Qwen2-MoE and GLM-4-MoE.

Qwen's has a gated shared expert and weights that need not sum to one; GLM's routes as DeepSeek-V3 does (sigmoid, bias,
scaling, a dense first layer, ungated shared experts), with ordinary attention.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from models.mixtral import MixtralModel
from nep.planning.shapes import ModelShape, preset

SHAPE = dataclasses.replace(
    preset("debug"), hidden_size=48, ffn_hidden_size=40, neuron_block=8, num_heads=6, num_kv_heads=2, head_dim=8,
    vocab_size=101, rope_theta=1e3, num_experts=6, top_k=3, num_layers=3,
)  # fmt: skip
QWEN = dataclasses.replace(SHAPE, num_shared_experts=1, shared_ffn_hidden_size=56, shared_gate=True, norm_topk=False)
GLM = dataclasses.replace(
    SHAPE, num_shared_experts=2, shared_ffn_hidden_size=40, num_dense_layers=1, dense_ffn_hidden_size=72,
    router_scores="sigmoid", router_bias=True, routed_scaling=2.5,
)  # fmt: skip


def common(shape: ModelShape) -> dict:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.max_seq_len,
        "rms_norm_eps": shape.norm_eps,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": shape.norm_topk,
        "moe_intermediate_size": shape.ffn_hidden_size,
        "attn_implementation": "eager",
        "dtype": torch.float32,
    }


def qwen_of(shape: ModelShape) -> nn.Module:
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **common(shape),
            num_experts=shape.num_experts,
            shared_expert_intermediate_size=shape.shared_ffn_hidden_size,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            qkv_bias=False,
        )
    )


def glm_of(shape: ModelShape) -> nn.Module:
    return Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **common(shape),
            head_dim=shape.head_dim,
            intermediate_size=shape.dense_ffn_hidden_size,
            n_routed_experts=shape.num_experts,
            n_shared_experts=shape.num_shared_experts,
            first_k_dense_replace=shape.num_dense_layers,
            routed_scaling_factor=shape.routed_scaling,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": shape.rope_theta,
                "partial_rotary_factor": 1.0,
            },
        )
    )


def randomise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            norm = parameter.ndim == 1
            parameter.normal_(mean=1.0 if norm else 0.0, std=0.2, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1, generator=generator)


def named_as_here(there: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Parameters, gradients or biases of the other model, by the names here."""
    d, here = shape.hidden_size, {}
    names = {
        "model.embed_tokens.weight": "embedding.weight",
        "model.norm.weight": "final_norm.weight",
        "lm_head.weight": "head.weight",
    }
    here |= {names[name]: tensor for name, tensor in there.items() if name in names}
    for layer in range(shape.num_layers):
        prefix, ours = f"model.layers.{layer}.", f"layers.{layer}."
        part = {name.removeprefix(prefix): value for name, value in there.items() if name.startswith(prefix)}
        here[f"{ours}attention_norm.weight"] = part["input_layernorm.weight"]
        for name in "qkv":
            here[f"{ours}attention.w{name}"] = part[f"self_attn.{name}_proj.weight"].view(-1, shape.head_dim, d)
        here[f"{ours}attention.wo"] = part["self_attn.o_proj.weight"].T.reshape(-1, shape.head_dim, d)
        if layer < shape.num_dense_layers:
            here[f"{ours}ffn_norm.weight"] = part["post_attention_layernorm.weight"]
            here |= feed_forward(part, "mlp.", f"{ours}ffn.")
            continue
        here[f"{ours}moe_norm.weight"] = part["post_attention_layernorm.weight"]
        here[f"{ours}moe.router.weight"] = part["mlp.gate.weight"]
        sizes = shape.num_experts, 2, shape.units_per_expert, shape.neuron_block, d
        units = shape.num_experts * shape.units_per_expert
        w13 = part["mlp.experts.gate_up_proj"].view(sizes).transpose(1, 2)
        here[f"{ours}moe.experts.w13"] = w13.reshape(units, 2, shape.neuron_block, d)
        w2 = part["mlp.experts.down_proj"].transpose(1, 2)
        here[f"{ours}moe.experts.w2"] = w2.reshape(units, shape.neuron_block, d)
        shared = "mlp.shared_expert." if shape.shared_gate else "mlp.shared_experts."
        here |= feed_forward(part, shared, f"{ours}moe.shared.")
        if shape.shared_gate:
            here[f"{ours}moe.shared.gate"] = part["mlp.shared_expert_gate.weight"][0]
    return here


def feed_forward(part: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    gate, up, down = (part[f"{theirs}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return {f"{ours}w13": torch.stack((gate, up), dim=1), f"{ours}w2": down.T}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (qwen_of, QWEN),
        (qwen_of, dataclasses.replace(QWEN, norm_topk=True, top_k=1)),
        (glm_of, GLM),
        (glm_of, dataclasses.replace(GLM, norm_topk=False, num_dense_layers=2)),
    ],
)
def test_logits_counts_and_gradients(make, shape: ModelShape, recompute: bool) -> None:
    theirs = make(shape)
    randomise(theirs)
    ours = MixtralModel(shape, dtype=torch.float32, device="cpu")
    weights = named_as_here({name: value.detach() for name, value in theirs.named_parameters()}, shape)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights.pop(name))
    assert not weights
    biases = [value for name, value in theirs.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(biases) == (shape.num_moe_layers if shape.router_bias else 0)
    for layer, bias_e in zip(ours.moe_layers().values(), biases, strict=False):
        layer.router.bias = bias_e.clone()
    if recompute:
        ours.use_recompute()

    tokens = torch.randint(0, shape.vocab_size, (3, 20), generator=torch.Generator().manual_seed(4))
    expected, found = theirs(tokens).logits, ours(tokens).logits_btv
    largest = expected.abs().max()
    assert largest > 1
    assert (found - expected).abs().max() <= 1e-4 * largest

    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
    expected.backward(grad)
    found.backward(grad)
    gradients = named_as_here({name: value.grad for name, value in theirs.named_parameters()}, shape)
    rounding = 1e-6 * max(gradient.abs().max() for gradient in gradients.values())
    for name, parameter in ours.named_parameters():
        largest = gradients[name].abs().max()
        assert (parameter.grad - gradients[name]).abs().max() <= 2e-4 * largest + rounding, name
