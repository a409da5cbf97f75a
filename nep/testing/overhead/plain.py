"""The peer: expert parallelism as torch alone gives it, with the same model, kernels and optimizer.

Dense parameters under DistributedDataParallel, whole experts on one rank each with an all-to-all around them, AdamW in
full on every rank that has a parameter. Nothing survives a failure.

Shapes: t tokens, k experts per token, a assignments (pairs of token and expert), r received, d hidden size.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nep.moe.dispatcher import Dispatched, Routing
from nep.moe.experts import expert_slices
from nep.parallel.optimizer import OptimizerConfig
from nep.planning.layout import LineKind, Lines
from nep.train.data import SampleSource

_MOMENTS = ("exp_avg", "exp_avg_sq")  # of torch's AdamW


class PlainJob:
    """One rank of the peer.

    Args:
        model: single-device, on the meta device.
        lines: its parameters.
        initial: (name, lo, hi) -> initial units in float64.
        dtype: of the parameters.
        data: samples.
        optimizer: hyperparameters of AdamW; the schedule's steps are counted from the first call.
        total_steps: where the schedule ends.
        global_batch_size: sequences of a step over all ranks, which must divide it.
        micro_batch_size: sequences that a rank runs at a time.

    Raises:
        ValueError: experts or sequences do not divide over the ranks: plain expert parallelism needs that.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lines: Lines,
        initial: Callable[[str, int, int], Tensor],
        dtype: torch.dtype,
        data: SampleSource,
        optimizer: OptimizerConfig,
        total_steps: int,
        global_batch_size: int,
        micro_batch_size: int,
    ) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        if global_batch_size % size:
            raise ValueError(f"global_batch_size ({global_batch_size}) must be a multiple of {size} ranks")
        self._data, self._config, self._total_steps = data, optimizer, total_steps
        self._batch, self._micro = global_batch_size, micro_batch_size
        self._expert_names = {name for name, line in lines.items() if line.kind is LineKind.EXPERTS}
        _give_parameters(model, lines, initial, dtype, rank, size)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(self._expert_names))
        # Gradients live in DDP's buckets: without the view each would be copied once more.
        self._model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._experts = [p for name, p in model.named_parameters() if name in self._expert_names]
        self._dense = [p for name, p in model.named_parameters() if name not in self._expert_names]
        groups = [
            {
                "params": [p for name, p in model.named_parameters() if lines[name].weight_decay == decayed],
                "weight_decay": optimizer.weight_decay if decayed else 0.0,
            }
            for decayed in (True, False)
        ]
        betas = (optimizer.beta1, optimizer.beta2)
        self._optimizer = torch.optim.AdamW(groups, lr=optimizer.lr, betas=betas, eps=optimizer.eps, fused=True)
        self._step = 0

    def step(self) -> float:
        """One training step; every rank calls it. Returns the mean loss per token over all ranks."""
        size = dist.get_world_size()
        own = self._batch // size
        first = self._step * self._batch + dist.get_rank() * own
        self._step += 1
        self._optimizer.zero_grad(set_to_none=False)
        num_tokens = self._batch * self._data.seq_len
        loss_sum = torch.zeros((), dtype=torch.float64)
        for done in range(0, own, self._micro):
            count = min(self._micro, own - done)
            tokens, targets = (torch.from_numpy(array) for array in self._data.train_batch(first + done, count))
            last = done + count == own
            with contextlib.nullcontext() if last else self._model.no_sync():
                loss = self._model(tokens, targets).loss.total
                # DDP takes the mean over ranks.
                (loss * (size / num_tokens)).backward()
            loss_sum += loss.detach().double()
        for parameter in self._experts:
            assert parameter.grad is not None
            parameter.grad.mul_(1 / size)
        self._clip()
        lr = self._config.learning_rate(self._step, self._total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        dist.all_reduce(loss_sum)
        return float(loss_sum) / num_tokens

    @property
    def steps_done(self) -> int:
        """Steps since the first sample, those before a checkpoint included."""
        return self._step

    def state(self, *, with_shared: bool) -> dict[str, Tensor]:
        """Parameters and moments, for a checkpoint.

        Args:
            with_shared: also those that every rank has; else this rank's experts only.
        """
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters().items():
            if with_shared or name in self._expert_names:
                found[name] = parameter.detach()
                moments = self._optimizer.state[parameter]
                found.update({f"{name}/{kind}": moments[kind] for kind in _MOMENTS})
        return found

    def load_state(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Go on after `step` from what `state` gave: this rank's experts, and what all share."""
        for name, parameter in self._parameters().items():
            parameter.data.copy_(tensors[name])
            moments = {kind: tensors[f"{name}/{kind}"].clone() for kind in _MOMENTS}
            self._optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
        self._step = step

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.module.named_parameters())

    def _clip(self) -> None:
        """By the global norm: dense gradients are the same on all ranks, experts' are not."""
        norm2 = _norm2(self._experts)
        dist.all_reduce(norm2)
        norm = math.sqrt(float(norm2 + _norm2(self._dense)))
        scale = min(1.0, self._config.clip_norm / (norm + 1e-6))
        torch._foreach_mul_([p.grad for p in (*self._experts, *self._dense) if p.grad is not None], scale)


def _norm2(parameters: list[nn.Parameter]) -> Tensor:
    norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
    return torch.stack(norms).double().square().sum()


def _give_parameters(
    model: nn.Module,
    lines: Lines,
    initial: Callable[[str, int, int], Tensor],
    dtype: torch.dtype,
    rank: int,
    size: int,
) -> None:
    """Dense parameters whole, and this rank's part of the experts with a dispatcher around them."""
    values: dict[str, Tensor] = {}
    own: dict[str, tuple[int, int]] = {}
    for name, line in lines.items():
        lo, hi = 0, line.num_units
        if line.kind is LineKind.EXPERTS:
            assert line.units_per_expert is not None
            num_experts = line.num_units // line.units_per_expert
            if num_experts % size:
                raise ValueError(f"{num_experts} experts do not divide over {size} ranks; start a number that divides")
            lo, hi = rank * line.num_units // size, (rank + 1) * line.num_units // size
            own[line.axis] = (lo, hi)
        value = initial(name, lo, hi).to(dtype)
        values[name] = value[0] if line.kind is LineKind.WHOLE else value
    for name, line in lines.items():
        if line.kind is not LineKind.EXPERTS:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, nn.Parameter(values[name]))
    for axis, layer in model.moe_layers().items():  # type: ignore[operator]
        w13, w2 = [name for name, line in lines.items() if line.axis == axis]
        units_per_expert = lines[w13].units_per_expert
        assert units_per_expert is not None
        layer.experts.replace(expert_slices([own[axis]], units_per_expert), values[w13], values[w2])
        layer.dispatcher = PlainDispatcher(layer.router.num_experts)


class PlainDispatcher:
    """One row per pair of token and expert, to the rank that has the expert; weighted where they came from."""

    def __init__(self, num_experts: int) -> None:
        self._per_rank = num_experts // dist.get_world_size()

    def dispatch(self, x_td: Tensor, routing: Routing) -> Dispatched:
        """Rows in the order of their ranks."""
        ids_a = routing.expert_ids_tk.flatten()
        order_a = ids_a.argsort(stable=True)
        send = torch.bincount(ids_a // self._per_rank, minlength=dist.get_world_size())
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send)
        splits = (send.tolist(), receive.tolist())
        token_a = order_a // routing.expert_ids_tk.shape[1]
        rows_rd = _AllToAll.apply(x_td[token_a], *splits)
        ids_r = ids_a.new_empty(int(receive.sum()))
        dist.all_to_all_single(ids_r, ids_a[order_a], splits[1], splits[0])
        weights_r1 = torch.ones(len(ids_r), 1, dtype=routing.weights_tk.dtype)
        handle = (splits, token_a, routing.weights_tk.flatten()[order_a], x_td.shape[0])
        return Dispatched(rows_rd=rows_rd, expert_ids_rk=ids_r[:, None], weights_rk=weights_r1, handle=handle)

    def combine(self, dispatched: Dispatched, y_rd: Tensor) -> Tensor:
        """Rows back, weighted and added."""
        (send, receive), token_a, weights_a, num_tokens = dispatched.handle  # type: ignore[misc]
        y_ad = _AllToAll.apply(y_rd, receive, send)
        weighted = y_ad * weights_a[:, None]
        return (
            torch.zeros(num_tokens, y_ad.shape[1], dtype=weighted.dtype).index_add(0, token_a, weighted).to(y_rd.dtype)
        )


class _AllToAll(torch.autograd.Function):
    """Uneven all-to-all of rows; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.splits = (send, receive)
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        send, receive = ctx.splits
        out = grads[0].new_empty(sum(send), *grads[0].shape[1:])
        dist.all_to_all_single(out, grads[0].contiguous(), send, receive)
        return out, None, None
