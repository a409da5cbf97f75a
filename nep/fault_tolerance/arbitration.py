"""Which of two differing copies is wrong, from what slots have found: a pure function of what all of them know.

In this order, each by itself sufficient:

1. The seal: a side whose bits have changed since its last update is wrong, and one whose bits have not is right, as
   far as memory goes.
2. A holder: its parameters came from the owner. If they are what the mirror's master weight makes, and not what the
   owner's does, the owner's has changed since.
3. Bounds: clipping bounds a gradient, so it bounds moments, what AdamW adds in a step, and with that every weight. A
   side beyond a bound (or not finite) is wrong if the other one is within.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from nep.fault_tolerance.corruption import PARAMS
from nep.parallel.optimizer import OptimizerConfig

Side = Literal["owner", "other", "both"]

_SLACK = 1.01  # for rounding
_TINY = 1e-15  # squares of smaller gradients are zero in float32
_SIGMAS = 10.0  # no initial value lies further out
_BIAS_STEPS = 1000  # after so many, bias correction of the moments is over


@dataclass(frozen=True, kw_only=True, order=True)
class Finding:
    """Units of one tensor that differ between their owner and another slot.

    Attributes:
        kind: master or a moment, where the other slot mirrors; params, where it holds.
        name, lo, hi: units [lo, hi) of a parameter.
        owner, other: slots.
        owner_kept, other_kept: 1 if the bits are as sealed, 0 if not, -1 if unknown.
        like_mirror: params: the other's are what a mirror of the master weights makes.
    """

    kind: str
    name: str
    lo: int
    hi: int
    owner: int
    other: int
    owner_kept: int
    other_kept: int
    like_mirror: bool = False

    def meets(self, other: Finding) -> bool:
        """Whether both are about units of the same parameter."""
        return self.name == other.name and self.lo < other.hi and other.lo < self.hi


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of a finding.

    Attributes:
        wrong: the side, or None where that cannot be told.
        why: in words.
    """

    wrong: Side | None
    why: str


def by_evidence(finding: Finding, findings: Sequence[Finding]) -> Verdict | None:
    """What seals and holders say of a difference between owner and mirror; None if they say nothing.

    Args:
        findings: of all slots.
    """
    if finding.owner_kept == 0 and finding.other_kept == 0:
        return Verdict(wrong="both", why="both sides have changed since the update")
    if finding.owner_kept == 0 or finding.other_kept == 0:
        return Verdict(wrong="owner" if finding.owner_kept == 0 else "other", why="it has changed since the update")
    if finding.kind == "master" and any(
        one.kind == PARAMS and one.like_mirror and one.meets(finding) for one in findings
    ):
        return Verdict(wrong="owner", why="parameters that came from it agree with the mirror")
    return None


def of_parameters(finding: Finding, masters: Mapping[Finding, Verdict], findings: Sequence[Finding]) -> Verdict | None:
    """What is known of parameters that are not what the owner's master weights make.

    Args:
        masters: findings about master weights with their verdicts.
        findings: of all slots.

    Returns:
        None if the owner's master weights are the ones that were wrong: nobody knows what it had returned.
    """
    about = [verdict for one, verdict in masters.items() if one.meets(finding)]
    if any(verdict.wrong in ("owner", "both") for verdict in about):
        return None
    if any(verdict.wrong is None for verdict in about):
        return Verdict(wrong=None, why="it differs from its owner, which differs from its mirror")
    if any(one.kind == PARAMS and one.other != finding.other and one.meets(finding) for one in findings):
        return Verdict(wrong=None, why="several holders differ from their owner, which may have sent it so")
    if finding.owner_kept == 1:
        return Verdict(wrong="other", why="the master weights are unchanged since they were returned")
    return Verdict(wrong=None, why="it differs from its owner, which has no seal yet")


def by_bounds(owner: torch.Tensor, other: torch.Tensor) -> Side | None:
    """The side that is beyond its bounds.

    Args:
        owner, other: whether each side is, of the elements that differ.
    """
    first, second = bool(owner.any()), bool(other.any())
    if first == second:
        return None
    return "owner" if first else "other"


def beyond_bounds(
    kind: str,
    values: Mapping[str, torch.Tensor],
    config: OptimizerConfig,
    *,
    updates: int,
    init_std: float | None,
    known: bool = True,
) -> torch.Tensor:
    """Elements that no training with this optimizer can have led to.

    Args:
        kind: of the elements in question.
        values: the same elements of master and all moments.
        updates: number of updates so far.
        init_std: of the initial values, which are normal; None: they are ones.
        known: whether all of the training was with this optimizer; else only what is no number is beyond.
    """
    found, limit = values[kind], config.clip_norm * _SLACK
    beyond = ~torch.isfinite(found)
    if not known:
        return beyond
    if kind == "master":
        if config.algorithm == "adamw":
            first = 1.0 if init_std is None else _SIGMAS * init_std
            beyond |= found.abs() > (first + updates * config.lr * largest_step(config)) * _SLACK
        return beyond
    if kind == "momentum_buffer":
        if config.weight_decay == 0:
            beyond |= found.abs() > limit / (1 - config.momentum)
        return beyond
    if kind == "exp_avg":
        beyond |= found.abs() > limit
    if kind == "exp_avg_sq":
        beyond |= (found < 0) | (found > limit**2)
    ratio = largest_ratio(config)
    return beyond | (values["exp_avg"].abs() > ratio * _SLACK * values["exp_avg_sq"].clamp(min=0).sqrt() + _TINY)


def largest_ratio(config: OptimizerConfig, updates: int | None = None) -> float:
    """Bound of |exp_avg| / sqrt(exp_avg_sq), by Cauchy and Schwarz over the gradients that both are sums of.

    Args:
        updates: after so many; by default after any number.
    """
    b1, b2 = config.beta1, config.beta2
    if b2 == 0:
        return math.inf if b1 else 1.0
    step = b1 * b1 / b2
    if updates is None:
        terms = 1 / (1 - step) if step < 1 else math.inf
    else:
        terms = float(updates) if step == 1 else (1 - step**updates) / (1 - step)
    return (1 - b1) / math.sqrt(1 - b2) * math.sqrt(terms)


def largest_step(config: OptimizerConfig) -> float:
    """Bound of what AdamW adds to a weight in one step, as a multiple of the learning rate; decay aside."""
    return max(
        largest_ratio(config, t) * math.sqrt(1 - config.beta2**t) / (1 - config.beta1**t)
        for t in range(1, _BIAS_STEPS + 1)
    )
