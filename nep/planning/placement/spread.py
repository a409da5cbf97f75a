"""Shares units of an expert out over slots: as level as memory allows, in few pieces."""

from dataclasses import dataclass

import numpy as np

from nep.planning.placement.problem import Floats, Integers
from nep.planning.placement.state import State

_BISECTIONS = 24


@dataclass(frozen=True, kw_only=True, eq=False)
class Portion:
    """Units of one expert in each of some layers, to be placed.

    Attributes:
        layers: ``[n]``, distinct.
        experts: ``[n]``.
        units: ``[n]``, at least 1.
        max_units: ``[n]``, most that one slot should get, if memory lets the others take the rest.
    """

    layers: Integers
    experts: Integers
    units: Integers
    max_units: Integers


def spread(state: State, portion: Portion, level_s: Floats) -> None:
    """Places a portion on the slots, in place.

    Slots are filled up to a level of seconds: the level asked for, or, where that is not enough, the lowest
    that is. Slots that can take most come first and are filled to the level, so as few as possible get a
    piece, and with it the rows of the expert.

    Args:
        state: what slots hold already.
        portion: what is to be placed; it must fit into the room of the slots.
        level_s: ``[n]``, seconds up to which any slot may be filled at no harm.

    Raises:
        RuntimeError: if the slots have no room for it.
    """
    layers = portion.layers
    before = state.seconds[layers]
    fixed = state.new_piece_s(layers, portion.experts)
    unit = np.maximum(state.unit_s(layers, portion.experts), 1e-300)
    free = state.room()[layers]
    room = np.minimum(free, portion.max_units[:, None])
    room = np.where(room.sum(axis=1, keepdims=True) < portion.units[:, None], free, room)
    short = room.sum(axis=1) < portion.units
    if short.any():
        worst = int(np.flatnonzero(short)[0])
        raise RuntimeError(
            f"layer {layers[worst]}: {portion.units[worst]} units of expert {portion.experts[worst]} do not "
            f"fit into the {room[worst].sum()} units of memory left; free memory or add a slot"
        )
    # Whole seconds are compared with a hair of tolerance, or a level that just fits would lose a unit.
    base = (before + fixed) * (1 - 1e-12)

    def capacity(level: Floats) -> Floats:
        return np.clip(np.floor((level[:, None] - base) / unit), 0, room)

    low = np.minimum(level_s, base.min(axis=1))
    high = np.maximum(level_s, (base + unit * portion.units[:, None]).max(axis=1))
    enough = capacity(level_s).sum(axis=1) >= portion.units
    high = np.where(enough, level_s, high)
    low = np.where(enough, level_s, np.maximum(low, level_s))
    for _ in range(_BISECTIONS):
        if (high - low <= 1e-9 * np.abs(high)).all():
            break
        middle = (low + high) / 2
        fits = capacity(middle).sum(axis=1) >= portion.units
        high = np.where(fits, middle, high)
        low = np.where(fits, low, middle)
    can = capacity(high).astype(np.int64)
    order = np.argsort(-can, axis=1, kind="stable")
    taken = np.cumsum(np.take_along_axis(can, order, axis=1), axis=1)
    left = np.maximum(portion.units[:, None] - taken, 0)
    given = np.concatenate([portion.units[:, None], left[:, :-1]], axis=1) - left
    for rank in range(int((given > 0).sum(axis=1).max())):
        some = np.flatnonzero(given[:, rank] > 0)
        state.add(layers[some], order[some, rank], portion.experts[some], given[some, rank])
