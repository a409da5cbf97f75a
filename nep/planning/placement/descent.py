"""Moves and swaps of pieces that make the busiest slot of a layer less busy, all layers at once.

Legend of array dimensions: ``A`` layers that are still being worked on, ``K`` pieces of the busiest slot, ``B``
slots that might take some of it, ``J`` pieces of such a slot, ``O`` options of how many units go.
"""

from dataclasses import dataclass

import numpy as np

from nep.planning.placement.problem import Floats, Integers
from nep.planning.placement.state import State, mean_seconds

_TINY = 1e-300
_TAKERS = 8
_PARTNERS = 2
_FEW_PAIRS = 64
_FINE_UNITS = (1, 2, 3, 5)


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
class _Front:
    """The busiest slot of each layer worked on, ``[A]`` arrays.

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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Change:
    """The best change found for each layer: units of ``expert`` go to ``taker``, ``back`` units of another come.

    Attributes:
        score: ``[A]``, minus infinity where there is none.
        taker, expert, units: ``[A]``.
        other, back: ``[A]``; no unit comes back where ``back`` is 0.
    """

    score: Floats
    taker: Integers
    expert: Integers
    units: Integers
    other: Integers
    back: Integers


def descend(state: State, layers: Integers, rules: Rules, level_s: Floats | None = None) -> None:
    """Takes work off the busiest slot of each layer until it is level or nothing helps; in place.

    The seconds of a layer's busiest slot never rise.

    Args:
        state: changed in place; its limits are kept.
        layers: which layers to work on.
        rules: what is allowed.
        level_s: ``[len(layers)]``, where to stop; None means the mean of the slots.
    """
    active = layers
    level = level_s
    for _ in range(rules.steps):
        front, kept = _front(state, active, level, rules.tolerance)
        if front.layers.size == 0:
            return
        level = None if level is None else level[kept]
        change = _best_move(state, front, rules)
        stuck = np.flatnonzero(np.isneginf(change.score))
        if stuck.size:
            change = _patch(change, stuck, _best_swap(state, _rows(front, stuck), rules))
        found = np.flatnonzero(np.isfinite(change.score))
        _apply(state, front, change, found)
        active = front.layers[found]
        level = None if level is None else level[found]


def _front(
    state: State, active: Integers, level: Floats | None, tolerance: float
) -> tuple[_Front, Integers]:
    """The layers that are not level yet, and which of the active ones these are."""
    seconds = state.seconds[active]
    slot = seconds.argmax(axis=1)
    busiest = seconds[np.arange(active.size), slot]
    target = mean_seconds(state, active)
    if level is not None:
        target = np.maximum(target, level)
    kept = np.flatnonzero(busiest > target * (1 + tolerance))
    front = _Front(
        layers=active[kept],
        slot=slot[kept],
        busiest=busiest[kept],
        # Slots may fill up to a little above the mean, or the last of them would never be level.
        level=target[kept] * (1 + tolerance / 2),
    )
    return front, kept


def _rows(front: _Front, rows: Integers) -> _Front:
    return _Front(
        layers=front.layers[rows],
        slot=front.slot[rows],
        busiest=front.busiest[rows],
        level=front.level[rows],
    )


def _pieces(state: State, layers: Integers, slots: Integers) -> tuple[Integers, Integers, Integers]:
    """What can be taken from slots: experts, ascending, units that may go, and units that are there.

    Args:
        state: what slots hold.
        layers: ``[...]``.
        slots: ``[...]``.

    Returns:
        Three arrays ``[..., K]``, padded with 0 units of expert 0.
    """
    held = state.held[layers, slots]
    free = held if state.fixed is None else held - state.fixed[layers, slots]
    rows = free.reshape(-1, free.shape[-1])
    row, expert = np.nonzero(rows)
    counts = np.bincount(row, minlength=rows.shape[0])
    place = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = (rows.shape[0], max(1, int(counts.max(initial=0))))
    experts, may_go, there = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    experts[row, place] = expert
    may_go[row, place] = rows[row, expert]
    there[row, place] = held.reshape(rows.shape)[row, expert]
    wide = (*free.shape[:-1], shape[1])
    return experts.reshape(wide), may_go.reshape(wide), there.reshape(wide)


def _best_move(state: State, front: _Front, rules: Rules) -> _Change:
    """For each layer the best piece, or part of one, to be moved, to the best taker."""
    problem = state.problem
    layers = front.layers
    rows = np.arange(layers.size)
    experts, units, there = _pieces(state, layers, front.slot)
    room = np.maximum(problem.limits[layers] - state.used[layers], 0)
    takers = _least_busy(np.where(room > 0, state.seconds[layers], np.inf), front.slot, _TAKERS)
    speed_a = problem.speeds[front.slot][:, None, None]
    speed_b = problem.speeds[takers][:, None, :]
    work = problem.work_s[layers[:, None], experts][:, :, None] / problem.units_per_expert
    fixed = problem.row_s[layers[:, None], experts][:, :, None]
    fresh = state.held[layers[:, None, None], takers[:, None, :], experts[:, :, None]] == 0
    cost_b = np.where(fresh, fixed + problem.piece_s / speed_b, 0.0)
    unit_a, unit_b = work / speed_a, work / speed_b
    busy_b = state.seconds[layers[:, None], takers][:, None, :]
    level, busiest = front.level[:, None, None], front.busiest[:, None, None]
    most = np.minimum(units[:, :, None], room[rows[:, None], takers][:, None, :])
    all_of_it = np.where(most == units[:, :, None], most, 0)
    if rules.cut:
        need = np.ceil((busiest - level) / np.maximum(unit_a, _TINY))
        take = np.floor((level - busy_b - cost_b) / np.maximum(unit_b, _TINY))
        even = np.floor((busiest - busy_b - cost_b) / np.maximum(unit_a + unit_b, _TINY))
        options = np.stack([np.clip(np.minimum(need, take), 0, most), np.clip(even, 0, most), all_of_it])
    else:
        options = all_of_it[None].astype(np.float64)
    gone = options == there[:, :, None]
    after_a = busiest - options * unit_a - np.where(gone, fixed + problem.piece_s / speed_a, 0.0)
    after_b = busy_b + options * unit_b + cost_b
    added = np.where(gone, 0.0, cost_b)
    score = _score(front, after_a, after_b, busy_b, added, options, rules)
    score = np.moveaxis(score, 0, -1).reshape(layers.size, -1)
    best = score.argmax(axis=1)
    piece, taker, option = np.unravel_index(best, (experts.shape[1], takers.shape[1], options.shape[0]))
    return _Change(
        score=score[rows, best],
        taker=takers[rows, taker],
        expert=experts[rows, piece],
        units=options[option, rows, piece, taker].astype(np.int64),
        other=np.zeros(layers.size, dtype=np.int64),
        back=np.zeros(layers.size, dtype=np.int64),
    )


def _score(
    front: _Front,
    after_a: Floats,
    after_b: Floats,
    busy_b: Floats,
    added: Floats,
    units: Floats,
    rules: Rules,
) -> Floats:
    """How much surplus above the level a change removes, less the seconds that it adds.

    Minus infinity where the busier of the two slots would not be clearly less busy than before.
    """
    ahead = (1,) * (after_a.ndim - front.level.ndim - (after_a.ndim - busy_b.ndim))
    shape = (-1,) + ahead
    level = front.level.reshape(shape)
    busiest = front.busiest.reshape(shape)
    surplus = np.maximum(after_a - level, 0) + np.maximum(after_b - level, 0)
    gain = busiest - level + np.maximum(busy_b - level, 0) - surplus - rules.thrift * added
    better = np.maximum(after_a, after_b) < busiest * (1 - rules.least_gain)
    if rules.per_unit:
        better &= gain > 0
        gain = gain / np.maximum(units, 1)
    return np.where(better & (units > 0), gain, -np.inf)


def _least_busy(seconds: Floats, busiest: Integers, count: int) -> Integers:
    """``[A, B]``, the slots with the fewest seconds, ascending by index, without the busiest itself."""
    masked = seconds.copy()
    masked[np.arange(masked.shape[0]), busiest] = np.inf
    count = min(count, masked.shape[1])
    if count == masked.shape[1]:
        return np.broadcast_to(np.arange(count), masked.shape)
    return np.sort(np.argpartition(masked, count - 1, axis=1)[:, :count], axis=1)


def _best_swap(state: State, front: _Front, rules: Rules) -> _Change:
    """For each layer the best two pieces, or equal parts of them, that two slots exchange."""
    problem = state.problem
    layers = front.layers
    rows = np.arange(layers.size)
    a = front.slot
    partners = _least_busy(state.seconds[layers], a, _PARTNERS)  # [A, B]
    mine, mine_units, mine_there = _pieces(state, layers, a)  # [A, K]
    theirs, their_units, their_there = _pieces(state, np.broadcast_to(layers[:, None], partners.shape), partners)
    speed_a = problem.speeds[a][:, None, None, None]
    speed_b = problem.speeds[partners][:, None, :, None]
    at_k, at_j = layers[:, None], layers[:, None, None]
    # Everything below is [A, K, B, J] by broadcasting: mine [A, K, 1, 1], theirs [A, 1, B, J].
    work_k = (problem.work_s[at_k, mine] / problem.units_per_expert)[:, :, None, None]
    work_j = (problem.work_s[at_j, theirs] / problem.units_per_expert)[:, None]
    fixed_k = problem.row_s[at_k, mine][:, :, None, None]
    fixed_j = problem.row_s[at_j, theirs][:, None]
    has_b = state.held[at_j, partners[:, None, :], mine[:, :, None]][:, :, :, None] > 0
    has_a = state.held[at_j, a[:, None, None], theirs][:, None] > 0
    have_k, have_j = mine_units[:, :, None, None], their_units[:, None]
    busy_b = state.seconds[at_k, partners][:, None, :, None]
    level, busiest = (x[:, None, None, None] for x in (front.level, front.busiest))
    slack_a = (problem.limits - state.used)[layers, a][:, None, None, None]
    slack_b = (problem.limits - state.used)[at_k, partners][:, None, :, None]
    fits = (have_j - have_k <= slack_a) & (have_k - have_j <= slack_b) & (have_k > 0) & (have_j > 0)
    away = [np.where(fits, have_k, 0) + 0 * have_j]
    back = [np.where(fits, have_j, 0) + 0 * have_k]
    if rules.cut:
        # Equal parts leave memory as it is; as many as take the surplus off, or as make the two even.
        lighter = np.maximum((work_k - work_j) / speed_a, _TINY)
        new_b = np.where(has_b, 0.0, fixed_k + problem.piece_s / speed_b)
        new_a = np.where(has_a, 0.0, fixed_j + problem.piece_s / speed_a)
        need = np.ceil((busiest - level + new_a) / lighter)
        even = np.floor((busiest + new_a - busy_b - new_b) / (lighter + np.maximum(work_k - work_j, _TINY) / speed_b))
        part = np.clip(np.minimum(need, even), 0, np.minimum(have_k, have_j))
        part = np.where(work_k > work_j, part, 0).astype(np.int64)
        away.append(part)
        back.append(part)
        if have_k.shape[1] * have_j.shape[3] <= _FEW_PAIRS:
            # Few pieces of many units: unequal parts of two of them shift amounts finer than a unit.
            want = (busiest - np.maximum(level, (busiest + busy_b) / 2) + new_a) * speed_a
            for go in _FINE_UNITS:
                come = np.rint((go * work_k - want) / np.maximum(work_j, _TINY)).clip(0, have_j)
                allowed = (go <= have_k) & (come - go <= slack_a) & (go - come <= slack_b)
                away.append(np.where(allowed, go, 0))
                back.append(np.where(allowed, come, 0).astype(np.int64))
    go, come = np.stack(away), np.stack(back)
    all_k = go == mine_there[:, :, None, None]
    all_j = come == their_there[:, None]
    piece_a, piece_b = problem.piece_s / speed_a, problem.piece_s / speed_b
    gained_b = np.where(has_b, 0.0, fixed_k + piece_b) - np.where(all_j, fixed_j + piece_b, 0.0)
    gained_a = np.where(has_a, 0.0, fixed_j + piece_a) - np.where(all_k, fixed_k + piece_a, 0.0)
    shift = go * work_k - come * work_j
    after_a = busiest - shift / speed_a + gained_a
    after_b = busy_b + shift / speed_b + gained_b
    added = np.maximum(gained_a + gained_b, 0.0)
    # The same expert in both slots is a move, not a swap.
    units = np.where(mine[:, :, None, None] == theirs[:, None], 0, go + come).astype(np.float64)
    units = np.where((go > 0) & (come > 0), units, 0.0)
    score = _score(front, after_a, after_b, busy_b, added, units, rules)
    score = np.moveaxis(score, 0, -1).reshape(layers.size, -1)
    best = score.argmax(axis=1)
    shape = (mine.shape[1], partners.shape[1], theirs.shape[2], go.shape[0])
    piece, partner, other, option = np.unravel_index(best, shape)
    return _Change(
        score=score[rows, best],
        taker=partners[rows, partner],
        expert=mine[rows, piece],
        units=go[option, rows, piece, partner, other],
        other=theirs[rows, partner, other],
        back=come[option, rows, piece, partner, other],
    )


def _patch(change: _Change, rows: Integers, better: _Change) -> _Change:
    """The change with some rows replaced."""
    merged = {}
    for name in ("score", "taker", "expert", "units", "other", "back"):
        array = getattr(change, name).copy()
        array[rows] = getattr(better, name)
        merged[name] = array
    return _Change(**merged)


def _apply(state: State, front: _Front, change: _Change, found: Integers) -> None:
    """Carries out the changes of these rows."""
    layers, slot = front.layers[found], front.slot[found]
    taker, expert, units = change.taker[found], change.expert[found], change.units[found]
    state.take(layers, slot, expert, units)
    state.add(layers, taker, expert, units)
    swap = np.flatnonzero(change.back[found] > 0)
    if swap.size:
        other, back = change.other[found][swap], change.back[found][swap]
        state.take(layers[swap], taker[swap], other, back)
        state.add(layers[swap], slot[swap], other, back)
