"""Whole experts: the longest-processing-time rule under memory limits."""

import numpy as np
from numpy.typing import NDArray

from nep.planning.placement.problem import Floats, Integers, Problem
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
    work_in_order = np.take_along_axis(work, order, axis=1).T.copy()
    fixed_in_order = np.take_along_axis(fixed, order, axis=1).T.copy()
    chosen = np.full((steps, layers), -1, dtype=np.int64)
    if (counts == steps).all() and (np.maximum(room, 0).sum(axis=1) >= steps).all():
        _choose_all(seconds, room, work_in_order, fixed_in_order, piece, problem.speeds, chosen)
    else:
        _choose_some(seconds, room, work_in_order, fixed_in_order, piece, problem.speeds, chosen, counts)
    return _store(state, wanted, order[:, :steps], chosen.T)


def _choose_all(
    seconds: Floats,
    room: Integers,
    work: Floats,
    fixed: Floats,
    piece: Floats,
    speeds: Floats,
    chosen: Integers,
) -> None:
    """Fills ``chosen`` ``[steps, L]`` where all experts find a slot; ``seconds`` and ``room`` are used up."""
    layers, slots = seconds.shape
    first, flat, flat_room = np.arange(layers) * slots, seconds.reshape(-1), room.reshape(-1)
    if (speeds == speeds[0]).all():
        # The expert adds the same everywhere and need not be looked at.
        added = work / speeds[0] + fixed + piece[0]
        for step in range(chosen.shape[0]):
            where = first + seconds.argmin(axis=1)
            chosen[step] = where
            flat[where] += added[step]
            flat_room[where] -= 1
            flat[where[flat_room[where] == 0]] = np.inf
        chosen -= first
        return
    slowness = 1 / speeds
    for step in range(chosen.shape[0]):
        slot = (seconds + np.outer(work[step], slowness) + piece).argmin(axis=1)
        where = first + slot
        chosen[step] = slot
        flat[where] += work[step] * slowness[slot] + fixed[step] + piece[slot]
        flat_room[where] -= 1
        flat[where[flat_room[where] == 0]] = np.inf


def _choose_some(
    seconds: Floats,
    room: Integers,
    work: Floats,
    fixed: Floats,
    piece: Floats,
    speeds: Floats,
    chosen: Integers,
    counts: Integers,
) -> None:
    """The same where layers have unequally many experts to place, or not all of them fit (-1)."""
    layers, slots = seconds.shape
    first, flat, flat_room = np.arange(layers) * slots, seconds.reshape(-1), room.reshape(-1)
    slowness = 1 / speeds
    for step in range(chosen.shape[0]):
        slot = (seconds + np.outer(work[step], slowness) + piece).argmin(axis=1)
        where = first + slot
        fits = np.isfinite(flat[where]) & (step < counts)
        slot, where = slot[fits], where[fits]
        chosen[step, fits] = slot
        flat[where] += work[step, fits] * slowness[slot] + fixed[step, fits] + piece[slot]
        flat_room[where] -= 1
        flat[where[flat_room[where] == 0]] = np.inf


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
