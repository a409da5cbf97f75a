"""Makes the busiest slot of a layer less busy, move by move, all layers at once."""

import numpy as np

from nep.planning.placement.moves import Change, Front, Rules, best_move
from nep.planning.placement.problem import Floats, Integers
from nep.planning.placement.state import State, mean_seconds
from nep.planning.placement.swaps import best_swap


def descend(state: State, layers: Integers, rules: Rules, level_s: Floats | None = None) -> None:
    """Takes work off the busiest slot of each layer until it is level or nothing helps; in place.

    Swaps are looked for where no move helps. The seconds of a layer's busiest slot never rise.

    Args:
        state: changed in place; its limits are kept.
        layers: which layers to work on.
        rules: what is allowed.
        level_s: ``[len(layers)]``, where to stop; None means the mean of the slots.
    """
    active, level = layers, level_s
    for _ in range(rules.steps):
        front, kept = _front(state, active, level, rules.tolerance)
        if front.layers.size == 0:
            return
        change = best_move(state, front, rules)
        stuck = np.flatnonzero(np.isneginf(change.score))
        if stuck.size:
            change = change.patched(stuck, best_swap(state, front.rows(stuck), rules))
        found = np.flatnonzero(np.isfinite(change.score))
        _apply(state, front, change, found)
        active = front.layers[found]
        level = None if level is None else level[kept][found]


def _front(state: State, active: Integers, level: Floats | None, tolerance: float) -> tuple[Front, Integers]:
    """The layers that are not level yet, and which of the active ones these are."""
    seconds = state.seconds[active]
    slot = seconds.argmax(axis=1)
    busiest = seconds[np.arange(active.size), slot]
    target = mean_seconds(state, active)
    if level is not None:
        target = np.maximum(target, level)
    kept = np.flatnonzero(busiest > target * (1 + tolerance))
    front = Front(
        layers=active[kept],
        slot=slot[kept],
        busiest=busiest[kept],
        # Slots may fill up to a little above the mean, or the last of them would never be level.
        level=target[kept] * (1 + tolerance / 2),
    )
    return front, kept


def _apply(state: State, front: Front, change: Change, found: Integers) -> None:
    """Carries out the changes of these layers."""
    layers, slot = front.layers[found], front.slot[found]
    taker, expert, units = change.taker[found], change.expert[found], change.units[found]
    state.take(layers, slot, expert, units)
    state.add(layers, taker, expert, units)
    swap = np.flatnonzero(change.back[found] > 0)
    if swap.size:
        other, back = change.other[found][swap], change.back[found][swap]
        state.take(layers[swap], taker[swap], other, back)
        state.add(layers[swap], slot[swap], other, back)
