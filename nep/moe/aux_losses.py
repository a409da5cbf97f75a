"""Auxiliary losses that do not depend on how tokens are spread over slots.

Anything computed from the tokens that happen to be together (on a slot, in a micro-batch) makes the gradient depend
on the layout. What remains: losses of single tokens; balance within whole sequences, with their counts added over the
lane; balance with counts of a whole step, the committed one before, or the same one if it is a single round.

Shapes: s tokens of this slot, b sequences of the lane, e experts, k choices of a token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nep.moe.router import Routing

SumCounts = Callable[[Tensor], Tensor]

COUNTS = ("sequence", "previous", "step")


@dataclass(frozen=True, kw_only=True)
class AuxLosses:
    """Coefficients; 0 switches a loss off. All are means over the tokens of the global batch.

    Attributes:
        z: of the squared log-partition of each token's router scores (ST-MoE, arXiv 2202.08906, equation 5).
        balance: of load balancing: E times the sum over experts of their share of the counts times their mean
            probability (Switch Transformer, arXiv 2101.03961, equations 4 to 6, for any k).
        counts: which counts those are. "sequence": those of the token's own sequence (DeepSeek-V3, arXiv 2412.19437,
            equations 17 to 20); "previous": of the whole committed step before, even ones before the first;
            "step": of the whole step that is running, which has to be a single round.
        logits_z: of the squared log-partition of each token's vocabulary scores (PaLM, arXiv 2204.02311, section 5).
    """

    z: float = 0.0
    balance: float = 0.0
    counts: str = "sequence"
    logits_z: float = 0.0

    def problems(self) -> list[str]:
        """What is wrong with these values, one sentence each."""
        coefficients = (
            ("z_loss_coefficient", self.z),
            ("aux_loss_coefficient", self.balance),
            ("logits_z_loss_coefficient", self.logits_z),
        )
        found = [
            f"{name} ({value}) must be finite and at least 0; 0 switches it off"
            for name, value in coefficients
            if not (math.isfinite(value) and value >= 0)
        ]
        if self.counts not in COUNTS:
            found.append(
                f"aux_loss_counts ({self.counts!r}) must be one of {', '.join(COUNTS)}: counts of a slot, a replica or "
                "a micro-batch would make the gradient depend on the layout"
            )
        return found

    @property
    def of_router(self) -> bool:
        """Whether a router's output is needed."""
        return self.z > 0 or self.balance > 0

    @property
    def any(self) -> bool:
        """Whether there is anything to compute."""
        return self.of_router or self.logits_z > 0

    @property
    def needs_one_round(self) -> bool:
        """Whether a step may not be cut into rounds."""
        return self.balance > 0 and self.counts == "step"


@dataclass(frozen=True, kw_only=True)
class CountSources:
    """Where the counts of one layer come from, if not from its own lane.

    Attributes:
        previous_e: of the last committed step, int64.
        sum_over_job: adds integers over all slots of the job; all of them call it.
    """

    previous_e: Tensor | None = None
    sum_over_job: SumCounts | None = None


def router_losses(
    losses: AuxLosses,
    routing: Routing,
    sequence_s: Tensor,
    num_sequences: int,
    sum_over_lane: SumCounts,
    sources: CountSources | None = None,
) -> Tensor:
    """This slot's part of the router's losses of one layer, summed over tokens.

    The parts of all slots add up to the batch's, and so do their gradients.

    Args:
        losses: coefficients.
        routing: of this slot's tokens, with shares.
        sequence_s: which of the lane's sequences each token is of.
        num_sequences: of the lane.
        sum_over_lane: adds integers over the slots of the lane; all of them call it.
        sources: for counts of other extent than a sequence.
    """
    logits_se = routing.logits_te
    total = logits_se.new_zeros(())
    if losses.z > 0:
        total = total + losses.z * logits_se.logsumexp(dim=-1).square().sum()
    if losses.balance > 0:
        assert routing.shares_te is not None
        if losses.counts == "sequence":
            counts_be, group_s = _counts(routing, sequence_s, num_sequences), sequence_s
            counts_be = sum_over_lane(counts_be)
        else:
            counts_be, group_s = _of_step(losses.counts, routing, sources), torch.zeros_like(sequence_s)
        wide_be = counts_be.to(logits_se.dtype)
        total_b1 = wide_be.sum(dim=-1, keepdim=True)
        # Nothing counted (before the first step): even shares.
        load_be = torch.where(total_b1 > 0, counts_be.size(1) * wide_be / total_b1.clamp(min=1), 1.0)
        # Each token's probabilities meet the counts of its group: the same sum, token by token.
        total = total + losses.balance * (load_be[group_s] * routing.shares_te).sum()
    return total


def _counts(routing: Routing, group_s: Tensor, num_groups: int) -> Tensor:
    """How many of this slot's assignments each group of tokens has for each expert, int64 [b, e]."""
    num_experts = routing.logits_te.size(1)
    places_s = (group_s[:, None] * num_experts + routing.expert_ids_tk).flatten()
    counts = torch.zeros(num_groups * num_experts, dtype=torch.int64, device=places_s.device)
    return counts.index_add_(0, places_s, torch.ones_like(places_s)).view(num_groups, num_experts)


def _of_step(kind: str, routing: Routing, sources: CountSources | None) -> Tensor:
    """Counts of a whole step, int64 [1, e]."""
    if sources is not None and kind == "previous" and sources.previous_e is not None:
        return sources.previous_e[None]
    if sources is not None and kind == "step" and sources.sum_over_job is not None:
        everything_s = torch.zeros(len(routing.expert_ids_tk), dtype=torch.int64, device=routing.logits_te.device)
        return sources.sum_over_job(_counts(routing, everything_s, 1))
    raise ValueError(f"counts ({kind!r}) of a balance loss need their source; give it to use_aux_losses")
