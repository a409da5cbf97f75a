"""Token dispatch over the slots of a replica: each token once per destination slot.

Tensor shapes: t tokens of this slot, k experts per token, d hidden size, n slots of the group,
s rows sent (pairs of token and destination), r rows received.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nep.distributed.collectives import all_gather
from nep.distributed.groups import Communicator
from nep.distributed.waiting import Waiter
from nep.moe.dispatcher import Dispatched, Routing
from nep.moe.permutation import num_tokens_per_expert
from nep.parallel.copies import CopyChooser, held_units
from nep.parallel.holding import CPU
from nep.planning.layout import Interval

Probe = Callable[[str], None]


@dataclass(frozen=True)
class _Handle:
    """What `combine` needs to send rows back: tokens of the sent rows and the splits of both directions."""

    token_of_row_s: torch.Tensor
    send_counts: list[int]
    receive_counts: list[int]
    num_tokens: int


class AllToAllDispatcher:
    """Uneven all-to-all in one dispatch group; the members make the same calls in the same order.

    Args:
        communicator: the slots of the replica.
        waiter: how to wait.
        cuts: the intervals of each slot on the layer's expert line.
        units_per_expert: units of one expert on the line.
        num_experts: of the layer.
        speeds_ppm: relative speed of each slot: how copies of an expert share its tokens.
        probe: called with "dispatch" while a message is on its way (failure injection).
        device: of the tokens.
    """

    def __init__(
        self,
        communicator: Communicator,
        waiter: Waiter,
        *,
        cuts: Mapping[int, Sequence[Interval]],
        units_per_expert: int,
        num_experts: int,
        speeds_ppm: Mapping[int, int],
        probe: Probe,
        device: torch.device = CPU,
    ):
        self._wire = _Wire(communicator, waiter, probe)
        units_en = held_units(cuts, communicator.slots, units_per_expert, num_experts)
        self._holds_en = torch.from_numpy(units_en > 0).to(device)
        speeds = [speeds_ppm[slot] for slot in communicator.slots]
        copies = CopyChooser(units_en, units_per_expert, speeds)
        self._copies = copies if copies.any else None

    def dispatch(self, x_td: torch.Tensor, routing: Routing) -> Dispatched:
        """Send each token, with its expert ids and weights, to every slot that computes a slice of its experts."""
        ids_tk = routing.expert_ids_tk
        wanted_tkn = self._holds_en[ids_tk]
        if self._copies is not None:
            counts_ne = self._wire.gather(num_tokens_per_expert(ids_tk, len(self._holds_en)))
            self._copies.narrow(wanted_tkn, ids_tk, counts_ne, self._wire.rank)
        destination_s, token_of_row_s = wanted_tkn.any(1).T.nonzero(as_tuple=True)
        send_counts = torch.bincount(destination_s, minlength=wanted_tkn.shape[2])
        receive_counts = self._wire.counts(send_counts)
        handle = _Handle(token_of_row_s, send_counts.tolist(), receive_counts, x_td.shape[0])
        ids_sk = ids_tk[token_of_row_s]
        if self._copies is not None:
            # Another copy computes the rest.
            ids_sk = ids_sk.masked_fill(~wanted_tkn[token_of_row_s, :, destination_s], -1)
        rows_rd, weights_rk, ids_rk = _SendRows.apply(x_td, routing.weights_tk, ids_sk, handle, self._wire)
        return Dispatched(rows_rd=rows_rd, expert_ids_rk=ids_rk, weights_rk=weights_rk, handle=handle)

    def combine(self, dispatched: Dispatched, y_rd: torch.Tensor) -> torch.Tensor:
        """Send each row's sum back to its token, which adds what its destinations return."""
        return _ReturnRows.apply(y_rd, dispatched.handle, self._wire)


class _Wire:
    """All-to-all of tensors that share their first dimension, as one message of bytes."""

    def __init__(self, communicator: Communicator, waiter: Waiter, probe: Probe):
        self._communicator = communicator
        self._waiter = waiter
        self._probe = probe

    @property
    def rank(self) -> int:
        return self._communicator.rank

    def gather(self, counts_e: torch.Tensor) -> torch.Tensor:
        """Everybody's counts, [n, e]."""
        return torch.stack(all_gather(self._communicator, counts_e, self._waiter, "the expert counts of a dispatch"))

    def counts(self, send_counts: torch.Tensor) -> list[int]:
        received = torch.empty_like(send_counts)
        ones = [1] * self._communicator.size
        self._waiter.wait(
            self._communicator.all_to_all(received, send_counts, ones, ones), "the token counts of a dispatch"
        )
        counts: list[int] = received.tolist()
        return counts

    def exchange(
        self, tensors: list[torch.Tensor], send_counts: list[int], receive_counts: list[int], what: str
    ) -> list[torch.Tensor]:
        """Rows of `tensors` [s, ...] to their destinations; returns the rows [r, ...] that came."""
        widths = [_row_bytes(t) for t in tensors]
        outgoing = torch.cat([_as_bytes(t) for t in tensors], dim=1)
        incoming = torch.empty(sum(receive_counts), sum(widths), dtype=torch.uint8, device=outgoing.device)
        pending = self._communicator.all_to_all(incoming, outgoing, receive_counts, send_counts)
        self._probe("dispatch")
        self._waiter.wait(pending, what)
        parts = incoming.split(widths, dim=1)
        return [
            part.contiguous().view(-1).view(t.dtype).view(len(incoming), *t.shape[1:])
            for part, t in zip(parts, tensors, strict=True)
        ]


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8).view(len(tensor), _row_bytes(tensor))


class _SendRows(torch.autograd.Function):
    """Rows, weights and expert ids to the destinations; backward sums their gradients over destinations."""

    @staticmethod
    def forward(
        ctx: Any,
        x_td: torch.Tensor,
        weights_tk: torch.Tensor,
        ids_sk: torch.Tensor,
        handle: _Handle,
        wire: _Wire,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.handle, ctx.wire = handle, wire
        index = handle.token_of_row_s
        rows_rd, weights_rk, ids_rk = wire.exchange(
            [x_td[index], weights_tk[index], ids_sk.to(torch.int32)],
            handle.send_counts,
            handle.receive_counts,
            "dispatched tokens",
        )
        ids_rk = ids_rk.long()
        ctx.mark_non_differentiable(ids_rk)
        return rows_rd, weights_rk, ids_rk

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        handle = ctx.handle
        grad_rows_sd, grad_weights_sk = ctx.wire.exchange(
            [grads[0], grads[1]], handle.receive_counts, handle.send_counts, "gradients of dispatched tokens"
        )
        return (
            _sum_to_tokens(grad_rows_sd, handle),
            _sum_to_tokens(grad_weights_sk, handle),
            None,
            None,
            None,
        )


class _ReturnRows(torch.autograd.Function):
    """One row per token and destination back to the token's slot, summed there in at least float32."""

    @staticmethod
    def forward(ctx: Any, y_rd: torch.Tensor, handle: _Handle, wire: _Wire) -> torch.Tensor:
        ctx.handle, ctx.wire = handle, wire
        (y_sd,) = wire.exchange([y_rd], handle.receive_counts, handle.send_counts, "combined tokens")
        return _sum_to_tokens(y_sd, handle)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        handle = ctx.handle
        (grad_y_rd,) = ctx.wire.exchange(
            [grads[0][handle.token_of_row_s]],
            handle.send_counts,
            handle.receive_counts,
            "gradients of combined tokens",
        )
        return grad_y_rd, None, None


def _sum_to_tokens(rows_s: torch.Tensor, handle: _Handle) -> torch.Tensor:
    wide = torch.promote_types(rows_s.dtype, torch.float32)
    total = torch.zeros(handle.num_tokens, *rows_s.shape[1:], dtype=wide, device=rows_s.device)
    return total.index_add_(0, handle.token_of_row_s, rows_s.to(wide)).to(rows_s.dtype)
