"""Whole experts first, then the cuts that pay."""

import numpy as np
from numpy.typing import NDArray

from nep.planning.placement.bounds import pieces_needed
from nep.planning.placement.descent import descend
from nep.planning.placement.moves import Rules
from nep.planning.placement.problem import Floats, Problem
from nep.planning.placement.spread import spread_each
from nep.planning.placement.state import State
from nep.planning.placement.whole import fill_whole

_STARTS = ((1.0, False), (1.0, True), *((factor, True) for factor in (1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.5)))
"""Deadlines to start from, as multiples of the bound, and whether an expert is cut into equal pieces for them.

Where rows are dear, an expert that the bound would cut is better left whole: a later deadline does that.
"""
_PAIRS = 400_000
"""Pairs of expert and slot, over all layers, that are worth planning from another start."""
_MOVES = 256
"""Moves per layer, at most, however many slots there are."""


def cut_what_pays(problem: Problem, bound_s: Floats) -> State:
    """Whole experts first, then the cuts that pay: the best of a few starts in each layer.

    Args:
        problem: prices and limits per layer.
        bound_s: ``[L]``, the lower bound of the seconds.
    """
    layers = problem.num_layers
    pairs = layers * problem.num_experts * problem.num_slots
    starts = list(_STARTS[: max(1, min(len(_STARTS), _PAIRS // pairs))])
    if len(starts) == 1:
        # Many experts per slot: equal pieces, whose slots others fill up, so that no slot has all the rows.
        # Few of them: pieces as large as the deadline allows, which leave full slots behind.
        starts = [(1.0, problem.num_experts >= 3 * problem.num_slots)]
    if len(starts) == 1:
        state = State.empty(problem)
        _place(state, bound_s, np.full(layers, starts[0][1]))
        polish(state)
        return state
    every = np.tile(np.arange(layers), len(starts))
    state = State.empty(problem.select(every))
    factors = np.repeat([factor for factor, _ in starts], layers)
    _place(state, bound_s[every] * factors, np.repeat([equal for _, equal in starts], layers))
    polish(state)
    best = state.busiest_s().reshape(len(starts), layers).argmin(axis=0)
    chosen = best * layers + np.arange(layers)
    return State(
        problem=problem,
        held=state.held[chosen],
        seconds=state.seconds[chosen],
        used=state.used[chosen],
    )


def _place(state: State, deadline_s: Floats, equal: NDArray[np.bool_]) -> None:
    """Cuts the experts that a deadline forces, and places the others whole where they fit.

    Args:
        state: empty; changed in place.
        deadline_s: ``[L]``, seconds that a slot may take.
        equal: ``[L]``, whether forced pieces are equally large.
    """
    problem = state.problem
    size = problem.units_per_expert
    most = min(size, int(problem.usable.sum()))
    pieces = np.minimum(pieces_needed(problem, deadline_s), most)
    forced = pieces > 1
    largest = np.where(equal[:, None], -(-size // pieces), size)
    spread_each(state, np.where(forced, size, 0), largest, deadline_s)
    left = fill_whole(state, ~forced)
    if left.any():
        spread_each(state, np.where(left, size, 0), np.full_like(pieces, size), deadline_s)


def polish(state: State, *, cut: bool = True) -> None:
    """Moves and swaps pieces while that takes seconds off the busiest slot."""
    # About as many cuts as slots make them level; what comes after is worth little. Whole experts stop sooner.
    slots = state.problem.num_slots
    rules = Rules(cut=cut, steps=min(slots + 16 if cut else max(14, slots // 4), _MOVES))
    descend(state, np.arange(state.problem.num_layers), rules)
