"""A lane of several slots: attention heads and vocabulary rows cut over them, unevenly if need be.

Each collective is called by all slots of the lane, in the order of the model's forward and backward. All-to-all
carries them: with it uneven parts are natural, and sums are added in slot order, so their bits do not depend on
who comes first.

Shapes: t tokens of the lane, s tokens of this slot, d hidden size, n slots of the lane, v local vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from nep.distributed.groups import Communicator
from nep.distributed.waiting import Waiter
from nep.moe.loss import TokenLoss
from nep.planning.layout import Interval


def token_splits(num_tokens: int, num_slots: int) -> list[int]:
    """Tokens of each slot of a lane: contiguous parts that differ by one at most."""
    size, rest = divmod(num_tokens, num_slots)
    return [size + (rank < rest) for rank in range(num_slots)]


class SlotLane:
    """The collectives of one lane; see `nep.moe.lane.Lane`.

    Args:
        communicator: the slots of the lane, used for nothing else.
        waiter: how to wait.
    """

    def __init__(self, communicator: Communicator, waiter: Waiter):
        self._communicator = communicator
        self._waiter = waiter

    def gather(self, x_sd: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """All tokens of the lane; the slots' parts are those of `token_splits`."""
        return _Gather.apply(x_sd, self, token_splits(num_tokens, self._communicator.size))

    def reduce_scatter(self, partial_td: torch.Tensor) -> torch.Tensor:
        """This slot's own tokens, the parts added in slot order."""
        return _ReduceScatter.apply(partial_td, self, token_splits(len(partial_td), self._communicator.size))

    def own(self, values_t: torch.Tensor) -> torch.Tensor:
        """This slot's part of `values_t`."""
        return values_t.split(token_splits(len(values_t), self._communicator.size))[self._communicator.rank]

    def sum(self, counts: torch.Tensor) -> torch.Tensor:
        """Integers added over the slots of the lane."""
        return self.gather_rows(counts).sum(0)

    def gather_rows(self, rows_td: torch.Tensor) -> torch.Tensor:
        """What every slot has for all tokens: [n, t, ...]; not differentiable."""
        size = self._communicator.size
        flat = rows_td.contiguous().view(-1)
        output = torch.empty(size * flat.numel(), dtype=flat.dtype, device=flat.device)
        self._waiter.wait(self._communicator.all_gather(output, flat), "the lane's scores")
        return output.view(size, *rows_td.shape)

    def _all_gather(self, x_sd: torch.Tensor, splits: list[int]) -> torch.Tensor:
        size = self._communicator.size
        copies = x_sd.contiguous().repeat(size, *[1] * (x_sd.dim() - 1))
        output = x_sd.new_empty(sum(splits), *x_sd.shape[1:])
        pending = self._communicator.all_to_all(output, copies, splits, [len(x_sd)] * size)
        self._waiter.wait(pending, "the lane's tokens")
        return output

    def _sum_own(self, partial_td: torch.Tensor, splits: list[int]) -> torch.Tensor:
        communicator = self._communicator
        mine = splits[communicator.rank]
        parts = partial_td.new_empty(communicator.size * mine, *partial_td.shape[1:])
        pending = communicator.all_to_all(parts, partial_td.contiguous(), [mine] * communicator.size, splits)
        self._waiter.wait(pending, "the lane's partial sums")
        wide = torch.promote_types(partial_td.dtype, torch.float32)
        return parts.view(communicator.size, mine, *partial_td.shape[1:]).sum(0, dtype=wide).to(partial_td.dtype)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_sd: torch.Tensor, lane: SlotLane, splits: list[int]) -> torch.Tensor:
        ctx.lane, ctx.splits = lane, splits
        return lane._all_gather(x_sd, splits)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.lane._sum_own(grads[0], ctx.splits), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_td: torch.Tensor, lane: SlotLane, splits: list[int]) -> torch.Tensor:
        ctx.lane, ctx.splits = lane, splits
        return lane._sum_own(partial_td, splits)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.lane._all_gather(grads[0], ctx.splits), None, None


def local_rows(intervals: Sequence[Interval], vocab_size: int) -> torch.Tensor:
    """Where a slot keeps each vocabulary row: int64 [vocab_size], -1 for rows that it does not hold."""
    rows_v = torch.full((vocab_size,), -1)
    offset = 0
    for lo, hi in intervals:
        rows_v[lo:hi] = torch.arange(offset, offset + hi - lo)
        offset += hi - lo
    return rows_v


class VocabularyParallelLoss:
    """Cross-entropy with the vocabulary cut over a lane: each slot scores all tokens against its rows.

    Three numbers per token and slot travel (maximum, sum of exponentials, score of the target), in at least
    float32, and are combined in slot order.

    Args:
        lane: the slots.
        rows_v: see `local_rows`.
    """

    def __init__(self, lane: SlotLane, rows_v: torch.Tensor):
        self._lane = lane
        self._rows_v = rows_v

    def __call__(
        self, x_sd: torch.Tensor, weight_vd: torch.Tensor, targets_t: torch.Tensor, z_loss: float = 0.0
    ) -> TokenLoss:
        """See `nep.moe.loss.Criterion`."""
        logits_tv = F.linear(self._lane.gather(x_sd, targets_t.numel()), weight_vd)
        loss_t, log_sum_t = _CutCrossEntropy.apply(logits_tv, self._rows_v[targets_t], self._lane)
        total = loss_t.sum() + z_loss * log_sum_t.square().sum() if z_loss else loss_t.sum()
        own_s = self._lane.own(loss_t.detach())
        return TokenLoss(total, own_s.sum(), own_s.numel())


class _CutCrossEntropy(torch.autograd.Function):
    """Loss and log-partition of every token of the lane; the gradient is that of the local rows' scores."""

    @staticmethod
    def forward(
        ctx: Any, logits_tv: torch.Tensor, target_rows_t: torch.Tensor, lane: SlotLane
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(logits_tv.dtype, torch.float32)
        scores_tv = logits_tv.to(wide)
        here_t = target_rows_t >= 0
        minus_infinity = torch.full((len(scores_tv),), -torch.inf, dtype=wide, device=scores_tv.device)
        highest_t = scores_tv.max(1).values if scores_tv.shape[1] else minus_infinity
        exponentials_t = torch.exp(scores_tv - highest_t[:, None]).sum(1)
        targets_t = torch.zeros_like(highest_t)
        targets_t[here_t] = scores_tv[here_t, target_rows_t[here_t]]
        highest_nt, exponentials_nt, targets_nt = lane.gather_rows(
            torch.stack((highest_t, exponentials_t, targets_t))
        ).unbind(1)
        top_t = highest_nt.max(0).values
        log_sum_t = top_t + (exponentials_nt * torch.exp(highest_nt - top_t)).sum(0).log()
        ctx.save_for_backward(logits_tv, target_rows_t, log_sum_t)
        return log_sum_t - targets_nt.sum(0), log_sum_t

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_tv, target_rows_t, log_sum_t = ctx.saved_tensors
        grad_loss_t, grad_log_sum_t = grads
        probabilities_tv = torch.exp(logits_tv.to(log_sum_t.dtype) - log_sum_t[:, None])
        grad_logits_tv = probabilities_tv.mul_((grad_loss_t + grad_log_sum_t)[:, None])
        here_t = (target_rows_t >= 0).nonzero()[:, 0]
        grad_logits_tv[here_t, target_rows_t[here_t]] -= grad_loss_t[here_t]
        return grad_logits_tv.to(logits_tv.dtype), None, None
