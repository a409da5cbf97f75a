"""A cut under construction: what every slot holds, and the seconds and memory that it amounts to."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nep.planning.placement.problem import Floats, Integers, Problem, slot_seconds


@dataclass(eq=False)
class State:
    """What slots hold, in arrays that planners change in place.

    Attributes:
        problem: prices and limits.
        held: ``[L, S, E]``, units. Slots before experts: a planner looks at all that one slot holds.
        seconds: ``[L, S]``, by the prices of ``problem``, kept up to date by `add` and `move`.
        used: ``[L, S]``, units.
        fixed: ``[L, S, E]``, units that must stay where they are; None if all may move.
    """

    problem: Problem
    held: Integers
    seconds: Floats
    used: Integers
    fixed: Integers | None = None

    @classmethod
    def empty(cls, problem: Problem) -> "State":
        """Nothing placed yet."""
        layers, slots = problem.num_layers, problem.num_slots
        return cls(
            problem=problem,
            held=np.zeros((layers, slots, problem.num_experts), dtype=np.int64),
            seconds=np.zeros((layers, slots)),
            used=np.zeros((layers, slots), dtype=np.int64),
        )

    @classmethod
    def of(cls, problem: Problem, held: Integers) -> "State":
        """A state that holds a copy of this, ``[L, S, E]``."""
        return cls(
            problem=problem,
            held=held.copy(),
            seconds=slot_seconds(problem, held),
            used=held.sum(axis=2),
        )

    def room(self) -> Integers:
        """``[L, S]``, units that a slot can still take of a layer; a pool counts in full for every layer."""
        room = self.problem.limits - self.used
        if self.problem.pool is not None:
            room = np.minimum(room, self.problem.pool - self.used.sum(axis=0))
        free: Integers = np.maximum(room, 0)
        return free

    def new_piece_s(self, layers: Integers, experts: Integers) -> Floats:
        """``[n, S]``, seconds that a piece of these experts costs each slot before it has any unit of it."""
        problem = self.problem
        fixed = problem.row_s[layers, experts][:, None] + problem.piece_s / problem.speeds
        return np.where(self.held[layers, :, experts] > 0, 0.0, fixed)

    def unit_s(self, layers: Integers, experts: Integers) -> Floats:
        """``[n, S]``, seconds of one unit of these experts on each slot."""
        problem = self.problem
        unit = problem.work_s[layers, experts] / problem.units_per_expert
        return unit[:, None] / problem.speeds

    def add(self, layers: Integers, slots: Integers, experts: Integers, units: Integers) -> None:
        """Gives slots units of an expert; each pair of layer and slot at most once in a call.

        Args:
            layers: ``[n]``.
            slots: ``[n]``.
            experts: ``[n]``.
            units: ``[n]``, at least 1.
        """
        problem = self.problem
        speed = problem.speeds[slots]
        fresh = self.held[layers, slots, experts] == 0
        fixed = problem.row_s[layers, experts] + problem.piece_s / speed
        work = problem.work_s[layers, experts] * units / (problem.units_per_expert * speed)
        self.seconds[layers, slots] += work + np.where(fresh, fixed, 0.0)
        self.held[layers, slots, experts] += units
        self.used[layers, slots] += units

    def take(self, layers: Integers, slots: Integers, experts: Integers, units: Integers) -> None:
        """Takes units of an expert from slots that hold them; each pair of layer and slot at most once."""
        problem = self.problem
        speed = problem.speeds[slots]
        self.held[layers, slots, experts] -= units
        gone = self.held[layers, slots, experts] == 0
        fixed = problem.row_s[layers, experts] + problem.piece_s / speed
        work = problem.work_s[layers, experts] * units / (problem.units_per_expert * speed)
        self.seconds[layers, slots] -= work + np.where(gone, fixed, 0.0)
        self.used[layers, slots] -= units

    def cut(self) -> Integers:
        """``[L, E, S]``, a copy."""
        return np.ascontiguousarray(np.swapaxes(self.held, 1, 2))

    def busiest_s(self) -> Floats:
        """``[L]``, seconds of the busiest slot."""
        busiest: Floats = self.seconds.max(axis=1)
        return busiest


def mean_seconds(state: State, rows: NDArray[np.int64]) -> Floats:
    """``[n]``, seconds of each of these layers if the work were spread evenly by speed."""
    speeds = np.where(state.problem.usable, state.problem.speeds, 0.0)
    spread: Floats = state.seconds[rows] @ speeds / speeds.sum()
    return spread
