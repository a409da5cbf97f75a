"""Whole experts: the longest-processing-time rule under memory limits."""

from dataclasses import dataclass

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
    slots, size = problem.num_slots, problem.units_per_expert
    work = problem.tokens if by_load else problem.work_s
    fixed = np.zeros_like(work) if by_load else problem.row_s
    piece = np.zeros(slots) if by_load else problem.piece_s / problem.speeds
    # The wanted come first, by falling load; ties by index.
    order = np.argsort(np.where(wanted, -work - fixed, np.inf), axis=1, kind="stable")
    room = (problem.limits - state.used) // size
    counts = wanted.sum(axis=1)
    steps = int(counts.max(initial=0))
    queue = _Queue(
        work=np.take_along_axis(work, order, axis=1).T[:steps].copy(),
        fixed=np.take_along_axis(fixed, order, axis=1).T[:steps].copy(),
        piece=piece,
        counts=counts,
        seconds=np.where(room > 0, 0.0 if by_load else state.seconds, np.inf),
        room=room,
    )
    even = bool((problem.speeds == problem.speeds[0]).all())
    all_fit = (counts == steps).all() and (np.maximum(room, 0).sum(axis=1) >= steps).all()
    chosen = _all_on_even_slots(queue, problem.speeds[0]) if even and all_fit else _one_by_one(queue, problem.speeds)
    return _store(state, wanted, order[:, :steps], chosen.T)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Queue:
    """Experts in the order of their turn, and the slots that take them; the latter are used up.

    Attributes:
        work: ``[steps, L]``, seconds on a slot of speed 1.
        fixed: ``[steps, L]``, seconds on any slot.
        piece: ``[S]``, seconds of a piece.
        counts: ``[L]``, how many experts of each layer are waiting.
        seconds: ``[L, S]``, infinite for full slots.
        room: ``[L, S]``, whole experts that fit.
    """

    work: Floats
    fixed: Floats
    piece: Floats
    counts: Integers
    seconds: Floats
    room: Integers


def _one_by_one(queue: _Queue, speeds: Floats) -> Integers:
    """``[steps, L]``, the slot of each expert, -1 if none has room."""
    steps, layers = queue.work.shape
    first = np.arange(layers) * speeds.size
    flat, flat_room = queue.seconds.reshape(-1), queue.room.reshape(-1)
    slowness = 1 / speeds
    chosen = np.full((steps, layers), -1, dtype=np.int64)
    for step in range(steps):
        slot = (queue.seconds + np.outer(queue.work[step], slowness) + queue.piece).argmin(axis=1)
        where = first + slot
        fits = np.isfinite(flat[where]) & (step < queue.counts)
        slot, where = slot[fits], where[fits]
        chosen[step, fits] = slot
        flat[where] += queue.work[step, fits] * slowness[slot] + queue.fixed[step, fits] + queue.piece[slot]
        flat_room[where] -= 1
        flat[where[flat_room[where] == 0]] = np.inf
    return chosen


def _all_on_even_slots(queue: _Queue, speed: float) -> Integers:
    """The same in a third of the time, where every expert fits and all slots are equally fast."""
    steps, layers = queue.work.shape
    first = np.arange(layers) * queue.piece.size
    flat, flat_room = queue.seconds.reshape(-1), queue.room.reshape(-1)
    # The expert adds the same everywhere, so it need not be looked at to find the slot.
    added = queue.work / speed + queue.fixed + queue.piece[0]
    places = np.empty((steps, layers), dtype=np.int64)
    for step in range(steps):
        where = first + queue.seconds.argmin(axis=1)
        places[step] = where
        flat[where] += added[step]
        flat_room[where] -= 1
        flat[where[flat_room[where] == 0]] = np.inf
    places -= first
    return places


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
