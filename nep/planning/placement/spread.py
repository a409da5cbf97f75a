"""Shares units of an expert out over slots: as level as memory allows, in few pieces."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


def spread(state: State, portion: Portion, level_s: Floats) -> NDArray[np.bool_]:
    """Places a portion on the slots, in place.

    Slots are filled up to a level of seconds: the level asked for, or, where that is not enough, the lowest
    that is. Slots that can take most come first and are filled to the level, so as few as possible get a
    piece, and with it the rows of the expert.

    Args:
        state: what slots hold already.
        portion: what is to be placed.
        level_s: ``[n]``, seconds up to which any slot may be filled at no harm.

    Returns:
        ``[n]``, which layers were placed. With a pool of memory several layers may want the last of it: then
        some of them are left for the next call, at least one is placed.

    Raises:
        RuntimeError: if the slots have no room for it.
    """
    layers = portion.layers
    base = state.seconds[layers] + state.new_piece_s(layers, portion.experts)
    unit = np.maximum(state.unit_s(layers, portion.experts), 1e-150)
    free = state.room()[layers]
    room = np.minimum(free, portion.max_units[:, None])
    room = np.where(room.sum(axis=1, keepdims=True) < portion.units[:, None], free, room)
    _require_room(portion, room)
    can = _capacity(base, unit, room, _level(base, unit, room, portion.units, level_s)).astype(np.int64)
    order = np.argsort(-can, axis=1, kind="stable")
    taken = np.cumsum(np.take_along_axis(can, order, axis=1), axis=1)
    left = np.maximum(portion.units[:, None] - taken, 0)
    given = np.concatenate([portion.units[:, None], left[:, :-1]], axis=1) - left
    placed = np.ones(layers.size, dtype=bool)
    if state.problem.pool is not None:
        by_slot = np.zeros_like(given)
        np.put_along_axis(by_slot, order, given, axis=1)
        placed = (np.cumsum(by_slot, axis=0) <= state.problem.pool - state.used.sum(axis=0)).all(axis=1)
        given[~placed] = 0
    row, rank = np.nonzero(given)
    state.add(layers[row], order[row, rank], portion.experts[row], given[row, rank])
    return placed


def _require_room(portion: Portion, room: Integers) -> None:
    short = np.flatnonzero(room.sum(axis=1) < portion.units)
    if short.size:
        worst = short[0]
        raise RuntimeError(
            f"layer {portion.layers[worst]}: {portion.units[worst]} units of expert {portion.experts[worst]} "
            f"do not fit into the {room[worst].sum()} units of memory left; free memory or add a slot"
        )


def _capacity(base: Floats, unit: Floats, room: Integers, level: Floats) -> Floats:
    """``[n, S]``, units that each slot can take up to a level of seconds."""
    # With a hair of tolerance, or a level that just fits would lose a unit.
    over = np.floor((level[:, None] * (1 + 1e-12) - base) / unit)
    capacity: Floats = np.clip(over, 0, room)
    return capacity


def _level(base: Floats, unit: Floats, room: Integers, units: Integers, asked: Floats) -> Floats:
    """``[n]``, the level asked for, or the lowest above it up to which all units fit."""
    enough = _capacity(base, unit, room, asked).sum(axis=1) >= units
    if enough.all():
        return asked
    low = np.maximum(asked, base.min(axis=1))
    low = np.where(enough, asked, low)
    high = np.where(enough, asked, np.maximum(low, (base + unit * units[:, None]).max(axis=1)))
    for _ in range(_BISECTIONS):
        if (high - low <= 1e-6 * np.abs(high)).all():
            break
        middle = (low + high) / 2
        fits = _capacity(base, unit, room, middle).sum(axis=1) >= units
        high = np.where(fits, middle, high)
        low = np.where(fits, low, middle)
    return high


def spread_each(state: State, units: Integers, max_units: Integers, level_s: Floats) -> None:
    """Spreads units of several experts of every layer, the hottest expert first.

    Args:
        state: changed in place.
        units: ``[L, E]``, to be placed.
        max_units: ``[L, E]``, most that one slot should get of an expert.
        level_s: ``[L]``, seconds up to which slots may be filled.

    Raises:
        RuntimeError: if the slots have no room for them.
    """
    problem = state.problem
    weight = np.where(units > 0, problem.work_s + problem.row_s, -1.0)
    order = np.argsort(-weight, axis=1, kind="stable")
    for rank in range(int((units > 0).sum(axis=1).max(initial=0))):
        expert = order[:, rank]
        layers = np.flatnonzero(units[np.arange(problem.num_layers), expert] > 0)
        while layers.size:
            chosen = expert[layers]
            portion = Portion(
                layers=layers,
                experts=chosen,
                units=units[layers, chosen],
                max_units=max_units[layers, chosen],
            )
            layers = layers[~spread(state, portion, level_s[layers])]
