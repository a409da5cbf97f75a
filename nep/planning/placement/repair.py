"""After slots were lost: survivors keep what they hold, and what nobody holds any more is spread over them."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.bounds import lower_bound
from nep.planning.placement.objective import check_cut
from nep.planning.placement.paying_cuts import polish
from nep.planning.placement.pool import split_pool
from nep.planning.placement.problem import Cut, Floats, Integers, Problem, slot_seconds
from nep.planning.placement.spread import spread_each
from nep.planning.placement.state import State
from nep.planning.placement.warm import Change, improve

_SLACKS = (1.0, 1.06, 1.2)
"""Levels to fill survivors to, as multiples of the mean: a higher one needs fewer pieces, so fewer rows."""
_PAIRS = 2_000_000
"""Pairs of expert and slot, over all layers, beyond which the first good plan is taken: recovery is waiting."""


def repair(
    units: Cut,
    lost: Iterable[int],
    loads: ExpertLoads,
    *,
    speeds: ArrayLike,
    cost: PlacementCost,
    memory_units: ArrayLike | None = None,
    extra_units: int = 0,
    quick: bool = False,
) -> Change:
    """Places what the lost slots held on the slots that are left, with the least movement.

    Args:
        units: ``[layers, experts, slots]``, the cut in force. Units that it has nowhere are placed too.
        lost: slots that hold nothing any more; they stay in the arrays, without units.
        loads: of this replica.
        speeds: ``[slots]``; those of lost slots do not matter.
        cost: seconds per token, row and piece.
        memory_units: as for `place`; a slot that holds more already keeps it and gets nothing.
        extra_units: how many units more than the lost ones may be moved where that gains seconds.
        quick: take the first good plan and not the best of a few; for many damaged replicas at once.

    Raises:
        ValueError: with everything that is wrong with the input, or if the memory left cannot hold the experts.
    """
    gone = np.array(sorted(set(lost)), dtype=np.int64)
    problem = Problem.of(loads, speeds=speeds, cost=cost, memory_units=memory_units)
    check_cut(problem, units)
    if gone.size and not 0 <= gone[0] <= gone[-1] < problem.num_slots:
        raise ValueError(f"lost slots {gone.tolist()} must be of the {problem.num_slots} slots of the cut")
    if gone.size == problem.num_slots:
        raise ValueError(f"all {gone.size} slots are lost; restart from a checkpoint")
    problem = problem.without(gone)
    kept = np.swapaxes(units, 1, 2).astype(np.int64, order="C")
    kept[:, gone] = 0
    missing = problem.units_per_expert - kept.sum(axis=1)
    if (missing < 0).any():
        raise ValueError("the cut holds more units of an expert than there are; each has one place")
    held = spread_missing(problem, kept, missing, quick=quick or kept.size > _PAIRS)
    moved, note = 0, ""
    if extra_units > 0:
        held, moved, note = improve(problem, held, extra_units, 0.0, kept)
    return Change(
        units=np.swapaxes(held, 1, 2),
        before_s=np.where(missing.any(axis=1), np.inf, slot_seconds(problem, kept).max(axis=1)),
        seconds=slot_seconds(problem, held).max(axis=1),
        bound=lower_bound(problem),
        moved_units=int(missing.sum()) + moved,
        lost_units=int(missing.sum()),
        note=note,
    )


def spread_missing(problem: Problem, kept: Integers, missing: Integers, *, quick: bool) -> Integers:
    """Spreads missing units over the slots, in the fewest seconds that are found.

    Args:
        problem: prices and limits; lost slots have no memory.
        kept: ``[L, S, E]``, what slots hold.
        missing: ``[L, E]``, units to be placed.
        quick: whether the first way to do it is good enough.

    Returns:
        ``[L, S, E]``.
    """
    guided = problem.guided()
    whole = np.full_like(missing, problem.units_per_expert)
    start = State.of(guided, kept)
    level = _mean_after(start, missing)
    # Filling up to the busiest slot costs nothing, whatever the mean.
    level = np.maximum(level, start.busiest_s())
    if quick:
        spread_each(start, missing, whole, level)
        return start.held
    tries: list[Integers] = []
    seconds: list[Floats] = []
    for slack in _SLACKS:
        state = State(problem=guided, held=kept.copy(), seconds=start.seconds.copy(), used=start.used.copy())
        spread_each(state, missing, whole, level * slack)
        _rearrange(state, kept)
        tries.append(state.held)
        seconds.append(slot_seconds(problem, state.held).max(axis=1))
    table = np.stack(seconds)
    held = tries[int(table.sum(axis=1).argmin())]
    mixed = held.copy()
    for layer in np.flatnonzero(missing.any(axis=1)):
        mixed[layer] = tries[int(table[:, layer].argmin())][layer]
    # The best of every layer, unless together they need more of a pool than there is.
    if problem.pool is None or (mixed.sum(axis=(0, 2)) <= np.maximum(problem.pool, held.sum(axis=(0, 2)))).all():
        return mixed
    return held


def _rearrange(state: State, kept: Integers) -> None:
    """Moves what has only just been placed once more, where that gains seconds: it has not travelled yet."""
    problem = state.problem
    if problem.pool is not None:
        # Layers share what the pool has left in the proportion in which it was used up.
        even = split_pool(np.maximum(problem.pool - state.used.sum(axis=0), 0), problem.num_layers)
        state.problem = problem.split(state.used + even)
    state.fixed = kept
    polish(state)


def _mean_after(state: State, missing: Integers) -> Floats:
    """``[L]``, mean seconds of the slots once they have everything, each missing expert in one piece."""
    problem = state.problem
    speeds = np.where(problem.usable, problem.speeds, 0.0)
    part = missing / problem.units_per_expert
    work = (part * problem.work_s + problem.piece_s * (missing > 0)).sum(axis=1)
    rows = (problem.row_s * (missing > 0)).sum(axis=1) * speeds.sum() / problem.usable.sum()
    mean: Floats = (state.seconds @ speeds + work + rows) / speeds.sum()
    return mean
