"""Whole experts: the longest-processing-time rule under memory limits."""

import numpy as np
from numpy.typing import NDArray

from nep.planning.placement.problem import Integers, Problem
from nep.planning.placement.state import State


def plain_whole(problem: Problem) -> tuple[State, NDArray[np.bool_]]:
    """The plain whole-expert placement that others make: by load and speed, costs unseen.

    Returns:
        The state, and ``[L]`` where every expert found a slot; the state of other layers is incomplete.
    """
    state = State.empty(problem)
    left = fill_whole(state, np.ones((problem.num_layers, problem.num_experts), dtype=bool), by_load=True)
    return state, np.asarray(~left.any(axis=1))


def fill_whole(state: State, wanted: NDArray[np.bool_], *, by_load: bool = False) -> NDArray[np.bool_]:
    """Gives each wanted expert whole to the slot that would finish first with it, hottest experts first.

    Args:
        state: what slots hold already; changed in place.
        wanted: ``[L, E]``, experts to be placed.
        by_load: compare slots by load over speed alone, as planners without a cost model do.

    Returns:
        ``[L, E]``, wanted experts that found no slot with room for all their units.
    """
    problem = state.problem
    layers, slots, size = problem.num_layers, problem.num_slots, problem.units_per_expert
    work = problem.tokens if by_load else problem.work_s
    fixed = np.zeros_like(work) if by_load else problem.row_s
    piece = np.zeros(slots) if by_load else problem.piece_s / problem.speeds
    # The wanted come first, by falling load; ties by index.
    order = np.argsort(np.where(wanted, -work - fixed, np.inf), axis=1, kind="stable")
    counts = wanted.sum(axis=1)
    steps = int(counts.max(initial=0))
    room = np.minimum(problem.limits - state.used, problem.limits) // size
    seconds = np.where(room > 0, 0.0 if by_load else state.seconds, np.inf)
    rows = np.arange(layers)
    chosen = np.full((layers, steps), -1, dtype=np.int64)
    queue_work = np.take_along_axis(work, order, axis=1).T.copy()
    queue_fixed = np.take_along_axis(fixed, order, axis=1).T.copy()
    even = bool((problem.speeds == problem.speeds[0]).all())
    slowness = 1 / problem.speeds
    if not even:
        seconds += piece
    first, flat, flat_room = rows * slots, seconds.reshape(-1), room.reshape(-1)
    uniform = bool((counts == steps).all())
    for step in range(steps):
        # On slots of one speed the expert adds the same everywhere and need not be looked at.
        finish = seconds if even else seconds + np.outer(queue_work[step], slowness)
        slot = finish.argmin(axis=1)
        where = first + slot
        now = flat[where]
        fits = np.isfinite(now)
        if not uniform:
            fits &= step < counts
        flat[where] = np.where(fits, now + queue_work[step] * slowness[slot] + queue_fixed[step] + piece[slot], now)
        flat_room[where] -= fits
        full = where[flat_room[where] <= 0]
        flat[full] = np.inf
        chosen[:, step] = np.where(fits, slot, -1)
    return _store(state, wanted, order[:, :steps], chosen)


def _store(state: State, wanted: NDArray[np.bool_], order: Integers, chosen: Integers) -> NDArray[np.bool_]:
    """Writes a whole-expert assignment into the state."""
    problem = state.problem
    layer, step = np.nonzero(chosen >= 0)
    slot, expert = chosen[layer, step], order[layer, step]
    size = problem.units_per_expert
    state.held[layer, slot, expert] += size
    shape = state.seconds.shape
    flat = layer * problem.num_slots + slot
    speed = problem.speeds[slot]
    cost = (problem.work_s[layer, expert] + problem.piece_s) / speed + problem.row_s[layer, expert]
    state.seconds += np.bincount(flat, weights=cost, minlength=state.seconds.size).reshape(shape)
    state.used += size * np.bincount(flat, minlength=state.seconds.size).reshape(shape)
    left = wanted.copy()
    left[layer, expert] = False
    return left
