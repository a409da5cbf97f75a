"""Decides for every replica how many units of each expert its slots hold, by predicted seconds, and which.

Replicas that are alike are decided once.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.holding.assembly import ExpertAxes, in_line_order
from nep.planning.holding.dealing import Held, Integers, count_cut, deal_cut, redeal_cut
from nep.planning.intervals import Intervals
from nep.planning.layout import Layout
from nep.planning.loads import ExpertLoads
from nep.planning.placement.place import place
from nep.planning.placement.problem import Problem
from nep.planning.placement.repair import repair
from nep.planning.placement.state import State
from nep.planning.placement.waiting import least_waiting
from nep.planning.placement.warm import warm
from nep.planning.placement.whole import fill_whole, plain_whole

Slots = Sequence[int]
Dealt = list[list[Intervals]]
"""``[layer][slot of the replica]``: what it holds of the layer's experts."""

Room = Integers | None
"""``[slots]``, units of experts, over all layers, that each has memory for."""

Way = Literal["cut", "whole", "plain"]
"""How experts are placed: cut where that pays, whole, or whole as others do, by load over speed alone."""

UNKNOWN_COST = PlacementCost(token_s=1.0, row_s=0.02, piece_s=0.0, units_per_expert=1, tokens=1.0)
"""Where nothing is known of the hardware: arithmetic counts, and a row a fiftieth of it, as over a fast link."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What placement goes by.

    Attributes:
        experts: the model's expert lines.
        loads: of its layers.
        speeds_ppm: slot -> relative speed.
        cost_of: slots of a replica -> prices in it.
        known: whether these are prices of some hardware; otherwise experts are placed by them as they are.
    """

    experts: ExpertAxes
    loads: ExpertLoads
    speeds_ppm: Mapping[int, int]
    cost_of: Callable[[Slots], PlacementCost]
    known: bool = True

    @classmethod
    def unknown(cls, experts: ExpertAxes, speeds_ppm: Mapping[int, int]) -> "Prices":
        """Equal loads on unknown hardware."""
        cost = replace(UNKNOWN_COST, units_per_expert=experts.units_per_expert)
        loads = ExpertLoads.uniform(len(experts.names), experts.num_experts)
        return cls(experts=experts, loads=loads, speeds_ppm=speeds_ppm, cost_of=lambda _: cost, known=False)

    def speeds(self, slots: Slots) -> list[float]:
        """Relative speeds, 1 is full."""
        return [self.speeds_ppm[slot] / 1e6 for slot in slots]


def held_by(holders: Layout, experts: ExpertAxes, slots: Slots) -> Held:
    """What slots hold of the experts; ``()`` for those that hold nothing."""
    cuts = [holders.by_slot(axis) for axis in experts.names]
    return [[by_slot.get(slot, ()) for slot in slots] for by_slot in cuts]


class Alike:
    """Tells replicas apart by what they hold of the experts. Axes that are cut alike share their mapping.

    Args:
        holders: a layout.
        experts: the model's expert lines.
    """

    def __init__(self, holders: Layout, experts: ExpertAxes) -> None:
        self._cuts = list({id(cut): cut for cut in map(holders.by_slot, experts.names)}.values())

    def key(self, slots: Slots) -> Hashable:
        """Equal for replicas that hold the same, slot by slot."""
        return tuple(tuple([by_slot.get(slot, ()) for slot in slots]) for by_slot in self._cuts)


class CutsFromScratch:
    """Places experts on replicas that hold nothing, or whatever they hold.

    Args:
        prices: what placement goes by.
        limits: slot -> units of experts, over all layers, that it has memory for; None: no limit.
        way: how experts may be placed.
    """

    def __init__(self, prices: Prices, limits: Mapping[int, int] | None = None, *, way: Way = "cut") -> None:
        self._prices, self._limits, self._way = prices, limits, way
        self._known: dict[object, Integers] = {}
        self._dealt: dict[int, Dealt] = {}
        self._redealt: dict[Hashable, Dealt] = {}
        self._alike: tuple[Layout, Alike] | None = None

    def place(self, slots: Slots) -> Integers:
        """The cut of one replica, ``[layers, experts, slots]``.

        Raises:
            ValueError: if memory cannot hold the experts.
        """
        limits = None if self._limits is None else tuple(self._limits[slot] for slot in slots)
        key = (tuple(self._prices.speeds(slots)), self._prices.cost_of(slots), limits)
        if key not in self._known:
            units = self._place(slots, None)
            if limits is not None and (units.sum(axis=(0, 1)) > limits).any():
                units = self._place(slots, np.array(limits))
            self._known[key] = in_line_order(units, self._prices.loads)
        return self._known[key]

    def _place(self, slots: Slots, room: Room) -> Integers:
        loads, speeds, cost = self._prices.loads, self._prices.speeds(slots), self._prices.cost_of(slots)

        def placed(price: PlacementCost, cut: bool) -> Integers:
            return place(loads, speeds=speeds, cost=price, memory_units=room, cut=cut).units

        if self._way == "whole":
            return placed(cost, cut=False)
        if self._way == "cut" and not self._prices.known:
            return placed(cost, cut=True)
        if self._way == "cut":
            return least_waiting(lambda price: placed(price, cut=True), loads, speeds, cost, mix=room is None)
        state, complete = plain_whole(Problem.of(loads, speeds=speeds, cost=cost, memory_units=room))
        if not complete.all():
            raise ValueError("memory has no room for every expert whole; allow cuts or free memory")
        return state.cut()

    def deal(self, slots: Slots, holders: Layout | None = None) -> Dealt:
        """Which units each slot of a replica holds; with holders of now, such that few change slots."""
        units, size = self.place(slots), self._prices.experts.units_per_expert
        if holders is not None:
            if self._alike is None or self._alike[0] is not holders:
                self._alike = (holders, Alike(holders, self._prices.experts))
            limits = None if self._limits is None else tuple(self._limits[slot] for slot in slots)
            key = (id(units), tuple(self._prices.speeds(slots)), limits, self._alike[1].key(slots))
            if key not in self._redealt:
                held = held_by(holders, self._prices.experts, slots)
                before = count_cut(held, self._prices.experts.num_experts, size)
                self._redealt[key] = redeal_cut(self._matched(units, before, slots), held, size)
            return self._redealt[key]
        if id(units) not in self._dealt:
            self._dealt[id(units)] = deal_cut(units, size)
        return self._dealt[id(units)]

    def _matched(self, cut: Integers, before: Integers, slots: Slots) -> Integers:
        """The cut with equally fast slots exchanged in each layer so that they keep most of what they hold."""
        kinds: dict[object, list[int]] = {}
        for index, slot in enumerate(slots):
            limit = None if self._limits is None else self._limits[slot]
            kinds.setdefault((self._prices.speeds_ppm[slot], limit), []).append(index)
        matched = cut.copy()
        for places in kinds.values():
            for layer in range(len(cut)):
                new, old = cut[layer][:, places], before[layer][:, places]
                kept = np.array([np.minimum(new, column[:, None]).sum(axis=0) for column in old.T])
                matched[layer][:, places] = new[:, _match(kept)]
        return matched


def _match(kept: Integers) -> Integers:
    """For each row a column of its own, the largest entries first."""
    rows, size = kept.shape[0], kept.shape[1]
    left = kept.astype(np.int64)
    chosen = np.zeros(rows, dtype=np.int64)
    for _ in range(rows):
        row, column = divmod(int(left.argmax()), size)
        chosen[row] = column
        left[row], left[:, column] = -1, -1
    return chosen


def repair_cuts(
    holders: Layout,
    survivors: Sequence[Slots],
    prices: Prices,
    *,
    limits: Mapping[int, int] | None = None,
    cut: bool = True,
) -> list[Dealt]:
    """What the survivors of each replica hold: what they held, and what nobody of them has any more.

    Args:
        holders: the layout in force.
        survivors: for each replica of it that goes on, the slots left.
        prices: what placement goes by.
        limits: see `CutsFromScratch`.
        cut: whether lost experts may be cut; otherwise they, of which none was cut, go whole to one slot each.

    Returns:
        For each replica; the intervals of slots that get nothing are the very objects of before.

    Raises:
        ValueError: if memory cannot hold what was lost.
    """

    def repaired(before: Integers, slots: Slots, room: Room) -> Integers:
        speeds, cost = prices.speeds(slots), prices.cost_of(slots)
        if not cut:
            return _repair_whole(Problem.of(prices.loads, speeds=speeds, cost=cost, memory_units=room), before)

        def at(price: PlacementCost) -> Integers:
            return repair(before, (), prices.loads, speeds=speeds, cost=price, memory_units=room).units

        try:
            return least_waiting(at, prices.loads, speeds, cost, mix=room is None)
        except RuntimeError as error:
            raise ValueError(f"survivors have no room for what was lost: {error}") from error

    return _recut(holders, survivors, prices, limits, repaired)


def _repair_whole(problem: Problem, before: Integers) -> Integers:
    """Gives experts that nobody holds to the slots that would finish first with them, hottest experts first."""
    state = State.of(problem.guided(), np.swapaxes(before, 1, 2))
    if fill_whole(state, before.sum(axis=2) == 0).any():
        raise ValueError("survivors have no room for the experts that were lost; free memory or allow cuts")
    return state.cut()


def adapt_cuts(
    holders: Layout,
    replicas: Sequence[Slots],
    prices: Prices,
    *,
    unit_s: float,
    budget: float = 1.0,
    limits: Mapping[int, int] | None = None,
) -> list[Dealt]:
    """What slots hold after the moves that pay: for loads or speeds that have changed, or slots that have come.

    Args:
        holders: the layout to start from; each replica has all units.
        replicas: slots of each; new ones hold nothing.
        prices: what placement goes by.
        unit_s: seconds per step that moving one unit must gain.
        budget: part of a replica's units that may move.
        limits: see `CutsFromScratch`.
    """
    experts = prices.experts

    def adapted(before: Integers, slots: Slots, room: Room) -> Integers:
        def at(price: PlacementCost) -> Integers:
            return warm(
                before,
                prices.loads,
                speeds=prices.speeds(slots),
                cost=price,
                memory_units=room,
                budget_units=int(budget * experts.num_units),
                unit_s=unit_s,
            ).units

        speeds, cost = prices.speeds(slots), prices.cost_of(slots)
        return least_waiting(at, prices.loads, speeds, cost, before=before, unit_s=unit_s)

    return _recut(holders, replicas, prices, limits, adapted)


def _recut(
    holders: Layout,
    replicas: Sequence[Slots],
    prices: Prices,
    limits: Mapping[int, int] | None,
    change: Callable[[Integers, Slots, Room], Integers],
) -> list[Dealt]:
    """Changes the cut of every replica; of those that are alike, once."""
    experts = prices.experts
    alike = Alike(holders, experts)
    known: dict[Hashable, Dealt] = {}
    changed: list[Dealt] = []
    for slots in replicas:
        room = None if limits is None else tuple(limits[slot] for slot in slots)
        key = (tuple(prices.speeds(slots)), prices.cost_of(slots), room, alike.key(slots))
        if key not in known:
            held = held_by(holders, experts, slots)
            before = count_cut(held, experts.num_experts, experts.units_per_expert)
            after = change(before, slots, None if room is None else np.array(room))
            known[key] = redeal_cut(after, held, experts.units_per_expert)
        changed.append(known[key])
    return changed
