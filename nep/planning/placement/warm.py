"""Changing a placement in force: only what pays for its journey."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.bounds import Bound, lower_bound
from nep.planning.placement.descent import descend
from nep.planning.placement.moves import Rules
from nep.planning.placement.objective import check_cut
from nep.planning.placement.problem import Cut, Floats, Integers, Problem, slot_seconds
from nep.planning.placement.state import State, mean_seconds

_THRIFTS = (0.1, 1.0)
"""With few units to be moved, slices of hot experts do most for each, and that their rows cost others is the
lesser evil; with many (the second), the rows add up."""
_MANY = 0.03
_LEVELS = (1.4, 1.25, 1.16, 1.1, 1.07, 1.045, 1.03, 1.02, 1.01, 1.0)
"""Levels of the busiest slot to aim at, as multiples of the mean: each needs more moves than the one before."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """A placement that grew out of another one.

    Attributes:
        units: ``[layers, experts, slots]``, the new cut.
        before_s: ``[layers]``, predicted seconds of the cut in force under the new loads; infinite where it is
            not complete.
        seconds: ``[layers]``, of the new cut.
        bound: what no placement without expert copies can be faster than.
        moved_units: units that a slot has to receive, all layers together.
        lost_units: of these, units that nobody held any more.
        note: why nothing, or no more, was moved.
    """

    units: Cut
    before_s: Floats
    seconds: Floats
    bound: Bound
    moved_units: int
    lost_units: int = 0
    note: str = ""

    @property
    def total_s(self) -> float:
        """Predicted seconds of all layers together."""
        return float(self.seconds.sum())


def warm(
    units: Cut,
    loads: ExpertLoads,
    *,
    speeds: ArrayLike,
    cost: PlacementCost,
    memory_units: ArrayLike | None = None,
    budget_units: int | None = None,
    unit_s: float = 0.0,
) -> Change:
    """Adapts a placement to new loads or speeds by the moves that gain most for what they carry.

    Args:
        units: ``[layers, experts, slots]``, the complete cut in force.
        loads: the new ones.
        speeds: ``[slots]``.
        cost: seconds per token, row and piece.
        memory_units: as for `place`; a slot that holds more already keeps it and gets nothing.
        budget_units: most units that may be moved, all layers together; None for as many as pay.
        unit_s: seconds per step that moving one unit must gain to pay (its transfer over the steps that the
            new placement will be in force).

    Raises:
        ValueError: with everything that is wrong with the input.
    """
    problem = Problem.of(loads, speeds=speeds, cost=cost, memory_units=memory_units)
    check_cut(problem, units, complete=True)
    held = np.ascontiguousarray(np.swapaxes(units, 1, 2)).astype(np.int64)
    before = slot_seconds(problem, held).max(axis=1)
    total = problem.num_layers * problem.units_per_layer
    after, moved, note = improve(problem, held, total if budget_units is None else budget_units, unit_s)
    return Change(
        units=np.swapaxes(after, 1, 2),
        before_s=before,
        seconds=slot_seconds(problem, after).max(axis=1),
        bound=lower_bound(problem),
        moved_units=moved,
        note=note,
    )


def improve(
    problem: Problem, held: Integers, budget_units: int, unit_s: float, kept: Integers | None = None
) -> tuple[Integers, int, str]:
    """Moves pieces from the busiest slots, as far as it pays.

    Args:
        problem: prices and limits.
        held: ``[L, S, E]``, complete.
        budget_units: most units that may be moved, all layers together.
        unit_s: seconds that a moved unit must gain.
        kept: ``[L, S, E]``, what slots have and need not receive; None means ``held``.

    Returns:
        What slots hold afterwards, the units they have to receive beyond ``kept`` less those that ``held``
        already needed, and why no more was moved.
    """
    stages = _stages(problem, held, held if kept is None else kept, budget_units)
    moved = np.stack([stage.moved for stage in stages], axis=1)
    seconds = np.stack([stage.seconds for stage in stages], axis=1)
    used = np.stack([stage.held.sum(axis=2) for stage in stages], axis=1)
    chosen, note = _choose(problem, moved, seconds, used, budget_units, unit_s)
    after = held.copy()
    for index, stage in enumerate(stages):
        rows = np.flatnonzero(chosen == index)
        after[rows] = stage.held[rows]
    total = int((np.take_along_axis(moved, chosen[:, None], axis=1)[:, 0]).sum())
    return after, total, note


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stage:
    """A cut on the way from the one in force to a level one; ``moved`` and ``seconds`` are ``[L]``."""

    held: Integers
    moved: Integers
    seconds: Floats


def _stages(problem: Problem, held: Integers, kept: Integers, budget: int) -> list[_Stage]:
    """The cut in force, and what it becomes as the busiest slots are taken down level by level."""
    guided = problem.guided()
    layers = np.arange(problem.num_layers)
    needed = _received(held, kept)
    stages = [_Stage(held=held, moved=np.zeros_like(needed), seconds=slot_seconds(problem, held).max(axis=1))]
    many = budget > _MANY * problem.num_layers * problem.units_per_layer
    for thrift in _THRIFTS if many else _THRIFTS[:1]:
        state = State.of(guided, held)
        # A pool counts in full for every layer here; `_choose` sees to it that not all of them use it.
        state.problem = guided.split(state.used + state.room())
        rules = Rules(per_unit=True, thrift=thrift, tolerance=2e-3, steps=2 * problem.num_slots)
        for level in _LEVELS:
            target = mean_seconds(state, layers) * level
            if (state.busiest_s() <= target * (1 + rules.tolerance)).all():
                continue
            descend(state, layers, rules, target)
            moved = _received(state.held, kept) - needed
            seconds = slot_seconds(problem, state.held).max(axis=1)
            stages.append(_Stage(held=state.held.copy(), moved=moved, seconds=seconds))
            # Lower levels are for layers that take more than their part of the budget, up to a point.
            if moved.sum() > 2 * budget:
                break
    return stages


def _received(held: Integers, kept: Integers) -> Integers:
    """``[L]``, units that slots hold and did not have."""
    received: Integers = np.maximum(held - kept, 0).sum(axis=(1, 2))
    return received


def _choose(
    problem: Problem, moved: Integers, seconds: Floats, used: Integers, budget: int, unit_s: float
) -> tuple[Integers, str]:
    """Which stage each layer goes to: the step that gains most per unit first, until nothing pays or fits.

    Args:
        problem: its pool is a limit over all layers.
        moved: ``[L, n]``, units that have to travel by each stage.
        seconds: ``[L, n]``, of each stage.
        used: ``[L, n, S]``, units held by each stage.
        budget: most units that may travel.
        unit_s: seconds that a unit must gain.
    """
    layers, stages = moved.shape
    chosen = np.zeros(layers, dtype=np.int64)
    # Half of what fits into 64 bits: room for what slots give up, too.
    room = np.full(problem.num_slots, np.iinfo(np.int64).max // 2)
    if problem.pool is not None:
        room = problem.pool - used[:, 0].sum(axis=0)
    left = budget
    note = "nothing more pays"
    blocked = np.zeros((layers, stages), dtype=bool)
    rows = np.arange(layers)
    while True:
        gain = seconds[rows, chosen][:, None] - seconds
        units = moved - moved[rows, chosen][:, None]
        ahead = ~blocked & (gain > 1e-9 * seconds[:, :1])
        worth = np.where(ahead, gain / np.maximum(units, 0.5), -np.inf)
        worth[gain <= unit_s * units] = -np.inf
        layer, stage = np.unravel_index(int(worth.argmax()), worth.shape)
        if np.isneginf(worth[layer, stage]):
            return chosen, note
        change = used[layer, stage] - used[layer, chosen[layer]]
        if units[layer, stage] > left:
            blocked[layer, stage] = True
            note = "the budget is spent"
        elif ((change > room) & (change > 0)).any():
            blocked[layer, stage] = True
            note = "memory is full"
        else:
            left -= int(units[layer, stage])
            room = room - change
            chosen[layer] = stage
