"""What a job remembers of its committed steps. It is part of the transaction, so every slot has all of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from nep.fault_tolerance.corruption import Corruption
from nep.fault_tolerance.vote import Tally


@dataclass(kw_only=True)
class Committed:
    """One committed step, as its vote said.

    Attributes:
        step: its number.
        loss: mean over the tokens of the global batch.
        tokens, samples: how many were in it.
        sample_hash: sum of the samples' hashes modulo 2**64.
        grad_norm: global norm of the mean gradient, before clipping.
        skipped: the gradient was not finite, so nothing was updated.
        request: highest number of a request that all slots had read.
    """

    step: int
    loss: float
    tokens: int
    samples: int
    sample_hash: int
    grad_norm: float
    skipped: bool
    request: int = 0

    @classmethod
    def from_tally(cls, step: int, tally: Tally) -> Committed:
        tokens = max(1, tally.tokens)
        return cls(
            step=step,
            loss=tally.loss / tokens,
            tokens=tally.tokens,
            samples=tally.samples,
            sample_hash=tally.sample_hash,
            grad_norm=tally.norm2**0.5 / tokens,
            skipped=tally.nonfinite,
            request=tally.request,
        )


@dataclass(kw_only=True)
class History:
    """Committed steps in order, and the expert loads of each if they are asked for.

    Attributes:
        steps: one entry per commit.
        counts_le: tokens per layer and expert of each committed step, int64 [layers, experts]; empty unless they
            are kept.
        num_updates: optimizer updates so far (skipped steps do not count).
        corruptions: wrong bits that were found, in order.
        resumed: it began with a checkpoint, so some steps may have had another configuration.
    """

    steps: list[Committed] = field(default_factory=list)
    counts_le: list[torch.Tensor] = field(default_factory=list)
    num_updates: int = 0
    corruptions: list[Corruption] = field(default_factory=list)
    resumed: bool = False

    @property
    def request(self) -> int:
        """Number of the last request in effect; never falls, since a slot that comes reads all there are."""
        return self.steps[-1].request if self.steps else 0

    def lost_steps(self, last_step: int) -> int:
        """Steps up to `last_step` that were never committed."""
        return last_step - len({entry.step for entry in self.steps})

    def samples_lost_and_repeated(self, expected: dict[int, tuple[int, int]]) -> tuple[int, int]:
        """Compare the ledger with what each step should have used.

        Args:
            expected: step -> (number of samples, sum of their hashes modulo 2**64).

        Returns:
            Samples that no committed step used, and samples used more than once. Where a count agrees but the
            hashes do not, all samples of that step count as lost and as repeated.
        """
        lost = repeated = 0
        used: dict[int, list[Committed]] = {}
        for entry in self.steps:
            used.setdefault(entry.step, []).append(entry)
        for step, (samples, sample_hash) in expected.items():
            entries = used.get(step, [])
            count = sum(entry.samples for entry in entries)
            total = sum(entry.sample_hash for entry in entries) % 2**64
            lost += max(0, samples - count)
            repeated += max(0, count - samples)
            if count == samples and total != sample_hash:
                lost += samples
                repeated += samples
        return lost, repeated
