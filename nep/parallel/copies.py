"""Which copy of an expert computes which token, settled anew in every step.

All slots of a dispatch group gather how many tokens of each have chosen each expert, compute the same quotas from
that (`nep.planning.copies.quotas`) and share them out in one order, so nobody has to be told: first tokens stay on
their own slot, then the rest goes in the order of slots.

Shapes: t tokens of this slot, k experts of a token, n slots of the group, e experts of the layer, c of them copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from nep.planning.copies.quotas import LayerQuotas, QuotaSolver
from nep.planning.layout import Interval

Integers = NDArray[np.int64]


def held_units(
    cuts: Mapping[int, Sequence[Interval]], slots: Sequence[int], units_per_expert: int, num_experts: int
) -> Integers:
    """How many units of which expert each slot holds: ``[e, n]``.

    Args:
        cuts: the intervals of each slot on the layer's expert line.
        slots: members of the dispatch group, in rank order.
    """
    units_en = np.zeros((num_experts, len(slots)), dtype=np.int64)
    for rank, slot in enumerate(slots):
        for lo, hi in cuts.get(slot, ()):
            for expert in range(lo // units_per_expert, (hi - 1) // units_per_expert + 1):
                start = expert * units_per_expert
                units_en[expert, rank] += min(hi, start + units_per_expert) - max(lo, start)
    return units_en


class CopyChooser:
    """Shares each copied expert's tokens out over its copies.

    Args:
        units_en: see `held_units`; a copied expert is whole on each of its slots.
        units_per_expert: of one expert.
        speeds_ppm: relative speed of the slots, in rank order.
    """

    def __init__(self, units_en: Integers, units_per_expert: int, speeds_ppm: Sequence[int]) -> None:
        self._copied = np.flatnonzero(units_en.sum(axis=1) > units_per_expert)
        self._copied_c = torch.from_numpy(self._copied)
        # An expert in slices loads each of its slots in proportion: for the solver each slice is an expert by itself.
        self._expert_of_slice, slot = np.nonzero((units_en > 0) & (units_en < units_per_expert))
        self._slice_units = units_en[self._expert_of_slice, slot]
        self._units_per_expert = units_per_expert
        slices = np.zeros((len(slot), units_en.shape[1]), dtype=np.int8)
        slices[np.arange(len(slot)), slot] = 1
        board = np.concatenate([(units_en == units_per_expert).astype(np.int8), slices])
        solver = QuotaSolver(board[None], speeds_ppm)
        self._quotas: LayerQuotas = solver.layers[0]
        self._has_whole = (units_en == units_per_expert).any(axis=1)

    @property
    def any(self) -> bool:
        """Whether there is a choice."""
        return len(self._copied) > 0

    def flows(self, counts_ne: Integers) -> Integers:
        """Tokens of each copied expert by the slot that has them and the slot that computes them: ``[n, c, n]``.

        Args:
            counts_ne: tokens of each slot that chose each expert.
        """
        totals = counts_ne.sum(axis=0)
        slices = -(-totals[self._expert_of_slice] * self._slice_units // self._units_per_expert)
        whole = np.where(self._has_whole, totals, 0)
        quotas_cn = self._quotas.split(np.concatenate([whole, slices]))[self._copied]
        counts_nc = counts_ne[:, self._copied]
        stay_nc = np.minimum(counts_nc, quotas_cn.T)
        # The rest of the tokens and of the quotas, laid end to end in the order of slots: what lies side by side meets.
        tokens = _ends(counts_nc - stay_nc)
        places = _ends(quotas_cn.T - stay_nc)
        first = np.maximum(tokens[:-1, :, None], places[:-1].T[None])
        last = np.minimum(tokens[1:, :, None], places[1:].T[None])
        flows_ncn = np.maximum(last - first, 0)
        ranks = np.arange(len(counts_ne))
        flows_ncn[ranks, :, ranks] += stay_nc
        return flows_ncn

    def narrow(self, wanted_tkn: torch.Tensor, ids_tk: torch.Tensor, counts_ne: torch.Tensor, rank: int) -> None:
        """Leave each choice of a copied expert one slot, in place.

        Args:
            wanted_tkn: slots with a slice of each chosen expert; bool.
            ids_tk: the chosen experts.
            counts_ne: see `flows`.
            rank: this slot's.
        """
        ends_cn = torch.from_numpy(self.flows(counts_ne.cpu().numpy())[rank].cumsum(axis=1)).to(ids_tk.device)
        position_of = torch.full((counts_ne.shape[1],), -1)
        position_of[self._copied_c] = torch.arange(len(self._copied_c))
        copied_a = position_of.to(ids_tk.device)[ids_tk.flatten()]
        order = copied_a.argsort(stable=True)
        order = order[copied_a[order] >= 0]
        copied_a = copied_a[order]
        # Where each stands among the choices of its expert, in the order of tokens.
        starts_c = torch.bincount(copied_a, minlength=len(self._copied_c)).cumsum(0).roll(1)
        starts_c[:1] = 0
        place_a = torch.arange(len(order), device=order.device) - starts_c[copied_a]
        slot_a = (place_a[:, None] >= ends_cn[copied_a]).sum(dim=1)
        chosen = wanted_tkn.view(-1, wanted_tkn.shape[2])
        chosen[order] = False
        chosen[order, slot_a] = True


def _ends(parts: Integers) -> Integers:
    """Where each part begins and ends if parts lie end to end along dimension 0: one row more."""
    return np.concatenate([np.zeros_like(parts[:1]), parts.cumsum(axis=0)])
