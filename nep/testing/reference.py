"""The yardstick: a mixture-of-experts decoder trained in one process, in float64, as plainly as it can be written.

It shares no code with what it measures: of the project it imports the names and sizes of the parameters
(nep.planning.shapes), its own decoder (nep.testing.reference_model) and nothing else. Speed does not matter here;
being right does.

Shapes: b sequences, t positions, e experts, l layers with experts, v vocabulary, n = b * t tokens.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nep.planning.shapes import ModelShape, parameter_lines
from nep.testing.reference_model import LayerRouting, reference_logits

__all__ = [
    "ReferenceAux",
    "ReferenceHyper",
    "ReferenceRun",
    "reference_gradients",
    "reference_logits",
    "reference_loss",
    "reference_lr",
    "reference_train",
]

# Integer tokens and next tokens, each [b, t].
Batch = tuple[Tensor | npt.NDArray[np.int64], Tensor | npt.NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class ReferenceAux:
    """Coefficients of what is trained beside the cross-entropy; none of it counts in the reported losses.

    Attributes:
        z_loss: Of the router's squared log-partition, per token.
        logits_z_loss: Of the vocabulary's, per token.
        balance_loss: Of load balancing.
        balance_counts: Whose counts that uses: of each sequence, of the step before, or of the step itself.
        bias_rate: Step size of the biases that experts are chosen with; not a loss.
    """

    z_loss: float = 0.0
    logits_z_loss: float = 0.0
    balance_loss: float = 0.0
    balance_counts: Literal["sequence", "previous", "step"] = "sequence"
    bias_rate: float = 0.0


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
        aux: Auxiliary losses and biases.
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
    aux: ReferenceAux = ReferenceAux()


class ReferenceRun(NamedTuple):
    """What a run left.

    Attributes:
        losses: Mean cross-entropy per token of each step, before its update.
        params: Global name -> parameter after the last step.
        first_gradients: Global name -> gradient of the mean loss in the first step, before clipping.
        biases_le: What experts are chosen with after the last step; zero for a model without.
        counts_le: Tokens per layer and expert of the last step, int64.
    """

    losses: list[float]
    params: dict[str, Tensor]
    first_gradients: dict[str, Tensor]
    biases_le: Tensor
    counts_le: Tensor


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
    biases_le = torch.zeros(shape.num_moe_layers, shape.num_experts, dtype=torch.float64)
    counts_le: Tensor | None = None

    for step in range(1, steps + 1):
        loss, gradients, new_counts_le = _step(shape, values, *batches(step), hyper.aux, biases_le, counts_le)
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
        counts_le = new_counts_le
        if shape.router_bias:
            # Wang et al., arXiv 2408.15664, algorithm 1: up for an expert below the mean, down for one above.
            mean_l1 = counts_le.double().mean(dim=1, keepdim=True)
            biases_le = biases_le + hyper.aux.bias_rate * torch.sign(mean_l1 - counts_le)
    assert counts_le is not None
    return ReferenceRun(losses, values, first_gradients, biases_le, counts_le)


def reference_gradients(
    shape: ModelShape,
    params: Mapping[str, Tensor],
    tokens_bt: Tensor | npt.NDArray[np.int64],
    targets_bt: Tensor | npt.NDArray[np.int64],
    *,
    aux: ReferenceAux | None = None,
    biases_le: Tensor | None = None,
    previous_le: Tensor | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """The mean cross-entropy per token, and the gradient of it and the auxiliary losses by global name (zeros where
    nothing flows).

    Args:
        aux: Auxiliary losses.
        biases_le: See `reference_logits`.
        previous_le: Counts of the step before; None: even ones.
    """
    return _step(shape, params, tokens_bt, targets_bt, aux or ReferenceAux(), biases_le, previous_le)[:2]


def _step(
    shape: ModelShape,
    params: Mapping[str, Tensor],
    tokens_bt: Tensor | npt.NDArray[np.int64],
    targets_bt: Tensor | npt.NDArray[np.int64],
    aux: ReferenceAux,
    biases_le: Tensor | None,
    previous_le: Tensor | None,
) -> tuple[float, dict[str, Tensor], Tensor]:
    """Loss, gradients, and tokens per layer and expert."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    routings: list[LayerRouting] = []
    logits_nv = reference_logits(shape, leaves, torch.as_tensor(tokens_bt), routings, biases_le).flatten(0, 1)
    loss_sum = _cross_entropy(logits_nv, targets_bt)
    total = loss_sum + aux.logits_z_loss * (logits_nv.logsumexp(dim=1) ** 2).sum()
    for index, routing in enumerate(routings):
        previous_e = None if previous_le is None else previous_le[index]
        total = total + _aux_losses(shape, routing, len(tokens_bt), aux, previous_e)
    num_tokens = len(logits_nv)
    found = torch.autograd.grad(total / num_tokens, list(leaves.values()), materialize_grads=True, allow_unused=True)
    counts_le = torch.stack([routing.chosen_ne.sum(dim=0) for routing in routings])
    return float(loss_sum.detach()) / num_tokens, dict(zip(leaves, found, strict=True)), counts_le


def reference_loss(
    shape: ModelShape,
    params: Mapping[str, Tensor],
    tokens_bt: Tensor | npt.NDArray[np.int64],
    targets_bt: Tensor | npt.NDArray[np.int64],
) -> tuple[Tensor, int]:
    """Sum of the tokens' cross-entropies, and how many tokens there are."""
    logits_btv = reference_logits(shape, params, torch.as_tensor(tokens_bt))
    return _cross_entropy(logits_btv.flatten(0, 1), targets_bt), logits_btv.shape[:2].numel()


def _cross_entropy(logits_nv: Tensor, targets_bt: Tensor | npt.NDArray[np.int64]) -> Tensor:
    targets_n = torch.as_tensor(targets_bt).reshape(-1)
    picked_n = logits_nv[torch.arange(len(targets_n)), targets_n]
    return (logits_nv.logsumexp(dim=1) - picked_n).sum()


def _aux_losses(
    shape: ModelShape, routing: LayerRouting, num_sequences: int, aux: ReferenceAux, previous_e: Tensor | None
) -> Tensor:
    """One layer's auxiliary losses, summed over tokens: group by group of tokens and expert by expert."""
    log_partitions_n = torch.log(torch.exp(routing.logits_ne).sum(dim=-1))
    total = aux.z_loss * (log_partitions_n**2).sum()
    num_groups = num_sequences if aux.balance_counts == "sequence" else 1
    groups = zip(routing.shares_ne.chunk(num_groups), routing.chosen_ne.chunk(num_groups), strict=True)
    for shares_te, chosen_te in groups:
        num_tokens = len(shares_te)
        for expert in range(shape.num_experts):
            load = float(chosen_te[:, expert].sum()) / (shape.top_k * num_tokens)
            if aux.balance_counts == "previous":
                load = (
                    1 / shape.num_experts if previous_e is None else float(previous_e[expert]) / float(previous_e.sum())
                )
            total = total + aux.balance_loss * num_tokens * shape.num_experts * load * shares_te[:, expert].mean()
    return total


def reference_lr(step: int, hyper: ReferenceHyper) -> float:
    """The learning rate of a step (from 1): linear warmup, then half a cosine down to `min_lr_ratio`."""
    if step <= hyper.warmup_steps:
        return hyper.lr * step / hyper.warmup_steps
    progress = min(1.0, (step - hyper.warmup_steps) / max(1, hyper.steps - hyper.warmup_steps))
    lowest = hyper.min_lr_ratio * hyper.lr
    return lowest + (hyper.lr - lowest) * (1 + math.cos(math.pi * progress)) / 2


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
