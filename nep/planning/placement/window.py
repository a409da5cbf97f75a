"""The window cut: exact shares of load with exact shares of memory, in few cuts.

All units of a layer lie on a line, those of the hottest expert first. A window of fixed memory that slides
along the line has every load between that of the hottest and that of the coldest units, so a slot can take one
with exactly its memory and its load. What is left is spliced and the next slot takes its window: 2 (S - 1)
extra pieces at most.
"""

import numpy as np

from nep.planning.placement.problem import Floats, Integers, Problem
from nep.planning.placement.state import State


def window_cut(problem: Problem) -> State:
    """Cuts every layer by windows, for the shortest time that memory and speeds allow.

    Rows and pieces are not looked at: by arithmetic alone the cut is as good as fractions of experts can be,
    up to the rounding to whole units (which is passed on from slot to slot, so it does not add up).

    Args:
        problem: prices and limits; each layer on its own, a pool must have been split.
    """
    layers, slots = problem.num_layers, problem.num_slots
    density_order = np.argsort(-problem.work_s, axis=1, kind="stable")
    unit_s = np.take_along_axis(problem.work_s, density_order, axis=1) / problem.units_per_expert
    left = np.full((layers, problem.num_experts), problem.units_per_expert, dtype=np.int64)
    order = _turns(problem)
    limit = np.take_along_axis(problem.limits, order, axis=1)
    speed = np.where(limit > 0, problem.speeds[order], 0.0)
    level = _deadline(problem, order, unit_s)
    # What the slots whose turn comes later can hold and do.
    later_limit = np.cumsum(limit[:, ::-1], axis=1)[:, ::-1] - limit
    later_speed = np.cumsum(speed[:, ::-1], axis=1)[:, ::-1]
    held = np.zeros((layers, slots, problem.num_experts), dtype=np.int64)
    rows = np.arange(layers)
    for turn in range(slots):
        line = _Line(left, unit_s)
        least = np.maximum(line.units - later_limit[:, turn], 0)
        most = np.minimum(limit[:, turn], line.units)
        # Rounding of the slots before is shared by all that are left.
        due = np.maximum(level, line.load / np.maximum(later_speed[:, turn], 1e-300)) * speed[:, turn]
        start, stop = _window(line, most, least, due)
        taken = _between(line, start, stop)
        held[rows[:, None], order[:, turn, None], density_order] = taken
        left -= taken
    return State.of(problem, held)


class _Line:
    """What is left of the lines: sums of units and seconds before each expert, ``[L, E + 1]``."""

    def __init__(self, left: Integers, unit_s: Floats) -> None:
        layers, experts = left.shape
        self.ends = np.zeros((layers, experts + 1), dtype=np.int64)
        np.cumsum(left, axis=1, out=self.ends[:, 1:])
        self.loads = np.zeros((layers, experts + 1))
        np.cumsum(left * unit_s, axis=1, out=self.loads[:, 1:])
        self.unit_s = unit_s
        self.rows = np.arange(layers)
        self.units: Integers = self.ends[:, -1]
        self.load: Floats = self.loads[:, -1]

    def load_before(self, position: Integers) -> Floats:
        """``[L]``, seconds of the units before a position of each line."""
        expert = (self.ends[:, 1:] < position[:, None]).sum(axis=1)
        expert = np.minimum(expert, self.unit_s.shape[1] - 1)
        inside = position - self.ends[self.rows, expert]
        load: Floats = self.loads[self.rows, expert] + inside * self.unit_s[self.rows, expert]
        return load


def _between(line: _Line, start: Integers, stop: Integers) -> Integers:
    """``[L, E]``, units of each expert between two positions of each line."""
    clipped = np.clip(line.ends, start[:, None], stop[:, None])
    return np.diff(clipped, axis=1)


def _window(line: _Line, most: Integers, least: Integers, due: Floats) -> tuple[Integers, Integers]:
    """Where the window of a slot lies.

    It is as long as memory allows and lies where its load comes closest to what is due; if even the coldest
    such window is too heavy, it is the longest of the coldest units that is not.

    Args:
        line: what is left.
        most: ``[L]``, units that the slot may take.
        least: ``[L]``, units that it must take, or the slots after it could not hold the rest.
        due: ``[L]``, seconds.

    Returns:
        Start and stop of the window, ``[L]`` each.
    """
    low = np.zeros_like(most)
    high = line.units - most  # the coldest window
    # The first position at which the window is not heavier than what is due, or the last of all.
    while True:
        open_ = low < high
        if not open_.any():
            break
        middle = (low + high) // 2
        load = line.load_before(middle + most) - line.load_before(middle)
        fits = load <= due
        high = np.where(open_ & fits, middle, high)
        low = np.where(open_ & ~fits, middle + 1, low)
    start = low
    load = line.load_before(start + most) - line.load_before(start)
    # The window before it is heavier than due, but perhaps by less than this one is lighter.
    previous = np.maximum(start - 1, 0)
    heavier = line.load_before(previous + most) - line.load_before(previous)
    start = np.where((start > 0) & (load <= due) & (heavier - due < due - load), previous, start)
    too_heavy = load > due
    if not too_heavy.any():
        return start, start + most
    return np.where(too_heavy, _coldest(line, most, least, due), start), np.where(
        too_heavy, line.units, start + most
    )


def _coldest(line: _Line, most: Integers, least: Integers, due: Floats) -> Integers:
    """The start of the window of coldest units whose load comes closest to what is due."""
    low, high = line.units - most, line.units - np.minimum(least, most)
    first, last = low, high
    while (low < high).any():
        middle = (low + high) // 2
        fits = line.load - line.load_before(middle) <= due
        high = np.where(fits, middle, high)
        low = np.where((low < high) & ~fits, middle + 1, low)
    lighter = line.load - line.load_before(low)
    previous = np.maximum(low - 1, first)
    heavier = line.load - line.load_before(previous)
    start = np.where((lighter <= due) & (heavier - due < due - lighter), previous, low)
    return np.clip(start, first, last)


def _turns(problem: Problem) -> Integers:
    """``[L, S]``, slots in the order of their turn: those with the most speed for their memory first."""
    ratio = np.where(problem.limits > 0, problem.speeds / np.maximum(problem.limits, 1), -1.0)
    return np.argsort(-ratio, axis=1, kind="stable")


def _deadline(problem: Problem, order: Integers, unit_s: Floats) -> Floats:
    """``[L]``, the shortest time in which fractions of experts can be done: the optimum of the linear program.

    Every prefix of the slots, in the order of their turns, can at most take the hottest units that fit into
    its memory; what is left of the load is for the others. The longest of these times is also long enough.
    """
    limit = np.take_along_axis(problem.limits, order, axis=1)
    speed = np.where(limit > 0, problem.speeds[order], 0.0)
    memory = np.zeros_like(limit)
    memory[:, 1:] = np.cumsum(limit[:, :-1], axis=1)
    others = np.cumsum(speed[:, ::-1], axis=1)[:, ::-1]
    size = problem.units_per_expert
    before = np.concatenate([np.zeros((problem.num_layers, 1)), np.cumsum(unit_s * size, axis=1)], axis=1)
    units = np.minimum(memory, problem.units_per_layer)
    whole = units // size
    following = np.minimum(whole, problem.num_experts - 1)
    fits = np.take_along_axis(before, whole, axis=1)
    fits = fits + (units - whole * size) * np.take_along_axis(unit_s, following, axis=1)
    left = before[:, -1:] - fits
    real = (left > 1e-12 * before[:, -1:]) & (others > 0)
    bounds: Floats = np.where(real, left / np.where(real, others, 1.0), 0.0).max(axis=1)
    return bounds
