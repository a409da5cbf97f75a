"""Placement from scratch: several ways to place the experts, and in each layer the one with fewest seconds."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.bounds import Bound, lower_bound
from nep.planning.placement.paying_cuts import cut_what_pays, polish
from nep.planning.placement.pool import loose_limits, relabel, split_pool
from nep.planning.placement.problem import Cut, Floats, Integers, Problem, slot_seconds
from nep.planning.placement.state import State
from nep.planning.placement.warm import improve
from nep.planning.placement.whole import fill_whole, plain_whole
from nep.planning.placement.window import window_cut

_NEAR_BOUND = 0.001
"""A layer this near its bound is not planned in yet another way."""
_PAIRS = 100_000
"""Pairs of expert and slot, over all layers, beyond which the last way is left out."""
_TIGHT_LOSS = 0.005
"""Part of the seconds that layers with tight memory may cost before more of them are made to share the burden."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to place the experts, and what came of it.

    Attributes:
        name: of the way.
        layers: how many layers it was tried in.
        chosen: in how many it was best.
        seconds: predicted, of the layers that it was tried in and could place.
        chosen_seconds: of the chosen plan in the same layers.
        note: why it was not tried, or could not place, in the other layers; empty if it could in all.
    """

    name: str
    layers: int
    chosen: int
    seconds: float
    chosen_seconds: float
    note: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Where the experts go, what that costs, and what else was considered.

    Attributes:
        units: ``[layers, experts, slots]``, units of each expert on each slot.
        seconds: ``[layers]``, predicted, of each layer's busiest slot.
        bound: what no placement without expert copies can be faster than.
        considered: the ways that were tried.
    """

    units: Cut
    seconds: Floats
    bound: Bound
    considered: tuple[Candidate, ...]

    @property
    def total_s(self) -> float:
        """The objective: predicted seconds of all layers together."""
        return float(self.seconds.sum())


def place(
    loads: ExpertLoads,
    *,
    speeds: ArrayLike,
    cost: PlacementCost,
    memory_units: ArrayLike | None = None,
    cut: bool = True,
) -> Placement:
    """Places the experts of a replica on its slots, for the fewest predicted seconds.

    Args:
        loads: ``[layers, experts]``, of this replica; shares within a layer count.
        speeds: ``[slots]``, relative.
        cost: seconds per token, row and piece; its ``units_per_expert`` is how finely experts may be cut.
        memory_units: ``[slots]``, units of all layers together that a slot can hold; or ``[layers, slots]``;
            None for no limit. A slot with 0 is not used.
        cut: whether experts may be cut; otherwise every one is whole on one slot.

    Raises:
        ValueError: with everything that is wrong with the input, or if memory cannot hold the experts.
    """
    if not cut:
        return _place_whole(loads, speeds, cost, memory_units)
    problem = Problem.of(loads, speeds=speeds, cost=cost, memory_units=memory_units)
    return _place(problem, cut=True)


def _place_whole(
    loads: ExpertLoads, speeds: ArrayLike, cost: PlacementCost, memory_units: ArrayLike | None
) -> Placement:
    """The problem in which an expert is one unit, solved, and its units counted again."""
    size = cost.units_per_expert
    places = None if memory_units is None else np.asarray(memory_units) // size
    if places is not None and places.ndim in (1, 2):
        layers, experts = loads.mean.shape
        needed = experts * (layers if places.ndim == 1 else 1)
        found = int(places.sum(axis=-1).min())
        if found < needed:
            raise ValueError(
                f"memory_units (whole experts that fit: {found}) cannot hold {needed} of {size} units each; "
                "allow cuts, free memory or add a slot"
            )
    whole = replace(cost, units_per_expert=1)
    placed = _place(Problem.of(loads, speeds=speeds, cost=whole, memory_units=places), cut=False)
    return replace(placed, units=placed.units * size)


def _place(problem: Problem, *, cut: bool) -> Placement:
    if problem.pool is None:
        return _place_by_layer(problem, problem, cut)
    return _place_in_pool(problem, problem.pool, cut)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Try:
    """One way, the layers that it was tried in, and what came of it: ``[n]``, ``[n, S, E]``, ``[n]``."""

    name: str
    layers: Integers
    held: Integers
    seconds: Floats
    note: str


class _Best:
    """The best cut of each layer so far, and who found it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.seconds = np.full(problem.num_layers, np.inf)
        self._winner = np.full(problem.num_layers, -1, dtype=np.int64)
        self._tries: list[_Try] = []

    def offer(self, name: str, layers: Integers, held: Integers, note: str = "") -> None:
        """Takes over what is better.

        Args:
            name: of the way that found it.
            layers: ``[n]``, which layers.
            held: ``[n, S, E]``, a complete cut of these; not to be changed afterwards.
            note: of the other layers.
        """
        problem = self.problem if layers.size == self.problem.num_layers else self.problem.select(layers)
        seconds = slot_seconds(problem, held).max(axis=1)
        # By more than rounding, so that plans do not hang on the last bit; earlier ways are simpler ones.
        better = layers[seconds < self.seconds[layers] * (1 - 1e-9)]
        self._winner[better] = len(self._tries)
        self._tries.append(_Try(name=name, layers=layers, held=held, seconds=seconds, note=note))
        self.seconds[layers] = np.where(np.isin(layers, better), seconds, self.seconds[layers])

    def skip(self, name: str, note: str) -> None:
        """Notes a way that was not worth trying."""
        nothing = np.zeros((0, self.problem.num_slots, self.problem.num_experts), dtype=np.int64)
        self.offer(name, np.arange(0), nothing, note)

    def held(self) -> Integers:
        """``[L, S, E]``, the best cut of every layer so far."""
        held = np.empty((0, 0, 0), dtype=np.int64)
        for index, one in enumerate(self._tries):
            won = np.flatnonzero(self._winner[one.layers] == index)
            if won.size == self.problem.num_layers:
                held = one.held
            elif won.size:
                if not held.size:
                    held = np.empty((self.problem.num_layers, *one.held.shape[1:]), dtype=np.int64)
                held[one.layers[won]] = one.held[won]
        return held

    def placement(self, bound: Bound) -> Placement:
        """The result."""
        held = self.held()
        considered = tuple(
            Candidate(
                name=one.name,
                layers=int(one.layers.size),
                chosen=int((self._winner == index).sum()),
                seconds=float(one.seconds.sum()),
                chosen_seconds=float(self.seconds[one.layers].sum()),
                note=one.note,
            )
            for index, one in enumerate(self._tries)
        )
        return Placement(units=np.swapaxes(held, 1, 2), seconds=self.seconds, bound=bound, considered=considered)


def _place_by_layer(problem: Problem, plain: Problem, cut: bool) -> Placement:
    """Each layer on its own, within its limits.

    Args:
        problem: each layer has its limits.
        plain: the same with each layer's own part of the memory, which the plain placement of whole experts
            and the window cut keep to.
        cut: whether experts may be cut.
    """
    bound = lower_bound(problem)
    best = _Best(problem)
    everywhere = np.arange(problem.num_layers)
    state, complete = plain_whole(plain)
    _offer_whole(best, state, np.flatnonzero(complete))
    if not cut:
        _improve_whole(best, state if plain is problem else None)
        return best.placement(bound)
    state = cut_what_pays(problem.guided(), bound.seconds)
    best.offer("whole experts, then cuts that pay", everywhere, state.held)
    _offer_window(best, plain, bound)
    _offer_moves(best, bound)
    return best.placement(bound)


def _offer_whole(best: _Best, state: State, layers: Integers) -> None:
    missing = best.problem.num_layers - layers.size
    note = f"memory cannot hold whole experts in {missing} layers" if missing else ""
    best.offer("whole experts, longest first", layers, state.held[layers] if missing else state.held, note)


def _offer_window(best: _Best, plain: Problem, bound: Bound) -> None:
    """The window cut where it may win, and what becomes of it if pieces move on.

    It takes what memory it may, so its limits are those of the plain placement: other layers are not to make
    up for it.
    """
    whole = best.problem
    # Two cuts per slot, of experts rather hot than cold: half of that is a safe guess of the rows they bring.
    rows = whole.row_s.sum(axis=1) * (int(whole.usable.sum()) - 1) / whole.num_experts
    share = rows / np.maximum(whole.work_s.sum(axis=1) + whole.row_s.sum(axis=1), 1e-300)
    layers = np.flatnonzero(best.seconds > bound.seconds * (1 + np.maximum(share, _NEAR_BOUND)))
    if (best.seconds - bound.seconds)[layers].sum() < _NEAR_BOUND * best.seconds.sum():
        layers = layers[:0]
    rest = whole.num_layers - layers.size
    note = f"left out in {rest} layers, where its rows would cost more than there is to be won" if rest else ""
    if layers.size == 0:
        best.skip("window cut", note)
        return
    # True prices, not guided ones: the window cut is for where rows are cheap.
    state = window_cut(plain.select(layers))
    best.offer("window cut", layers, state.held, note)
    if (best.seconds[layers] > bound.seconds[layers] * (1 + _NEAR_BOUND)).any():
        state = State.of(state.problem, state.held)
        polish(state)
        best.offer("window cut, then moves that pay", layers, state.held, note)


def _offer_moves(best: _Best, bound: Bound) -> None:
    """What the best cuts become by moves that gain most for each unit, as a plan in force would be changed.

    They take other paths than `polish`, since a warm start from the same cut must not end in a better one.
    """
    layers = np.flatnonzero(best.seconds > bound.seconds * (1 + _NEAR_BOUND))
    problem = best.problem
    if layers.size == 0 or layers.size * problem.num_experts * problem.num_slots > _PAIRS:
        best.skip("moves that pay", "left out where placements are near the bound, or large")
        return
    few = problem.select(layers)
    held = best.held()[layers]
    after, _, _ = improve(few, held, few.num_layers * few.units_per_layer, 0.0)
    rest = problem.num_layers - layers.size
    best.offer("moves that pay", layers, after, f"left out in {rest} layers near the bound" if rest else "")


def _improve_whole(best: _Best, plain: State | None) -> None:
    """Whole experts by seconds, then moves and swaps of whole experts."""
    guided = best.problem.guided()
    layers = np.arange(guided.num_layers)
    if plain is not None and (guided.speeds == guided.speeds[0]).all() and guided.piece_s == 0:
        state = State.of(guided, plain.held)  # what is longest in seconds is so in load
    else:
        state = State.empty(guided)
        left = fill_whole(state, np.ones((guided.num_layers, guided.num_experts), dtype=bool))
        layers = np.flatnonzero(~left.any(axis=1))
    polish(state, cut=False)
    complete = layers.size == guided.num_layers
    best.offer("whole experts, then swaps", layers, state.held if complete else state.held[layers])


def _place_in_pool(problem: Problem, pool: Integers, cut: bool) -> Placement:
    """All layers with loose limits, slots exchanged between layers; a few layers make up for the rest."""
    layers = problem.num_layers
    even = split_pool(pool, layers)
    loose = loose_limits(pool, layers, problem.units_per_expert, problem.units_per_layer)
    split = problem.split(even)
    found = _place_by_layer(problem.split(np.maximum(np.broadcast_to(loose, even.shape), even)), split, cut)
    settled = _settle(problem, pool, found, 0, cut)
    if settled is not None:
        return settled
    plain = found.considered[0]
    enough = found.total_s * (1 + _TIGHT_LOSS)
    if plain.layers == layers:
        enough = min(enough, plain.seconds)
    best: Placement | None = None
    strict = 2
    while strict < layers:
        settled = _settle(problem, pool, found, strict, cut)
        strict *= 2 if settled is None else 4
        if settled is None:
            continue
        if best is None or settled.total_s < best.total_s:
            best = settled
        if best.total_s <= enough:
            return best
    # Much has to be made up for: perhaps every layer does better with its own part of the memory.
    apart = _place_by_layer(split, split, cut)
    return apart if best is None or apart.total_s <= best.total_s else best


def _settle(problem: Problem, pool: Integers, found: Placement, strict: int, cut: bool) -> Placement | None:
    """Exchanges slots between layers until the pool suffices; some layers must do with what the others leave.

    Args:
        problem: the speeds and prices.
        pool: ``[S]``, units.
        found: every layer placed with loose limits.
        strict: how many layers are placed again.
        cut: whether experts may be cut.

    Returns:
        The placement, or None if so few layers cannot make up for the others.
    """
    layers = problem.num_layers
    held = np.swapaxes(found.units, 1, 2)
    used = held.sum(axis=2)
    # The most even layers lose least by tight memory.
    order = np.argsort(used.max(axis=1) - used.min(axis=1), kind="stable")
    kept, last = np.sort(order[strict:]), np.sort(order[:strict])
    source = relabel(used[kept], pool, problem.speeds)
    room = pool - np.take_along_axis(used[kept], source, axis=1).sum(axis=0)
    # Layers that make up for others must not be squeezed out of a slot.
    if (room < strict * (pool // layers) * 3 // 4).any():
        return None
    moved = held[kept[:, None], source]
    if not strict:
        return replace(found, units=np.swapaxes(moved, 1, 2))
    few = problem.select(last).split(split_pool(room, strict))
    tight = _place_by_layer(few, few, cut)
    result, seconds = np.empty_like(held), found.seconds.copy()
    result[kept], result[last] = moved, np.swapaxes(tight.units, 1, 2)
    seconds[last] = tight.seconds
    again = tuple(replace(one, name=f"{one.name} (tight memory)") for one in tight.considered)
    return Placement(
        units=np.swapaxes(result, 1, 2),
        seconds=seconds,
        bound=found.bound,
        considered=found.considered + again,
    )
