"""The yardstick: a Mixtral-style decoder trained in one process, in float64, as plainly as it can be written.

It shares no code with what it measures: of the project it imports the names and sizes of the parameters
(nep.planning.shapes) and nothing else. Speed does not matter here; being right does.

Shapes: b sequences, t positions, d hidden size, h query heads, g key/value heads, c head dimension,
e experts, f neurons of an expert, v vocabulary, n = b * t tokens.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nep.planning.shapes import ModelShape, parameter_lines

# Integer tokens and next tokens, each [b, t].
Batch = tuple[Tensor | npt.NDArray[np.int64], Tensor | npt.NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class ReferenceHyper:
    """What the optimizer is told.

    Attributes:
        lr: Peak learning rate.
        warmup_steps: Steps of linear rise from 0; 0 for none.
        steps: Where the cosine ends.
        min_lr_ratio: The learning rate at the end over the peak.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled, in units of the learning rate.
        clip_norm: Largest global gradient norm; math.inf for none.
        z_loss: Coefficient of the router's squared log-partition, per token.
        balance_loss: Coefficient of load balancing, per sequence. Neither counts in the reported losses.
    """

    lr: float
    warmup_steps: int
    steps: int
    min_lr_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    z_loss: float = 0.0
    balance_loss: float = 0.0


class ReferenceRun(NamedTuple):
    """What a run left.

    Attributes:
        losses: Mean cross-entropy per token of each step, before its update.
        params: Global name -> parameter after the last step.
        first_gradients: Global name -> gradient of the mean loss in the first step, before clipping.
    """

    losses: list[float]
    params: dict[str, Tensor]
    first_gradients: dict[str, Tensor]


def reference_train(
    shape: ModelShape,
    params: Mapping[str, Tensor],
    batches: Callable[[int], Batch],
    steps: int,
    hyper: ReferenceHyper,
) -> ReferenceRun:
    """Train for some steps.

    Args:
        shape: Sizes of the model.
        params: Global name -> whole parameter, float64; left as they are. A tied head has no entry.
        batches: Step (from 1) -> the tokens and targets of the global batch.
        steps: Steps to make; `hyper.steps` is where the schedule ends.
        hyper: Optimizer and schedule.

    Raises:
        ValueError: A name, shape or dtype is not what `shape` asks for.
    """
    _check(shape, params)
    values = {name: value.detach().clone() for name, value in params.items()}
    first_moments = {name: torch.zeros_like(value) for name, value in values.items()}
    second_moments = {name: torch.zeros_like(value) for name, value in values.items()}
    decayed = {name for name, line in parameter_lines(shape).items() if line.weight_decay}
    losses: list[float] = []
    first_gradients: dict[str, Tensor] = {}

    for step in range(1, steps + 1):
        loss, gradients = reference_gradients(
            shape, values, *batches(step), z_loss=hyper.z_loss, balance_loss=hyper.balance_loss
        )
        losses.append(loss)
        if step == 1:
            first_gradients = gradients
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
        clip = min(1.0, hyper.clip_norm / (norm + 1e-6))
        lr = reference_lr(step, hyper)
        for name, value in values.items():
            gradient = clip * gradients[name]
            first, second = first_moments[name], second_moments[name]
            first.copy_(hyper.beta1 * first + (1 - hyper.beta1) * gradient)
            second.copy_(hyper.beta2 * second + (1 - hyper.beta2) * gradient**2)
            # Adam: Kingma and Ba, arXiv 1412.6980, algorithm 1; the decay apart from it, and first:
            # Loshchilov and Hutter, arXiv 1711.05101, as torch.optim.AdamW has it.
            unbiased_first = first / (1 - hyper.beta1**step)
            unbiased_second = second / (1 - hyper.beta2**step)
            decay = 1 - lr * hyper.weight_decay if name in decayed else 1.0
            value.copy_(decay * value - lr * unbiased_first / (unbiased_second.sqrt() + hyper.eps))
    return ReferenceRun(losses, values, first_gradients)


def reference_gradients(
    shape: ModelShape,
    params: Mapping[str, Tensor],
    tokens_bt: Tensor | npt.NDArray[np.int64],
    targets_bt: Tensor | npt.NDArray[np.int64],
    *,
    z_loss: float = 0.0,
    balance_loss: float = 0.0,
) -> tuple[float, dict[str, Tensor]]:
    """The mean cross-entropy per token, and the gradient of it and the auxiliary losses by global name (zeros where
    nothing flows)."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    scores: list[Tensor] = []
    loss_sum, num_tokens = reference_loss(shape, leaves, tokens_bt, targets_bt, scores)
    loss = loss_sum / num_tokens
    aux = sum(_aux_losses(shape, layer, len(tokens_bt), z_loss, balance_loss) for layer in scores)
    found = torch.autograd.grad(
        loss + aux / num_tokens, list(leaves.values()), materialize_grads=True, allow_unused=True
    )
    return float(loss.detach()), dict(zip(leaves, found, strict=True))


def reference_loss(
    shape: ModelShape,
    params: Mapping[str, Tensor],
    tokens_bt: Tensor | npt.NDArray[np.int64],
    targets_bt: Tensor | npt.NDArray[np.int64],
    router_scores: list[Tensor] | None = None,
) -> tuple[Tensor, int]:
    """Sum of the tokens' cross-entropies, and how many tokens there are; appends each layer's router scores [n, e]."""
    logits_btv = reference_logits(shape, params, torch.as_tensor(tokens_bt), router_scores)
    logits_nv = logits_btv.reshape(-1, shape.vocab_size)
    targets_n = torch.as_tensor(targets_bt).reshape(-1)
    picked_n = logits_nv[torch.arange(len(targets_n)), targets_n]
    return (logits_nv.logsumexp(dim=1) - picked_n).sum(), len(targets_n)


def reference_logits(
    shape: ModelShape,
    params: Mapping[str, Tensor],
    tokens_bt: Tensor,
    router_scores: list[Tensor] | None = None,
) -> Tensor:
    """Logits [b, t, v] of Mixtral (Jiang et al., arXiv 2401.04088) with these parameters."""
    x_btd = params["embedding.weight"][tokens_bt]
    for layer in range(shape.num_layers):
        of_layer = {
            name.removeprefix(f"layers.{layer}."): value
            for name, value in params.items()
            if name.startswith(f"layers.{layer}.")
        }
        x_btd = x_btd + _attention(shape, of_layer, _rms_norm(shape, x_btd, of_layer["attention_norm.weight"]))
        normed_btd = _rms_norm(shape, x_btd, of_layer["moe_norm.weight"])
        if router_scores is not None:
            router_scores.append(_router_scores(shape, of_layer, normed_btd))
        x_btd = x_btd + _experts(shape, of_layer, normed_btd)
    x_btd = _rms_norm(shape, x_btd, params["final_norm.weight"])
    head_vd = params["embedding.weight" if shape.tied_embeddings else "head.weight"]
    return x_btd @ head_vd.T


def reference_lr(step: int, hyper: ReferenceHyper) -> float:
    """The learning rate of a step (from 1): linear warmup, then half a cosine down to `min_lr_ratio`."""
    if step <= hyper.warmup_steps:
        return hyper.lr * step / hyper.warmup_steps
    progress = min(1.0, (step - hyper.warmup_steps) / max(1, hyper.steps - hyper.warmup_steps))
    lowest = hyper.min_lr_ratio * hyper.lr
    return lowest + (hyper.lr - lowest) * (1 + math.cos(math.pi * progress)) / 2


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


def _router_scores(shape: ModelShape, params: Mapping[str, Tensor], x_btd: Tensor) -> Tensor:
    d = shape.hidden_size
    return x_btd.reshape(-1, d) @ params["moe.router.weight"].reshape(shape.num_experts, d).T


def _aux_losses(shape: ModelShape, scores_ne: Tensor, num_sequences: int, z_loss: float, balance_loss: float) -> Tensor:
    """One layer's auxiliary losses, summed over tokens: sequence by sequence and expert by expert."""
    log_partitions_n = torch.log(torch.exp(scores_ne).sum(dim=-1))
    total = z_loss * (log_partitions_n**2).sum()
    for scores_te in scores_ne.chunk(num_sequences):
        num_tokens = len(scores_te)
        probabilities_te = torch.softmax(scores_te, dim=-1)
        chosen_tk = probabilities_te.topk(shape.top_k, dim=-1).indices
        for expert in range(shape.num_experts):
            share = (chosen_tk == expert).sum() / (shape.top_k * num_tokens)
            mean_probability = probabilities_te[:, expert].mean()
            total = total + balance_loss * num_tokens * shape.num_experts * share * mean_probability
    return total


def _experts(shape: ModelShape, params: Mapping[str, Tensor], x_btd: Tensor) -> Tensor:
    """Each token through its top_k experts, weighted by their renormalised softmax."""
    d, f = shape.hidden_size, shape.ffn_hidden_size
    x_nd = x_btd.reshape(-1, d)
    probabilities_ne = torch.softmax(_router_scores(shape, params, x_btd), dim=-1)
    chosen_ne = torch.zeros_like(probabilities_ne, dtype=torch.bool)
    chosen_ne.scatter_(1, probabilities_ne.topk(shape.top_k, dim=-1).indices, True)
    weights_ne = torch.where(chosen_ne, probabilities_ne, 0.0)
    weights_ne = weights_ne / weights_ne.sum(dim=-1, keepdim=True)

    units_per_expert = f // shape.neuron_block
    y_nd = torch.zeros_like(x_nd)
    for expert in range(shape.num_experts):
        units = slice(expert * units_per_expert, (expert + 1) * units_per_expert)
        gate_fd = params["moe.experts.w13"][units, 0].reshape(f, d)
        up_fd = params["moe.experts.w13"][units, 1].reshape(f, d)
        down_fd = params["moe.experts.w2"][units].reshape(f, d)
        token_ids = chosen_ne[:, expert].nonzero().squeeze(1)
        x_of_expert = x_nd[token_ids]
        gate = x_of_expert @ gate_fd.T
        hidden = gate * torch.sigmoid(gate) * (x_of_expert @ up_fd.T)
        y_nd = y_nd.index_add(0, token_ids, weights_ne[token_ids, expert, None] * (hidden @ down_fd))
    return y_nd.reshape(x_btd.shape)


def _check(shape: ModelShape, params: Mapping[str, Tensor]) -> None:
    lines = parameter_lines(shape)
    if set(params) != set(lines):
        raise ValueError(f"params differ from the model's in {sorted(set(params) ^ set(lines))}; pass all, once")
    for name, line in lines.items():
        value = params[name]
        # A whole tensor may come with or without its axis of one unit.
        if tuple(value.shape) not in (line.shape, line.unit_shape if line.num_units == 1 else line.shape):
            raise ValueError(f"{name} {tuple(value.shape)} must be {line.shape}; pass the whole parameter")
        if value.dtype != torch.float64:
            raise ValueError(f"{name} ({value.dtype}) must be float64; convert it before")
