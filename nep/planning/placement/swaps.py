"""Which two pieces, or parts of them, the busiest slot of a layer and another one should exchange.

Legend of array dimensions: ``A`` layers worked on, ``K`` pieces of the busiest slot, ``B`` slots that might
exchange one, ``J`` pieces of such a slot, ``O`` options of how many units go and come.
"""

from dataclasses import dataclass

import numpy as np

from nep.planning.placement.moves import TINY, Change, Front, Rules, argbest, least_busy, pieces, score
from nep.planning.placement.problem import Floats, Integers
from nep.planning.placement.state import State

_PARTNERS = 2
_FEW_PAIRS = 64
_FINE_UNITS = (1, 2, 3, 5)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pairs:
    """All pairs of a piece of the busiest slot, ``k``, and one of another slot, ``j``.

    Every array broadcasts to ``[A, K, B, J]``.
    """

    may_k: Integers
    may_j: Integers
    there_k: Integers
    there_j: Integers
    unit_k: Floats
    unit_j: Floats
    fixed_k: Floats
    fixed_j: Floats
    slack_a: Integers
    slack_b: Integers
    new_a: Floats
    new_b: Floats
    speed_a: Floats
    speed_b: Floats
    piece_s: float
    busy_b: Floats
    busiest: Floats
    level: Floats


def best_swap(state: State, front: Front, rules: Rules) -> Change:
    """For each layer the best two pieces, or parts of them, that the busiest slot exchanges with another."""
    layers, rows = front.layers, np.arange(front.layers.size)
    partners = least_busy(state.seconds[layers], front.slot, _PARTNERS)
    mine, may_k, there_k = pieces(state, layers, front.slot)
    theirs, may_j, there_j = pieces(state, np.broadcast_to(layers[:, None], partners.shape), partners)
    pairs = _pairs(state, front, partners, (mine, may_k, there_k), (theirs, may_j, there_j))
    go, come = _options(pairs, rules)
    # The same expert in both slots is a move, not a swap.
    different = (mine[:, :, None, None] != theirs[:, None]) & (go > 0) & (come > 0)
    table = _table(pairs, go, come, np.where(different, go + come, 0), rules)
    best, (option, piece, partner, other) = argbest(table)
    return Change(
        score=best,
        taker=partners[rows, partner],
        expert=mine[rows, piece],
        units=go[option, rows, piece, partner, other],
        other=theirs[rows, partner, other],
        back=come[option, rows, piece, partner, other],
    )


def _pairs(
    state: State,
    front: Front,
    partners: Integers,
    mine: tuple[Integers, Integers, Integers],
    theirs: tuple[Integers, Integers, Integers],
) -> _Pairs:
    """Everything that the options are judged by."""
    problem = state.problem
    a, layer_k, layer_j = front.slot, front.layers[:, None], front.layers[:, None, None]
    speed_a = problem.speeds[a][:, None, None, None]
    speed_b = problem.speeds[partners][:, None, :, None]
    fixed_k = problem.row_s[layer_k, mine[0]][:, :, None, None]
    fixed_j = problem.row_s[layer_j, theirs[0]][:, None]
    has_b = state.held[layer_j, partners[:, None, :], mine[0][:, :, None]][:, :, :, None] > 0
    has_a = state.held[layer_j, a[:, None, None], theirs[0]][:, None] > 0
    slack = problem.limits[front.layers] - state.used[front.layers]
    rows = np.arange(a.size)
    return _Pairs(
        may_k=mine[1][:, :, None, None],
        may_j=theirs[1][:, None],
        there_k=mine[2][:, :, None, None],
        there_j=theirs[2][:, None],
        unit_k=problem.work_s[layer_k, mine[0]][:, :, None, None] / problem.units_per_expert,
        unit_j=problem.work_s[layer_j, theirs[0]][:, None] / problem.units_per_expert,
        fixed_k=fixed_k,
        fixed_j=fixed_j,
        slack_a=slack[rows, a][:, None, None, None],
        slack_b=slack[rows[:, None], partners][:, None, :, None],
        new_a=np.where(has_a, 0.0, fixed_j + problem.piece_s / speed_a),
        new_b=np.where(has_b, 0.0, fixed_k + problem.piece_s / speed_b),
        speed_a=speed_a,
        speed_b=speed_b,
        piece_s=problem.piece_s,
        busy_b=state.seconds[layer_k, partners][:, None, :, None],
        busiest=front.busiest[:, None, None, None],
        level=front.level[:, None, None, None],
    )


def _options(pairs: _Pairs, rules: Rules) -> tuple[Integers, Integers]:
    """How many units could go and come, ``[O, A, K, B, J]`` each; 0 where memory forbids."""
    may_k, may_j = pairs.may_k, pairs.may_j
    fits = (may_j - may_k <= pairs.slack_a) & (may_k - may_j <= pairs.slack_b)
    go = [np.where(fits, may_k + 0 * may_j, 0)]
    come = [np.where(fits, may_j + 0 * may_k, 0)]
    if not rules.cut:
        return np.stack(go), np.stack(come)
    # Equal parts leave memory as it is: as many as take the surplus off, or as make the two slots even.
    lighter = np.maximum(pairs.unit_k - pairs.unit_j, TINY)
    need = np.ceil((pairs.busiest - pairs.level + pairs.new_a) * pairs.speed_a / lighter)
    apart = pairs.busiest + pairs.new_a - pairs.busy_b - pairs.new_b
    even = np.floor(apart / (lighter / pairs.speed_a + lighter / pairs.speed_b))
    part = np.clip(np.minimum(need, even), 0, np.minimum(may_k, may_j))
    part = np.where(pairs.unit_k > pairs.unit_j, part, 0).astype(np.int64)
    go.append(part)
    come.append(part)
    if may_k.shape[1] * may_j.shape[3] <= _FEW_PAIRS:
        # Few pieces of many units: unequal parts of two of them shift amounts finer than a unit.
        aim = np.maximum(pairs.level, (pairs.busiest + pairs.busy_b) / 2)
        want = (pairs.busiest - aim + pairs.new_a) * pairs.speed_a
        for units in _FINE_UNITS:
            back = np.rint((units * pairs.unit_k - want) / np.maximum(pairs.unit_j, TINY)).clip(0, may_j)
            back = back.astype(np.int64)
            fits = (units <= may_k) & (back - units <= pairs.slack_a) & (units - back <= pairs.slack_b)
            go.append(np.where(fits, units, 0))
            come.append(np.where(fits, back, 0))
    return np.stack(go), np.stack(come)


def _table(pairs: _Pairs, go: Integers, come: Integers, units: Integers, rules: Rules) -> Floats:
    """The score of every option, ``[O, A, K, B, J]``."""
    piece_a, piece_b = pairs.piece_s / pairs.speed_a, pairs.piece_s / pairs.speed_b
    added_a = pairs.new_a - np.where(go == pairs.there_k, pairs.fixed_k + piece_a, 0.0)
    added_b = pairs.new_b - np.where(come == pairs.there_j, pairs.fixed_j + piece_b, 0.0)
    shift = go * pairs.unit_k - come * pairs.unit_j
    after_a = pairs.busiest - shift / pairs.speed_a + added_a
    after_b = pairs.busy_b + shift / pairs.speed_b + added_b
    added = np.maximum(added_a + added_b, 0.0)
    return score((pairs.busiest, pairs.level), pairs.busy_b, (after_a, after_b), added, units, rules)
