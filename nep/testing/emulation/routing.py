"""A router that sends tokens where the emulation wants them: to a given distribution over experts.

Which experts a small random model prefers says nothing about the full one, and a few hundred tokens that stand for many
would make its loads noisy. So choices are drawn in strata: over every few tokens each expert gets what its load says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from nep.moe.router import Routing

_TOKENS_OF_STRATUM = 16


class ExpertSampler:
    """Draws experts for tokens.

    Systematic sampling (Madow 1949) in a fresh random order of the experts for every stratum of tokens: every expert
    is chosen for a token with exactly its chance, no expert twice, and over a stratum its count is the expected one
    rounded up or down.

    Args:
        chances_e: chance of each expert to be among a token's; they sum to `top_k`, none above 1.
        seed: of this sampler.
    """

    def __init__(self, chances_e: npt.NDArray[np.float64], seed: int):
        self._chances_e = chances_e
        self._top_k = round(float(chances_e.sum()))
        self._random = np.random.default_rng(seed)
        self._left_tk = np.empty((0, self._top_k), dtype=np.int64)

    def draw(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """Experts of so many tokens, [t, k]."""
        while len(self._left_tk) < num_tokens:
            self._left_tk = np.concatenate((self._left_tk, self._stratum()))
        drawn, self._left_tk = self._left_tk[:num_tokens], self._left_tk[num_tokens:]
        return drawn

    def _stratum(self) -> npt.NDArray[np.int64]:
        """Tokens at equal distances on a circle of experts, in random order."""
        num_experts = len(self._chances_e)
        order = self._random.permutation(num_experts)
        ends = np.cumsum(self._chances_e[order])
        ends[-1] = self._top_k
        starts = (self._random.random() + np.arange(_TOKENS_OF_STRATUM)) / _TOKENS_OF_STRATUM
        points = starts[:, None] + np.arange(self._top_k)
        places = np.minimum(np.searchsorted(ends, points, side="right"), num_experts - 1)
        return np.asarray(self._random.permutation(order[places]))


def route_as_drawn(router: nn.Module, sampler: ExpertSampler) -> None:
    """Replace what `router` chooses by what `sampler` draws; its scores still weigh them and get their gradients."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], routing: Routing) -> Routing:
        ids_tk = torch.from_numpy(sampler.draw(len(routing.expert_ids_tk)))
        weights_tk = routing.logits_te.softmax(-1).gather(1, ids_tk)
        weights_tk = weights_tk / weights_tk.sum(-1, keepdim=True)
        return routing._replace(expert_ids_tk=ids_tk, weights_tk=weights_tk)

    router.register_forward_hook(hook)
