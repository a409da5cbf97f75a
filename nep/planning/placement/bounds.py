"""How fast a layer could be at best, and what keeps it from being faster."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from nep.planning.placement.problem import Floats, Integers, Problem

Binding = Literal["work", "hot expert", "memory", "unit size"]

BINDING_WORDS: dict[Binding, str] = {
    "work": "all slots are busy all the time: only more or faster slots help",
    "hot expert": "one expert's rows go to every slot that holds a piece of it: cutting it further costs more",
    "memory": "fast slots have no memory for the load that their speed could take",
    "unit size": "units are too coarse to be shared evenly: a smaller neuron_block helps",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Bound:
    """No placement without expert copies is faster than this.

    Attributes:
        seconds: ``[layers]``, of the busiest slot.
        binds: what binds in each layer.
        parts: every bound by what it is due to; ``seconds`` is the largest of them.
    """

    seconds: Floats
    binds: tuple[Binding, ...]
    parts: dict[Binding, Floats]

    @property
    def total_s(self) -> float:
        """Seconds of all layers together."""
        return float(self.seconds.sum())


def lower_bound(problem: Problem) -> Bound:
    """The largest of four lower bounds on the seconds of each layer.

    Slot ``s`` needs at least ``a_s = token_s / speed_s + row_s`` seconds per token, whatever it holds: a piece
    brings all of its expert's rows, so never fewer than its share of them. With ``1 / a_s`` in place of speeds
    this leaves a scheduling problem on uniform machines, of which the work, memory and unit bounds are the
    classic ones; the bound of hot experts counts the pieces that a deadline forces them into.

    A pool of memory for all layers does not bind any one of them and is left out.
    """
    if not (problem.work_s.any() or problem.row_s.any()):
        problem = replace(problem, tokens=np.zeros_like(problem.tokens))  # only pieces cost anything
    rate, piece = _rates(problem)
    parts: dict[Binding, Floats] = {
        "work": (problem.tokens.sum(axis=1) + problem.num_experts * piece) / rate.sum(),
        "memory": _memory_bound(problem, rate),
        "unit size": _unit_bound(problem, rate),
    }
    parts["hot expert"] = _hot_bound(problem, rate, piece, np.max(list(parts.values()), axis=0))
    names = get_args(Binding)
    table = np.stack([parts[name] for name in names])
    # Plain work is named unless something else is above it, and hot experts, whose bound starts from the
    # others, only where they add to them.
    margin = {"work": 1.0, "hot expert": 1 - 1e-6}
    which = (table * np.array([[margin.get(name, 1 - 1e-9)] for name in names])).argmax(axis=0)
    return Bound(seconds=table.max(axis=0), binds=tuple(names[index] for index in which), parts=parts)


def pieces_needed(problem: Problem, deadline_s: Floats) -> Integers:
    """Into how many pieces each expert must be cut for every one of them to meet a deadline.

    Args:
        problem: the prices; the fastest usable slot counts.
        deadline_s: ``[L]``.

    Returns:
        ``[L, E]``; more than all units where not even one unit meets the deadline.
    """
    size = problem.units_per_expert
    fastest = problem.speeds[problem.usable].max()
    fixed = problem.row_s + problem.piece_s / fastest
    unit = problem.work_s / (size * fastest)
    # A hair more than the deadline, or an expert that just meets it would be cut.
    slack = deadline_s[:, None] * (1 + 1e-9) - fixed
    units = np.floor(np.minimum(slack, unit * size) / np.maximum(unit, 1e-150))
    units = np.where(unit > 0, units, np.where(slack >= 0, size, 0))
    return np.where(units >= 1, -(-size // np.maximum(units, 1)), size + 1).astype(np.int64)


def _rates(problem: Problem) -> tuple[Floats, float]:
    """Tokens per second of each slot (0 if not usable), and how many tokens' worth of a slot a piece takes."""
    tokens = max(float(problem.tokens.sum()), 1e-300)
    token_s = float(problem.work_s.sum()) / tokens
    row_s = float(problem.row_s.sum()) / tokens
    seconds = token_s / problem.speeds + row_s
    if not seconds.any():
        return np.where(problem.usable, problem.speeds, 0.0), problem.piece_s
    rate = np.where(problem.usable, 1 / seconds, 0.0)
    piece = problem.piece_s * float((rate / problem.speeds)[problem.usable].min())
    return rate, piece


def _memory_bound(problem: Problem, rate: Floats) -> Floats:
    """Even with the hottest units in their memory, some slots cannot take their share of the load.

    For every set A of slots: what A cannot take, at most the hottest units that fit there, is left to the
    others. The sum over a set is worst for prefixes by falling rate per memory, because the load of the
    hottest units is concave in their number.
    """
    if problem.pool is not None:
        return np.zeros(problem.num_layers)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(problem.limits > 0, rate / np.maximum(problem.limits, 1), -1.0)
    order = np.argsort(-ratio, axis=1, kind="stable")
    memory = np.cumsum(np.take_along_axis(problem.limits, order, axis=1), axis=1)
    speed = np.cumsum(rate[order] * np.take_along_axis(problem.limits > 0, order, axis=1), axis=1)
    others = speed[:, -1:] - speed[:, :-1]
    fits = hottest_load(problem, np.minimum(memory[:, :-1], problem.units_per_layer))
    left = problem.tokens.sum(axis=1, keepdims=True) - fits
    # A remainder that is rounding only must not be divided by the rounding of another sum.
    real = (left > 1e-9 * problem.tokens.sum(axis=1, keepdims=True)) & (others > 1e-9 * speed[:, -1:])
    with np.errstate(divide="ignore", invalid="ignore"):
        bounds = np.where(real, left / others, 0.0)
    result: Floats = bounds.max(axis=1, initial=0.0)
    return result


def hottest_load(problem: Problem, units: Integers) -> Floats:
    """Tokens of the hottest so many units of each layer.

    Args:
        problem: the loads.
        units: ``[L, n]``.

    Returns:
        ``[L, n]``.
    """
    falling = -np.sort(-problem.tokens, axis=1)
    before = np.concatenate([np.zeros((problem.num_layers, 1)), np.cumsum(falling, axis=1)], axis=1)
    whole = units // problem.units_per_expert
    part = (units - whole * problem.units_per_expert) / problem.units_per_expert
    following = np.minimum(whole, problem.num_experts - 1)
    load: Floats = np.take_along_axis(before, whole, axis=1)
    return load + part * np.take_along_axis(falling, following, axis=1)


def _unit_bound(problem: Problem, rate: Floats) -> Floats:
    """Of the units of the hottest experts some slot gets more than its part, for they come whole.

    All units of the ``i`` hottest experts are at least as heavy as the lightest of them, so the seconds are at
    least those of that many such units: the least time in which all slots together finish so many.
    """
    falling = -np.sort(-problem.tokens, axis=1) / problem.units_per_expert
    counts = problem.units_per_expert * np.arange(1, problem.num_experts + 1)
    live, slots = np.unique(rate[rate > 0], return_counts=True)
    low = counts / (live * slots).sum()
    high = low + 1 / live.min() + 1 / live.max()
    for _ in range(50):
        middle = (low + high) / 2
        done = (np.floor(middle[:, None] * live * (1 + 1e-12)) * slots).sum(axis=1) >= counts
        high = np.where(done, middle, high)
        low = np.where(done, low, middle)
    result: Floats = (falling * low).max(axis=1)
    return result


def _hot_bound(problem: Problem, rate: Floats, piece: float, at_least: Floats) -> Floats:
    """The shortest deadline that hot experts, in as many pieces as it forces on them, can be fitted into.

    Every further piece brings the rows of its expert once more, so a shorter deadline means more work in all.
    """
    pieces_max = min(int(problem.usable.sum()), problem.units_per_expert)
    tokens = max(float(problem.tokens.sum()), 1e-300)
    row_s = float(problem.row_s.sum()) / tokens
    base = problem.tokens.sum(axis=1) + problem.num_experts * piece
    # An expert that meets the shortest deadline uncut meets all of them: only the others are looked at.
    hot = int((pieces_needed(problem, at_least) > 1).sum(axis=1).max())
    if hot == 0:
        return at_least
    hottest = np.argsort(-problem.tokens, axis=1, kind="stable")[:, :hot]
    few = replace(
        problem,
        tokens=np.take_along_axis(problem.tokens, hottest, axis=1),
        work_s=np.take_along_axis(problem.work_s, hottest, axis=1),
        row_s=np.take_along_axis(problem.row_s, hottest, axis=1),
    )
    further = few.tokens * (row_s * float(rate[rate > 0].min())) + piece
    fastest = problem.speeds[problem.usable].max()
    # Uncut, all experts one after the other on the fastest slot, is long enough.
    total = ((problem.work_s + problem.piece_s) / fastest + problem.row_s).sum(axis=1)
    low, high = at_least, np.maximum(at_least, total)
    for _ in range(60):
        if (high - low <= 1e-7 * high).all():
            break
        middle = (low + high) / 2
        pieces = pieces_needed(few, middle)
        work = base + ((pieces - 1) * further).sum(axis=1)
        meets = (pieces <= pieces_max).all(axis=1) & (work <= middle * rate.sum())
        high = np.where(meets, middle, high)
        low = np.where(meets, low, middle)
    return low


def binding_counts(bound: Bound) -> dict[Binding, int]:
    """In how many layers each thing binds, most first."""
    counts = {name: bound.binds.count(name) for name in get_args(Binding)}
    return dict(sorted(((name, count) for name, count in counts.items() if count), key=lambda one: -one[1]))
