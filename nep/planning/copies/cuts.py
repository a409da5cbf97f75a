"""Expert copies as cuts of a replica: whole experts, some of them on several slots.

For whoever places experts whole and may place them more than once (other frameworks, and dispatch groups that
split tokens over copies).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nep.planning.copies.place import Copies, SlotLimits, whole_tokens
from nep.planning.copies.quotas import split_quotas
from nep.planning.copies.warm import adapt_copies, plan_copies, repair_copies
from nep.planning.holding.dealing import Held, Integers, count_cut
from nep.planning.holding.replica_cuts import Prices, Slots
from nep.planning.loads import ExpertLoads


class CopyCuts:
    """Places copies on the slots of replicas.

    Args:
        prices: what placement goes by.
        physical_experts: copies of all experts of a layer together.
        domains: slot -> fault domain.
        limits: slot -> units of experts, over all layers, that it has memory for; None: as many as its part of
            the copies.
        scale_up: slot -> scale-up domain; None: one for all.
        apart: see `SlotLimits`.
    """

    def __init__(
        self,
        prices: Prices,
        physical_experts: int,
        domains: Mapping[int, int],
        limits: Mapping[int, int] | None = None,
        *,
        scale_up: Mapping[int, int] | None = None,
        apart: bool = False,
    ) -> None:
        self._prices, self._number, self._domains, self._limits = prices, physical_experts, domains, limits
        self._scale_up, self._apart = scale_up, apart

    def slot_limits(self, slots: Slots) -> SlotLimits:
        """Room for copies on each slot of a replica.

        Raises:
            ValueError: if they cannot hold every expert once.
        """
        experts, speeds = self._prices.experts, self._prices.speeds_ppm
        places = [-(-self._number // len(slots))] * len(slots)
        if self._limits is not None:
            whole = len(experts.names) * experts.units_per_expert
            places = [min(most, self._limits[slot] // whole) for most, slot in zip(places, slots, strict=True)]
        return SlotLimits(
            places=tuple(min(one, experts.num_experts) for one in places),
            speeds_ppm=tuple(speeds[slot] for slot in slots),
            domains=tuple(self._domains[slot] for slot in slots),
            scale_up=None if self._scale_up is None else tuple(self._scale_up[slot] for slot in slots),
            far=self._prices.cost_of(slots).far_sum_share,
            apart=self._apart,
        )

    def scratch(self, slots: Slots) -> Integers:
        """A cut for a replica that holds nothing, ``[layers, experts, slots]``."""
        limits = self.slot_limits(slots)
        number = min(self._number, limits.num_places(self._prices.experts.num_experts))
        return self._cut(plan_copies(self._prices.loads, limits, num_copies=number))

    def adapt(self, slots: Slots, lost: Sequence[int], held: Held, min_gain: float) -> Integers | None:
        """A cut that grew out of what slots hold.

        Args:
            slots: of the replica so far.
            lost: those of them that are gone.
            held: what all of them held.
            min_gain: see `adapt_copies`.

        Returns:
            ``[layers, experts, slots left]``; None if experts are cut so far or slots hold too many.
        """
        experts = self._prices.experts
        before = count_cut(held, experts.num_experts, experts.units_per_expert)
        if not np.isin(before, (0, experts.units_per_expert)).all():
            return None
        copies = (before > 0).astype(np.int8)
        limits = self.slot_limits([slot for slot in slots if slot not in lost])
        places = dict(zip([slot for slot in slots if slot not in lost], limits.places, strict=True))
        gone = [index for index, slot in enumerate(slots) if slot in lost]
        speeds = self._prices.speeds_ppm
        everything = SlotLimits(
            places=tuple(
                places.get(slot, int(copies[:, :, index].sum(axis=1).max())) for index, slot in enumerate(slots)
            ),
            speeds_ppm=tuple(speeds[slot] for slot in slots),
            domains=tuple(self._domains[slot] for slot in slots),
            scale_up=None if self._scale_up is None else tuple(self._scale_up[slot] for slot in slots),
            far=limits.far,
            apart=self._apart,
        )
        if (copies.sum(axis=1) > np.array(everything.places)).any():
            return None
        if gone:
            changed = repair_copies(copies, self._prices.loads, everything, gone, min_gain=min_gain)
        else:
            changed = adapt_copies(copies, self._prices.loads, everything, min_gain=min_gain)
        return self._cut(np.delete(changed, gone, axis=2))

    def _cut(self, copies: Copies) -> Integers:
        return copies.astype(np.int64) * self._prices.experts.units_per_expert


def quota_shares(cut: Integers, loads: ExpertLoads, speeds_ppm: Sequence[int]) -> NDArray[np.float64]:
    """The part of each expert's tokens that each copy takes under quotas for these loads.

    Args:
        cut: ``[layers, experts, slots]``, of whole experts.
        loads: ``[layers, experts]``.
        speeds_ppm: of the slots.

    Returns:
        ``[layers, experts, slots]``, which sum to 1 over slots.
    """
    tokens = whole_tokens(loads)
    quotas = split_quotas(tokens, (cut > 0).astype(np.int8), speeds_ppm)
    return np.asarray(quotas / tokens[:, :, None])
