"""The work of each slot in one step: what its seconds are measured against.

Operations of the matrices that it holds, from its lane's share of the batch and from the tokens that the router really
sent. Attention's scores go with the heads and are left to the price of dense work.
"""

from collections.abc import Mapping
from math import ceil

import numpy as np
from numpy.typing import ArrayLike

from nep.planning.copies.cuts import quota_shares
from nep.planning.cost.held import Floats, expert_axes, expert_units
from nep.planning.layout import LineKind, Lines, axis_lines, axis_unit_numel
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan

FIXED, DENSE, EXPERT = 0, 1, 2
"""Kinds of work: rounds, which cost something whatever is in them; everything held for a lane; experts."""


class WorkOfSlots:
    """Work under one plan.

    Args:
        plan: the plan in force.
        lines: the model's.
        tokens_per_sequence: of the job.
        micro_batch_size: sequences that a lane runs at a time.
    """

    def __init__(self, plan: Plan, lines: Lines, *, tokens_per_sequence: int, micro_batch_size: int) -> None:
        self._plan = plan
        numel, order = axis_unit_numel(lines), axis_lines(lines)
        moe = set(expert_axes(lines))
        held = dict.fromkeys(plan.slots, 0.0)
        whole = dict.fromkeys(plan.slots, 0.0)
        for axis, by_slot in plan.holders.cuts.items():
            if axis in moe:
                continue
            # Tokens are split over the lane before norms and routers, but not before what the lane has cut.
            into = whole if order[axis].kind is LineKind.WHOLE else held
            for slot, intervals in by_slot.items():
                into[slot] += sum(hi - lo for lo, hi in intervals) * numel[axis]
        most = [0] * len(plan.replicas)
        sequences = [0] * len(plan.replicas)
        for lane in plan.lanes:
            most[lane.replica] = max(most[lane.replica], lane.num_sequences)
            sequences[lane.replica] += lane.num_sequences
        self._share = [count / max(1, sum(sequences)) for count in sequences]
        self._fixed: dict[int, float] = {}
        self._dense: dict[int, float] = {}
        for lane in plan.lanes:
            tokens = lane.num_sequences * tokens_per_sequence
            for slot in lane.slots:
                self._fixed[slot] = float(max(1, ceil(most[lane.replica] / micro_batch_size)))
                self._dense[slot] = 6.0 * tokens * (held[slot] + whole[slot] / len(lane.slots))
        self._neuron_s: list[Floats] = []
        size = order[next(iter(moe))].units_per_expert if moe else None
        for slots in plan.replicas:
            units, shares = expert_units(plan.holders, slots, lines)
            copied = units.sum(axis=2) > (size or 0)
            self._neuron_s.append(6.0 * units * shares * (numel[expert_axes(lines)[0]]))
            if copied.any():
                self._neuron_s[-1] = 6.0 * self._quota_units(units, shares, slots) * numel[expert_axes(lines)[0]]

    def of(self, counts: ArrayLike) -> dict[int, tuple[float, float, float]]:
        """Slot -> rounds, operations of dense work, operations of experts.

        Args:
            counts: [layers, experts], tokens of the step over all replicas; replicas are taken to be alike in what
                they ask of experts.
        """
        tokens = np.asarray(counts, dtype=np.float64)
        found: dict[int, tuple[float, float, float]] = {}
        for slots, share, per_token in zip(self._plan.replicas, self._share, self._neuron_s, strict=True):
            expert = share * np.einsum("le,les->s", tokens, per_token)
            for place, slot in enumerate(slots):
                found[slot] = (self._fixed[slot], self._dense[slot], float(expert[place]))
        return found

    def imbalance(self, counts: ArrayLike) -> float:
        """What waiting for the busiest slot of each layer costs: its expert work by speed, over an even share of the
        replica's; mean over layers, of the worst replica. 1 is perfect.

        Args:
            counts: as for `of`.
        """
        tokens = np.asarray(counts, dtype=np.float64)
        speeds = dict(zip(self._plan.slots, self._plan.speeds_ppm, strict=True))
        worst = 1.0
        for slots, per_token in zip(self._plan.replicas, self._neuron_s, strict=True):
            work = np.einsum("le,les->ls", tokens, per_token)
            pace = np.array([speeds[slot] for slot in slots], dtype=np.float64)
            even = work.sum(axis=1) / pace.sum()
            level = (work / pace).max(axis=1)
            ratio = np.where(even > 0, level / np.maximum(even, 1e-30), 1.0)
            worst = max(worst, float(ratio.mean()))
        return worst

    def _quota_units(self, units: Floats, shares: Floats, slots: tuple[int, ...]) -> Floats:
        """Units times the part of the tokens that quotas give each copy for equal loads."""
        speeds: Mapping[int, int] = dict(zip(self._plan.slots, self._plan.speeds_ppm, strict=True))
        size = units.max()
        if not np.isin(units, (0, size)).all():
            return units * shares
        loads = ExpertLoads.uniform(*units.shape[:2])
        return units * quota_shares(units.astype(np.int64), loads, [speeds[slot] for slot in slots])
