"""Which piece, or part of one, the busiest slot of a layer should give to which other slot.

Legend of array dimensions: ``A`` layers worked on, ``K`` pieces of the busiest slot, ``B`` slots that might
take some of one, ``O`` options of how many units go.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nep.planning.placement.problem import Floats, Integers
from nep.planning.placement.state import State

TINY = 1e-150
_TAKERS = 8


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a descent may do.

    Attributes:
        cut: whether pieces may be cut; otherwise they go whole.
        per_unit: whether gain is counted per unit moved (what is moved must travel) or as such.
        thrift: what a second added elsewhere counts. Below 1, room on other slots is taken for cheap.
        steps: most moves per layer.
        tolerance: how far above the level, relatively, a layer is done.
        least_gain: relative gain of the busiest slot below which a move is not worth it.
    """

    cut: bool = True
    per_unit: bool = False
    thrift: float = 1.0
    steps: int = 48
    tolerance: float = 5e-4
    least_gain: float = 3e-4


@dataclass(frozen=True, kw_only=True, eq=False)
class Front:
    """The busiest slot of each layer worked on; all ``[A]``.

    Attributes:
        layers: indices into the state.
        slot: the busiest slot.
        busiest: its seconds.
        level: seconds above which a slot should shed work, and up to which one may take it.
    """

    layers: Integers
    slot: Integers
    busiest: Floats
    level: Floats

    def rows(self, rows: Integers) -> "Front":
        """Some of the layers."""
        return Front(
            layers=self.layers[rows],
            slot=self.slot[rows],
            busiest=self.busiest[rows],
            level=self.level[rows],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """The best change of each layer: units of ``expert`` go to ``taker``, and perhaps others come back.

    Attributes:
        score: ``[A]``, minus infinity where there is none.
        taker: ``[A]``, the other slot.
        expert: ``[A]``, of which units go.
        units: ``[A]``, how many.
        other: ``[A]``, the expert of which units come back.
        back: ``[A]``, how many; 0 if none.
    """

    score: Floats
    taker: Integers
    expert: Integers
    units: Integers
    other: Integers
    back: Integers

    def patched(self, rows: Integers, better: "Change") -> "Change":
        """The changes with those of some layers replaced."""
        names = ("score", "taker", "expert", "units", "other", "back")
        merged = {name: getattr(self, name).copy() for name in names}
        for name in names:
            merged[name][rows] = getattr(better, name)
        return Change(**merged)


def pieces(state: State, layers: Integers, slots: Integers) -> tuple[Integers, Integers, Integers]:
    """What can be taken from slots: experts, ascending, units that may go, and units that are there.

    Args:
        state: what slots hold.
        layers: ``[...]``.
        slots: ``[...]``, of the same shape.

    Returns:
        Three arrays ``[..., K]``, padded with 0 units of expert 0.
    """
    held = state.held[layers, slots]
    free = held if state.fixed is None else held - state.fixed[layers, slots]
    rows = free.reshape(-1, free.shape[-1])
    row, expert = np.divmod(np.flatnonzero(rows != 0), rows.shape[1])
    counts = np.bincount(row, minlength=rows.shape[0])
    place = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
    wide = (*free.shape[:-1], max(1, int(counts.max(initial=0))))
    into = row * wide[-1] + place
    found: list[Integers] = []
    for values in (expert, rows[row, expert], None if state.fixed is None else held.reshape(rows.shape)[row, expert]):
        if values is None:
            found.append(found[1])
            continue
        array = np.zeros(wide, dtype=np.int64)
        array.reshape(-1)[into] = values
        found.append(array)
    return found[0], found[1], found[2]


def least_busy(seconds: Floats, busiest: Integers, count: int) -> Integers:
    """``[A, B]``, the slots with the fewest seconds, ascending by index; the busiest only if there is no other.

    Args:
        seconds: ``[A, S]``, infinite for slots that do not come into question.
        busiest: ``[A]``.
        count: most slots wanted.
    """
    masked = seconds.copy()
    masked[np.arange(masked.shape[0]), busiest] = np.inf
    if count >= masked.shape[1]:
        return np.broadcast_to(np.arange(masked.shape[1]), masked.shape)
    return np.sort(np.argpartition(masked, count - 1, axis=1)[:, :count], axis=1)


def score(
    front_s: tuple[Floats, Floats],
    busy_b: Floats,
    after: tuple[Floats, Floats],
    added: Floats,
    units: Floats | Integers,
    rules: Rules,
) -> Floats:
    """How much surplus above the level a change removes, less the seconds that it adds; all broadcastable.

    Minus infinity where the busier of the two slots would not be clearly less busy than before.

    Args:
        front_s: seconds of the busiest slot, and the level.
        busy_b: seconds of the other slot.
        after: seconds of both afterwards.
        added: seconds that rows and pieces cost in addition.
        units: how many travel; no change where 0.
        rules: how gain counts.
    """
    busiest, level = front_s
    surplus = np.maximum(after[0] - level, 0) + np.maximum(after[1] - level, 0)
    gain = busiest - level + np.maximum(busy_b - level, 0) - surplus - rules.thrift * added
    better: NDArray[np.bool_] = (np.maximum(*after) < busiest * (1 - rules.least_gain)) & (units > 0)
    if rules.per_unit:
        better &= gain > 0
        gain = gain / np.maximum(units, 1)
    return np.where(better, gain, -np.inf)


def best_move(state: State, front: Front, rules: Rules) -> Change:
    """For each layer the best piece, or part of one, to be moved, and the best slot for it."""
    problem = state.problem
    layers = front.layers
    rows = np.arange(layers.size)
    experts, may_go, there = pieces(state, layers, front.slot)
    room = np.maximum(problem.limits[layers] - state.used[layers], 0)
    takers = least_busy(np.where(room > 0, state.seconds[layers], np.inf), front.slot, _TAKERS)
    # From here on [A, K, B], or less by broadcasting; options in front.
    speed_a = problem.speeds[front.slot][:, None, None]
    speed_b = problem.speeds[takers][:, None, :]
    unit = problem.work_s[layers[:, None], experts][:, :, None] / problem.units_per_expert
    rows_s = problem.row_s[layers[:, None], experts][:, :, None]
    fresh = state.held[layers[:, None, None], takers[:, None, :], experts[:, :, None]] == 0
    new_b = np.where(fresh, rows_s + problem.piece_s / speed_b, 0.0)
    busy_b = state.seconds[layers[:, None], takers][:, None, :]
    busiest, level = front.busiest[:, None, None], front.level[:, None, None]
    most = np.minimum(may_go[:, :, None], room[rows[:, None], takers][:, None, :])
    options = [np.where(most == may_go[:, :, None], most, 0)]
    if rules.cut:
        need = np.ceil((busiest - level) * speed_a / np.maximum(unit, TINY))
        take = np.floor((level - busy_b - new_b) * speed_b / np.maximum(unit, TINY))
        even = np.floor((busiest - busy_b - new_b) / np.maximum(unit / speed_a + unit / speed_b, TINY))
        options += [np.clip(np.minimum(need, take), 0, most), np.clip(even, 0, most)]
    go = np.stack(options).astype(np.int64)
    gone = go == there[:, :, None]
    after_a = busiest - go * unit / speed_a - np.where(gone, rows_s + problem.piece_s / speed_a, 0.0)
    after_b = busy_b + go * unit / speed_b + new_b
    added = np.where(gone, 0.0, new_b)
    table = score((busiest, level), busy_b, (after_a, after_b), added, go, rules)
    best, (option, piece, taker) = argbest(table)
    nothing = np.zeros(layers.size, dtype=np.int64)
    return Change(
        score=best,
        taker=takers[rows, taker],
        expert=experts[rows, piece],
        units=go[option, rows, piece, taker],
        other=nothing,
        back=nothing,
    )


def argbest(table: Floats) -> tuple[Floats, tuple[Integers, ...]]:
    """The best entry of each layer: its score, and its indices but for the layer's, the option first.

    Args:
        table: ``[O, A, ...]``.
    """
    by_layer = np.moveaxis(table, 0, -1)
    flat = by_layer.reshape(by_layer.shape[0], -1)
    best = flat.argmax(axis=1)
    *inner, option = np.unravel_index(best, by_layer.shape[1:])
    return flat[np.arange(flat.shape[0]), best], (option, *inner)
