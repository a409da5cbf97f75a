"""Decides for every replica how many units of each expert its slots hold, and which.

Replicas that are alike are decided once. So are layers: after a failure in a job of a thousand replicas there
are a few dozen different questions, and they are asked together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nep.planning.assembly import ExpertAxes, in_line_order
from nep.planning.costs import PlacementCost
from nep.planning.dealing import Held, Integers, count_cut, deal_cut, redeal_cut
from nep.planning.intervals import Intervals
from nep.planning.layout import Layout
from nep.planning.loads import ExpertLoads
from nep.planning.placement.place import Placement, place
from nep.planning.placement.problem import Problem
from nep.planning.placement.repair import repair
from nep.planning.placement.spread import spread_each
from nep.planning.placement.state import State
from nep.planning.placement.warm import warm

Slots = Sequence[int]
Dealt = list[list[Intervals]]
"""``[layer][slot of the replica]``: what it holds of the layer's experts."""

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
        thorough: whether to look for the best repair, or for a good one in milliseconds.
    """

    experts: ExpertAxes
    loads: ExpertLoads
    speeds_ppm: Mapping[int, int]
    cost_of: Callable[[Slots], PlacementCost]
    thorough: bool = True

    @classmethod
    def unknown(cls, experts: ExpertAxes, speeds_ppm: Mapping[int, int]) -> "Prices":
        """Equal loads on unknown hardware."""
        cost = replace(UNKNOWN_COST, units_per_expert=experts.units_per_expert)
        loads = ExpertLoads.uniform(len(experts.names), experts.num_experts)
        return cls(experts=experts, loads=loads, speeds_ppm=speeds_ppm, cost_of=lambda _: cost, thorough=False)

    def speeds(self, slots: Slots) -> list[float]:
        """Relative speeds, 1 is full."""
        return [self.speeds_ppm[slot] / 1e6 for slot in slots]


def held_by(holders: Layout, experts: ExpertAxes, slots: Slots) -> Held:
    """What slots hold of the experts; ``()`` for those that hold nothing."""
    cuts = [holders.by_slot(axis) for axis in experts.names]
    return [[by_slot.get(slot, ()) for slot in slots] for by_slot in cuts]


class CutsFromScratch:
    """Places experts on replicas that hold nothing, or whatever they hold.

    Args:
        prices: what placement goes by.
        limits: slot -> units of experts, over all layers, that it has memory for; None: no limit.
        cut: whether experts may be cut.
    """

    def __init__(self, prices: Prices, limits: Mapping[int, int] | None = None, *, cut: bool = True) -> None:
        self._prices, self._limits, self._cut = prices, limits, cut
        self._known: dict[object, Placement] = {}
        self._dealt: dict[int, Dealt] = {}

    def place(self, slots: Slots) -> Placement:
        """The placement of one replica.

        Raises:
            ValueError: if memory cannot hold the experts.
        """
        prices = self._prices
        speeds, cost = prices.speeds(slots), prices.cost_of(slots)
        limits = None if self._limits is None else tuple(self._limits[slot] for slot in slots)
        key = (tuple(speeds), cost, limits)
        if key not in self._known:
            found = place(prices.loads, speeds=speeds, cost=cost, cut=self._cut)
            if limits is not None and (found.units.sum(axis=(0, 1)) > limits).any():
                found = place(prices.loads, speeds=speeds, cost=cost, memory_units=np.array(limits), cut=self._cut)
            self._known[key] = replace(found, units=in_line_order(found.units, prices.loads))
        return self._known[key]

    def deal(self, slots: Slots, holders: Layout | None = None) -> Dealt:
        """Which units each slot of a replica holds; with holders of now, such that few change slots."""
        placement, size = self.place(slots), self._prices.experts.units_per_expert
        if holders is not None:
            held = held_by(holders, self._prices.experts, slots)
            before = count_cut(held, self._prices.experts.num_experts, size)
            return redeal_cut(self._matched(placement.units, before, slots), held, size)
        if id(placement) not in self._dealt:
            self._dealt[id(placement)] = deal_cut(placement.units, size)
        return self._dealt[id(placement)]

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
    holders: Layout, survivors: Sequence[Slots], prices: Prices, limits: Mapping[int, int] | None = None
) -> list[Dealt]:
    """What the survivors of each replica hold: what they held, and what nobody of them has any more.

    Args:
        holders: the layout in force.
        survivors: for each replica of it that goes on, the slots left.
        prices: what placement goes by.
        limits: see `CutsFromScratch`.

    Returns:
        For each replica; the intervals of slots that get nothing are the very objects of before.

    Raises:
        ValueError: if memory cannot hold what was lost.
    """
    questions = _Questions(prices, limits)
    asked = [questions.ask(slots, held_by(holders, prices.experts, slots)) for slots in survivors]
    questions.answer()
    return [[answer.dealt for answer in of_replica] for of_replica in asked]


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
    known: dict[object, Dealt] = {}
    adapted: list[Dealt] = []
    for slots in replicas:
        held = held_by(holders, experts, slots)
        cost, speeds = prices.cost_of(slots), prices.speeds(slots)
        room = None if limits is None else tuple(limits[slot] for slot in slots)
        key = (tuple(speeds), cost, room, tuple(tuple(of_layer) for of_layer in held))
        if key not in known:
            change = warm(
                count_cut(held, experts.num_experts, experts.units_per_expert),
                prices.loads,
                speeds=speeds,
                cost=cost,
                memory_units=None if room is None else np.array(room),
                budget_units=int(budget * experts.num_units),
                unit_s=unit_s,
            )
            known[key] = redeal_cut(change.units, held, experts.units_per_expert)
        adapted.append(known[key])
    return adapted


@dataclass(eq=False)
class _Question:
    """What one layer of one replica asks: who takes what is missing?

    Attributes:
        held: what each slot holds.
        layer: whose loads count.
        turn: which slot comes first where several are equally good; layers take turns.
        dealt: the answer.
    """

    held: Sequence[Intervals]
    layer: int
    turn: int
    dealt: list[Intervals]


class _Questions:
    """Collects what replicas and layers ask, so that everything that is alike is asked once, and all of it at once."""

    def __init__(self, prices: Prices, limits: Mapping[int, int] | None) -> None:
        self._prices, self._limits = prices, limits
        self._known: dict[object, _Question] = {}
        self._groups: dict[_Kind, list[_Question]] = {}
        # Layers with equal loads ask the same.
        loads = [row.tobytes() for row in prices.loads.mean]
        self._alike = [loads.index(row) for row in loads]

    def ask(self, slots: Slots, held: Held) -> list[_Question]:
        """A question for each layer."""
        prices = self._prices
        limits, alone = None, None
        if self._limits is not None:
            # Memory is shared by the layers of a replica, so its layers are a question of their own.
            limits = tuple(self._limits[slot] for slot in slots)
            alone = tuple(slots)
        kind = _Kind(tuple(prices.speeds_ppm[slot] for slot in slots), prices.cost_of(slots), limits, alone)
        asked: list[_Question] = []
        for layer, of_layer in enumerate(held):
            turn = layer % len(slots)
            key = (kind, self._alike[layer] if alone is None else layer, turn, tuple(of_layer))
            if key not in self._known:
                question = _Question(list(of_layer), layer, turn, list(of_layer))
                self._known[key] = question
                self._groups.setdefault(kind, []).append(question)
            asked.append(self._known[key])
        return asked

    def answer(self) -> None:
        """Answers all questions asked so far."""
        for kind, questions in self._groups.items():
            self._answer(kind, questions)

    def _answer(self, kind: "_Kind", questions: list[_Question]) -> None:
        experts = self._prices.experts
        held = [question.held for question in questions]
        before = count_cut(held, experts.num_experts, experts.units_per_expert)
        num_slots = len(kind.speeds_ppm)
        # Of equal slots the first one takes what does not divide; another one is first in each layer.
        equal = kind.limits is None and len(set(kind.speeds_ppm)) == 1
        turns = np.array([[question.turn if equal else 0] for question in questions])
        places = ((np.arange(num_slots) + turns) % num_slots)[:, None, :]
        after = np.empty_like(before)
        loads = ExpertLoads(mean=self._prices.loads.mean[[question.layer for question in questions]])
        turned = self._complete(np.take_along_axis(before, places, axis=2), loads, kind)
        np.put_along_axis(after, places, turned, axis=2)
        for question, intervals in zip(questions, redeal_cut(after, held, experts.units_per_expert), strict=True):
            question.dealt = intervals

    def _complete(self, cut: Integers, loads: ExpertLoads, kind: "_Kind") -> Integers:
        """The cut with what is missing."""
        speeds = np.array(kind.speeds_ppm) / 1e6
        limits = None if kind.limits is None else np.array(kind.limits)
        if not self._prices.thorough:
            work = replace(kind.cost, row_s=0.0, piece_s=0.0)
            return _fill_evenly(Problem.of(loads, speeds=speeds, cost=work, memory_units=limits), cut)
        try:
            return repair(cut, (), loads, speeds=speeds, cost=kind.cost, memory_units=limits).units
        except RuntimeError as error:
            raise ValueError(f"survivors have no room for what was lost: {error}") from error


def _fill_evenly(problem: Problem, cut: Integers) -> Integers:
    """The cut with what is missing given to the slots that are done first: what a recovery has time for.

    `repair` weighs pieces and rows against it, and takes several times as long.
    """
    state = State.of(problem, np.swapaxes(cut, 1, 2))
    missing = problem.units_per_expert - cut.sum(axis=2)
    work = (missing * problem.work_s).sum(axis=1) / problem.units_per_expert
    level = (state.seconds @ problem.speeds + work) / problem.speeds.sum()
    spread_each(state, missing, np.full_like(missing, problem.units_per_expert), level)
    return state.cut()


@dataclass(frozen=True)
class _Kind:
    """What questions have in common that can be asked together."""

    speeds_ppm: tuple[int, ...]
    cost: PlacementCost
    limits: tuple[int, ...] | None
    alone: tuple[int, ...] | None
