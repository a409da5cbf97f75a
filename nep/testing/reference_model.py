"""The decoder of the yardstick, as plainly as it can be written: one token stream, one expert after the other.

It shares no code with what it measures: of the project it imports the sizes of models and nothing else.

Shapes: b sequences, t positions, d hidden size, h query heads, g key/value heads, c head dimension,
e experts, f neurons of an expert, v vocabulary, n = b * t tokens.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nep.planning.shapes import ModelShape


class LayerRouting(NamedTuple):
    """What the router of one layer made of all tokens.

    Attributes:
        logits_ne: Before softmax or sigmoid.
        shares_ne: The scores, made to sum to one.
        chosen_ne: Whether the token visits the expert.
        weights_ne: Of the expert's output; zero where it is not visited.
    """

    logits_ne: Tensor
    shares_ne: Tensor
    chosen_ne: Tensor
    weights_ne: Tensor


def reference_logits(
    shape: ModelShape,
    params: Mapping[str, Tensor],
    tokens_bt: Tensor,
    routings: list[LayerRouting] | None = None,
    biases_le: Tensor | None = None,
) -> Tensor:
    """Logits [b, t, v] of Mixtral (Jiang et al., arXiv 2401.04088) or a model with DeepSeek's or Qwen's parts.

    Args:
        shape: Sizes of the model.
        params: Global name -> whole parameter.
        tokens_bt: Tokens.
        routings: Each layer with experts appends what its router did.
        biases_le: Added to the scores when experts are chosen, one row for each layer with experts.
    """
    x_btd = params["embedding.weight"][tokens_bt]
    for layer in range(shape.num_layers):
        of_layer = {
            name.removeprefix(f"layers.{layer}."): value
            for name, value in params.items()
            if name.startswith(f"layers.{layer}.")
        }
        x_btd = x_btd + _attention(shape, of_layer, _rms_norm(shape, x_btd, of_layer["attention_norm.weight"]))
        if layer < shape.num_dense_layers:
            normed_btd = _rms_norm(shape, x_btd, of_layer["ffn_norm.weight"])
            x_btd = x_btd + _swiglu(normed_btd, of_layer["ffn.w13"], of_layer["ffn.w2"])
            continue
        normed_btd = _rms_norm(shape, x_btd, of_layer["moe_norm.weight"])
        bias_e = None if biases_le is None else biases_le[layer - shape.num_dense_layers]
        routing = _route(shape, of_layer["moe.router.weight"], normed_btd, bias_e)
        if routings is not None:
            routings.append(routing)
        y_btd = _experts(shape, of_layer, normed_btd, routing.weights_ne)
        if shape.num_shared_experts:
            y_btd = y_btd + _shared_experts(shape, of_layer, normed_btd)
        x_btd = x_btd + y_btd
    x_btd = _rms_norm(shape, x_btd, params["final_norm.weight"])
    head_vd = params["embedding.weight" if shape.tied_embeddings else "head.weight"]
    return x_btd @ head_vd.T


def _rms_norm(shape: ModelShape, x_btd: Tensor, weight: Tensor) -> Tensor:
    mean_square_bt1 = (x_btd**2).mean(dim=-1, keepdim=True)
    return x_btd / torch.sqrt(mean_square_bt1 + shape.norm_eps) * weight.reshape(-1)


def _attention(shape: ModelShape, params: Mapping[str, Tensor], x_btd: Tensor) -> Tensor:
    """Causal grouped-query attention, one query head after the other."""
    num_positions = x_btd.shape[1]
    query_t1, key_1t = torch.arange(num_positions)[:, None], torch.arange(num_positions)[None, :]
    visible_tt = key_1t <= query_t1
    if shape.sliding_window is not None:
        visible_tt = visible_tt & (key_1t > query_t1 - shape.sliding_window)
    wq_hcd, wk_gcd = params["attention.wq"], params["attention.wk"]
    wv_gcd, wo_hcd = params["attention.wv"], params["attention.wo"]
    y_btd = torch.zeros_like(x_btd)
    for head in range(shape.num_heads):
        kv_head = head // (shape.num_heads // shape.num_kv_heads)
        q_btc = _rotate(shape, x_btd @ wq_hcd[head].T)
        k_btc = _rotate(shape, x_btd @ wk_gcd[kv_head].T)
        v_btc = x_btd @ wv_gcd[kv_head].T
        scores_btt = q_btc @ k_btc.transpose(1, 2) / math.sqrt(shape.head_dim)
        scores_btt = scores_btt.masked_fill(~visible_tt, -math.inf)
        weights_btt = torch.exp(scores_btt - scores_btt.amax(dim=-1, keepdim=True))
        weights_btt = weights_btt / weights_btt.sum(dim=-1, keepdim=True)
        y_btd = y_btd + weights_btt @ v_btc @ wo_hcd[head]
    return y_btd


def _rotate(shape: ModelShape, x_btc: Tensor) -> Tensor:
    """Rotary embedding (Su et al., arXiv 2104.09864) of pairs (i, i + c/2), as Mixtral's weights expect."""
    half = shape.head_dim // 2
    frequencies = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles_tc = torch.arange(x_btc.shape[1], dtype=torch.float64)[:, None] * frequencies
    cos, sin = torch.cos(angles_tc), torch.sin(angles_tc)
    left, right = x_btc[..., :half], x_btc[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def _route(shape: ModelShape, weight: Tensor, x_btd: Tensor, bias_e: Tensor | None) -> LayerRouting:
    """Softmax (Mixtral) or sigmoid scores (DeepSeek-V3, arXiv 2412.19437, equations 12 to 16, 19 and 20)."""
    d = shape.hidden_size
    logits_ne = x_btd.reshape(-1, d) @ weight.reshape(shape.num_experts, d).T
    if shape.router_scores == "softmax":
        exponentials_ne = torch.exp(logits_ne - logits_ne.amax(dim=-1, keepdim=True))
        scores_ne = exponentials_ne / exponentials_ne.sum(dim=-1, keepdim=True)
    else:
        scores_ne = 1 / (1 + torch.exp(-logits_ne))
    preferences_ne = scores_ne.detach().clone()
    if shape.router_bias and bias_e is not None:
        preferences_ne += bias_e
    chosen_ne = torch.zeros_like(preferences_ne, dtype=torch.bool)
    chosen_ne.scatter_(1, preferences_ne.topk(shape.top_k, dim=-1).indices, True)
    weights_ne = torch.where(chosen_ne, scores_ne, 0.0)
    if shape.norm_topk:
        weights_ne = weights_ne / weights_ne.sum(dim=-1, keepdim=True)
    shares_ne = scores_ne / scores_ne.sum(dim=-1, keepdim=True)
    return LayerRouting(logits_ne, shares_ne, chosen_ne, shape.routed_scaling * weights_ne)


def _experts(shape: ModelShape, params: Mapping[str, Tensor], x_btd: Tensor, weights_ne: Tensor) -> Tensor:
    """Each token through the experts that it visits."""
    d, f = shape.hidden_size, shape.ffn_hidden_size
    x_nd = x_btd.reshape(-1, d)
    units_per_expert = f // shape.neuron_block
    y_nd = torch.zeros_like(x_nd)
    for expert in range(shape.num_experts):
        units = slice(expert * units_per_expert, (expert + 1) * units_per_expert)
        gate_fd = params["moe.experts.w13"][units, 0].reshape(f, d)
        up_fd = params["moe.experts.w13"][units, 1].reshape(f, d)
        down_fd = params["moe.experts.w2"][units].reshape(f, d)
        token_ids = weights_ne[:, expert].nonzero().squeeze(1)
        y_of_expert = _swiglu(x_nd[token_ids], torch.stack([gate_fd, up_fd], dim=1), down_fd)
        y_nd = y_nd.index_add(0, token_ids, weights_ne[token_ids, expert, None] * y_of_expert)
    return y_nd.reshape(x_btd.shape)


def _shared_experts(shape: ModelShape, params: Mapping[str, Tensor], x_btd: Tensor) -> Tensor:
    """One shared expert after the other; Qwen1.5-MoE scales their sum by a sigmoid."""
    size = shape.shared_ffn_hidden_size
    y_btd = torch.zeros_like(x_btd)
    for index in range(shape.num_shared_experts):
        neurons = slice(index * size, (index + 1) * size)
        y_btd = y_btd + _swiglu(x_btd, params["moe.shared.w13"][neurons], params["moe.shared.w2"][neurons])
    if shape.shared_gate:
        score_bt1 = (x_btd * params["moe.shared.gate"].reshape(-1)).sum(dim=-1, keepdim=True)
        y_btd = y_btd / (1 + torch.exp(-score_bt1))
    return y_btd


def _swiglu(x: Tensor, w13_f2d: Tensor, w2_fd: Tensor) -> Tensor:
    gate = x @ w13_f2d[:, 0].T
    return (gate * torch.sigmoid(gate) * (x @ w13_f2d[:, 1].T)) @ w2_fd
