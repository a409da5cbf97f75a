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
    line = _Line(unit_s, problem.units_per_expert)
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
        least = np.maximum(line.units - later_limit[:, turn], 0)
        most = np.minimum(limit[:, turn], line.units)
        # Rounding of the slots before is shared by all that are left.
        due = np.maximum(level, line.load / np.maximum(later_speed[:, turn], 1e-300)) * speed[:, turn]
        start, stop = _window(line, most, least, due)
        held[rows[:, None], order[:, turn, None], density_order] = line.remove(start, stop)
    return State.of(problem, held)


class _Line:
    """What is left of the lines of all layers, as segments of the lines that they were.

    Positions count the units left. Where the whole line had every expert's units in a row, the load before a
    position follows from its place there by one division.
    """

    def __init__(self, unit_s: Floats, size: int) -> None:
        layers, experts = unit_s.shape
        self.size = size
        self.unit_s = unit_s
        self.before = np.zeros((layers, experts))
        np.cumsum(unit_s[:, :-1] * size, axis=1, out=self.before[:, 1:])
        self.rows = np.arange(layers)[:, None]
        self.left = np.full((layers, experts), size, dtype=np.int64)
        self._keep(np.zeros((layers, 1), dtype=np.int64), np.full((layers, 1), experts * size, dtype=np.int64))

    def _keep(self, starts: Integers, stops: Integers) -> None:
        """Replaces the segments, ``[L, n]``; empty ones may be among them."""
        self.starts, self.stops = starts, stops
        self.firsts = np.zeros((starts.shape[0], starts.shape[1] + 1), dtype=np.int64)
        np.cumsum(stops - starts, axis=1, out=self.firsts[:, 1:])
        self.units: Integers = self.firsts[:, -1]
        # Load that segment after segment leaves out, up to its start.
        lost = self._whole_load(starts)
        lost[:, 1:] -= self._whole_load(stops)[:, :-1]
        self.lost = np.cumsum(lost, axis=1)
        self.load: Floats = self.load_before(self.units[:, None])[:, 0]

    def _whole_load(self, place: Integers) -> Floats:
        """``[L, n]``, load before places on the lines as they were."""
        expert = np.minimum(place // self.size, self.unit_s.shape[1] - 1)
        inside = place - expert * self.size
        load: Floats = self.before[self.rows, expert] + inside * self.unit_s[self.rows, expert]
        return load

    def load_before(self, position: Integers) -> Floats:
        """``[L, n]``, load of the units before positions ``[L, n]``."""
        segment = (self.firsts[:, None, 1:-1] < position[:, :, None]).sum(axis=2)
        place = self.starts[self.rows, segment] + position - self.firsts[self.rows, segment]
        load: Floats = self._whole_load(place) - self.lost[self.rows, segment]
        return load

    def window_load(self, start: Integers, length: Integers) -> Floats:
        """``[L]``, load of windows."""
        loads = self.load_before(np.stack([start, start + length], axis=1))
        window: Floats = loads[:, 1] - loads[:, 0]
        return window

    def remove(self, start: Integers, stop: Integers) -> Integers:
        """Takes windows out and closes the lines; returns what they had of each expert, ``[L, E]``."""
        ends = np.cumsum(self.left, axis=1)
        taken = np.clip(ends, start[:, None], stop[:, None])
        taken[:, 1:] -= taken[:, :-1].copy()
        taken[:, 0] -= start
        self.left -= taken
        # Segments up to the one in which the window starts keep what is before it, and from that one on what
        # is after its end: one segment more than before.
        first, length = self.firsts[:, :-1], self.stops - self.starts
        keep_before = np.clip(start[:, None] - first, 0, length)
        keep_after = np.clip(first + length - stop[:, None], 0, length)
        segments = length.shape[1]
        split = np.minimum((self.firsts[:, 1:] < start[:, None]).sum(axis=1), segments - 1)[:, None]
        ahead = np.arange(segments + 1) <= split
        one = np.minimum(np.arange(segments + 1), segments - 1)
        last = np.maximum(np.arange(segments + 1) - 1, 0)
        starts = np.where(ahead, self.starts[:, one], (self.stops - keep_after)[:, last])
        stops = np.where(ahead, (self.starts + keep_before)[:, one], self.stops[:, last])
        filled = np.asarray((stops > starts).any(axis=0))
        filled[0] = True
        self._keep(starts[:, filled], stops[:, filled])
        return taken


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
    while (low < high).any():
        middle = (low + high) // 2
        fits = line.window_load(middle, most) <= due
        high, low = np.where(fits, middle, high), np.where(fits | (low >= high), low, middle + 1)
    load = line.window_load(low, most)
    # The window before it is heavier than due, but perhaps by less than this one is lighter.
    previous = np.maximum(low - 1, 0)
    heavier = line.window_load(previous, most)
    start = np.where((load <= due) & (heavier - due < due - load), previous, low)
    stop = start + most
    too_heavy = load > due
    if too_heavy.any():
        start = np.where(too_heavy, _coldest(line, most, least, due), start)
        stop = np.where(too_heavy, line.units, stop)
    return start, stop


def _coldest(line: _Line, most: Integers, least: Integers, due: Floats) -> Integers:
    """The start of the window of coldest units whose load comes closest to what is due."""
    first, last = line.units - most, line.units - np.minimum(least, most)
    low, high = first, last
    while (low < high).any():
        middle = (low + high) // 2
        fits = line.window_load(middle, line.units - middle) <= due
        high, low = np.where(fits, middle, high), np.where(fits | (low >= high), low, middle + 1)
    lighter = line.window_load(low, line.units - low)
    previous = np.maximum(low - 1, first)
    heavier = line.window_load(previous, line.units - previous)
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
