"""Whole experts first, then the cuts that pay."""

import numpy as np

from nep.planning.placement.bounds import pieces_needed
from nep.planning.placement.descent import Rules, descend
from nep.planning.placement.problem import Floats, Integers, Problem
from nep.planning.placement.spread import Portion, spread
from nep.planning.placement.state import State
from nep.planning.placement.whole import fill_whole


def place_with_cuts(problem: Problem, deadline_s: Floats) -> State:
    """Cuts the experts that a deadline forces, places the others whole, and then cuts what pays.

    Args:
        problem: prices and limits per layer.
        deadline_s: ``[L]``, seconds that a slot may take: the lower bound, or somewhat more.
    """
    state = State.empty(problem)
    most = min(problem.units_per_expert, int(problem.usable.sum()))
    pieces = np.minimum(pieces_needed(problem, deadline_s), most)
    forced = pieces > 1
    # Few experts on many slots: pieces as large as the deadline allows leave full slots behind. Many experts:
    # equal pieces, whose slots others fill up, and no slot has all the rows.
    equal = problem.num_experts >= 3 * problem.num_slots
    limit = -(-problem.units_per_expert // pieces) if equal else np.full_like(pieces, problem.units_per_expert)
    spread_each(state, np.where(forced, problem.units_per_expert, 0), limit, deadline_s)
    left = fill_whole(state, ~forced)
    if left.any():
        units = np.where(left, problem.units_per_expert, 0)
        spread_each(state, units, np.full_like(pieces, problem.units_per_expert), deadline_s)
    return state


def spread_each(state: State, units: Integers, max_units: Integers, level_s: Floats) -> None:
    """Spreads units of several experts of every layer, the hottest expert first.

    Args:
        state: changed in place.
        units: ``[L, E]``, to be placed.
        max_units: ``[L, E]``, most that one slot may get of an expert.
        level_s: ``[L]``, seconds up to which slots may be filled.
    """
    problem = state.problem
    weight = np.where(units > 0, problem.work_s + problem.row_s, -1.0)
    order = np.argsort(-weight, axis=1, kind="stable")
    for rank in range(int((units > 0).sum(axis=1).max(initial=0))):
        expert = order[:, rank]
        layers = np.flatnonzero(units[np.arange(problem.num_layers), expert] > 0)
        expert = expert[layers]
        portion = Portion(
            layers=layers,
            experts=expert,
            units=units[layers, expert],
            max_units=max_units[layers, expert],
        )
        spread(state, portion, level_s[layers])


def polish(state: State, *, cut: bool = True) -> None:
    """Moves and swaps pieces while that takes seconds off the busiest slot."""
    # About as many moves as slots make them level; what comes after is worth little.
    rules = Rules(cut=cut, steps=state.problem.num_slots + 16)
    descend(state, np.arange(state.problem.num_layers), rules)
