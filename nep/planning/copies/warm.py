"""Plans for copies that move little: from the placement in force to one that suits new loads, or fewer slots.

A new placement that ignores the old one moves nearly every copy. Most of what it gains is had for a few moves,
taken here one by one, in all layers the one that brings most per copy sent, for as long as they pay.
"""

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from nep.planning.copies.layer import LayerCopies
from nep.planning.copies.moves import Move, best_move, place
from nep.planning.copies.place import Copies, SlotLimits, fill_up, place_copies, whole_tokens
from nep.planning.loads import ExpertLoads

MIN_GAIN = 0.001
"""What a copy that is sent must bring by default: a thousandth of a layer's average expert time."""

_UNEVEN = 1.01
"""Level of the fullest slot, with equal shares for all copies, beyond which a placement is worth polishing."""

_DEAR = 0.003
"""What the price of a gradient sum between scale-up domains must be to look for placements that need none."""

_EVEN = 1.001
"""Level of the fullest slot, with the best quotas, up to which there is nothing left to gain."""


def count_moved(before: Copies, after: Copies) -> int:
    """Copies that a slot has after a change and had not before: what has to be sent."""
    return int(((after > 0) & (before == 0)).sum())


def plan_copies(loads: ExpertLoads, limits: SlotLimits, *, num_copies: int | None = None) -> Copies:
    """A placement from scratch: `place_copies`, polished in layers where that leaves something to gain.

    That is where slots are uneven, or a gradient sum between scale-up domains is dear. Such layers are improved by
    moves without a price for sending, and compared with what other beginnings lead to: no expert in two scale-up
    domains, and one copy of each expert, since in tight places further copies can be in the way.

    Args:
        loads: router loads.
        limits: the slots.
        num_copies: copies of all experts of a layer together; None means as many as there are places.

    Raises:
        ValueError: if the slots cannot hold every expert once, or ``num_copies`` is less than one of each.
    """
    copies = place_copies(loads, limits, num_copies=num_copies)
    tokens = whole_tokens(loads)
    chosen = np.arange(len(copies))
    dear = limits.far_price > _DEAR
    if not dear:
        equal = (tokens // copies.sum(axis=2, dtype=np.int64))[:, None, :] @ copies.astype(np.int64)
        level = (equal[:, 0] / np.array(limits.speeds_ppm)).max(axis=1)
        speed = sum(limits.speeds_ppm[slot] for slot in limits.used)
        chosen = np.flatnonzero(level > _UNEVEN * tokens.sum(axis=1) / speed)
    if len(chosen) == 0:
        return copies
    some = loads.of_layers(chosen)
    others = [place_copies(some, limits, num_copies=loads.num_experts)]
    if dear:
        others.append(place_copies(some, limits, num_copies=num_copies, bridged=False))
    for row, index in enumerate(chosen.tolist()):
        beginnings = [copies[index], *(other[row] for other in others)]
        number = int(copies[index].sum())
        copies[index] = _polished(beginnings, tokens[index].tolist(), limits, dear=dear)
        fill_up(copies[index], tokens[index], limits, number)
    return copies


def _polished(beginnings: Sequence[Copies], tokens: list[int], limits: SlotLimits, *, dear: bool) -> Copies:
    """The best of what beginnings lead to after all moves that help; the first of those that are alike.

    They are compared by score where gradient sums are dear, and else by level.
    """
    anywhere = np.ones(beginnings[0].shape, dtype=np.int8)
    needed = _needed(beginnings[0], limits)
    best: LayerCopies | None = None
    least = 0.0
    for copies in beginnings:
        if copies.sum(axis=1).min() < needed:
            continue
        layer = LayerCopies(copies, tokens, limits, anywhere, needed)
        _improve([layer], 0.0, None)
        value = layer.solved.score if dear else layer.solved.level
        if best is None or value < least:
            best, least = layer, value
        if not dear and least <= _EVEN:
            break
    assert best is not None  # the first has what is needed
    return best.copies()


def adapt_copies(
    copies: Copies,
    loads: ExpertLoads,
    limits: SlotLimits,
    *,
    min_gain: float = MIN_GAIN,
    max_moved: int | None = None,
) -> Copies:
    """The placement in force, changed only where that pays under new loads.

    Args:
        copies: ``[layers, experts, slots]``, in force.
        loads: new router loads.
        limits: the slots; the placement has to keep to them already. After a loss use `repair_copies`.
        min_gain: what a copy that is sent must bring, in shares of the average level of a layer's slots. Seconds to
            send a copy, over the seconds of a layer's experts at perfect balance times the steps until the next plan.
        max_moved: copies sent at most, over all layers.

    Returns:
        The new placement; equal to the old one if nothing pays.

    Raises:
        ValueError: if the placement does not fit the loads or the limits.
    """
    _check(copies, loads, limits)
    if (copies.sum(axis=2) == 0).any():
        layer, expert = np.argwhere(copies.sum(axis=2) == 0)[0].tolist()
        raise ValueError(f"copies[{layer}] has no copy of expert {expert}; use repair_copies")
    tokens = whole_tokens(loads)
    layers = [
        LayerCopies(layer, tokens[index].tolist(), limits, layer, _needed(layer, limits))
        for index, layer in enumerate(copies)
    ]
    _improve(layers, min_gain, max_moved)
    return np.stack([layer.copies() for layer in layers])


def repair_copies(
    copies: Copies,
    loads: ExpertLoads,
    limits: SlotLimits,
    lost: Iterable[int],
    *,
    min_gain: float = MIN_GAIN,
    max_extra: int | None = None,
) -> Copies:
    """The placement after slots were lost: survivors keep what they have, but for what makes room.

    An expert that lost its last copy gets a new one on a free place, or instead of a copy of an expert that has
    others; so does one with a single copy if every expert had two and there is memory for that. Then moves as in
    `adapt_copies`.

    Args:
        copies: ``[layers, experts, slots]``, before the loss.
        loads: router loads.
        limits: the slots before the loss.
        lost: the slots that are gone; they get no copy.
        min_gain: see `adapt_copies`.
        max_extra: copies sent at most, over all layers, beyond those that were lost.

    Raises:
        ValueError: if the placement does not fit the loads or the limits, or the survivors cannot hold every expert.
    """
    _check(copies, loads, limits)
    gone = sorted(set(lost))
    if any(not 0 <= slot < limits.num_slots for slot in gone):
        raise ValueError(f"lost {gone} must be of the {limits.num_slots} slots; use positions in the slot dimension")
    left = limits.without(gone)
    left.num_places(copies.shape[1])
    before = copies.copy()
    before[:, :, gone] = 0
    tokens = whole_tokens(loads)
    layers: list[LayerCopies] = []
    for index, held in enumerate(before):
        layer = LayerCopies(held, tokens[index].tolist(), left, held, _needed(copies[index], left))
        _replace_lost(layer)
        layers.append(layer)
    _improve(layers, min_gain, max_extra)
    return np.stack([layer.copies() for layer in layers])


def _needed(layer: Copies, limits: SlotLimits) -> int:
    """Copies that every expert of a layer should have: 2 if all have, and memory for it remains."""
    experts = layer.shape[0]
    return min(limits.needed_copies(experts), max(1, int(layer.sum(axis=1).min())))


def _replace_lost(layer: LayerCopies) -> None:
    """Gives every expert a copy, and then a second where memory is for that."""
    for expert in layer.lacking():
        placed = place(layer, expert)
        # Places suffice for one of each, and then an expert without a copy finds a free one or another's second.
        assert placed or layer.hosts[expert], f"expert {expert} found no place"


def _improve(layers: list[LayerCopies], min_gain: float, max_moved: int | None) -> None:
    """Makes the moves that pay, in place, the one of most value over all layers first."""
    waiting: list[tuple[float, int, Move]] = []
    for index, layer in enumerate(layers):
        _offer(waiting, index, layer, min_gain)
    moved = 0
    while waiting:
        _, index, move = heapq.heappop(waiting)
        if max_moved is not None and move.cost > 0 and moved + move.cost > max_moved:
            continue
        layers[index].apply(move.changes)
        moved += move.cost
        _offer(waiting, index, layers[index], min_gain)


def _offer(waiting: list[tuple[float, int, Move]], index: int, layer: LayerCopies, min_gain: float) -> None:
    move = best_move(layer, min_gain)
    if move is not None:
        heapq.heappush(waiting, (-move.value, index, move))


def _check(copies: Copies, loads: ExpertLoads, limits: SlotLimits) -> None:
    """Makes sure that a placement fits loads and limits."""
    wanted = (*loads.mean.shape, limits.num_slots)
    if copies.shape != wanted:
        raise ValueError(f"copies have shape {copies.shape}; loads and limits are for {wanted}")
    over = np.argwhere(copies.sum(axis=1) > np.array(limits.places))
    if len(over):
        layer, slot = over[0].tolist()
        raise ValueError(
            f"copies[{layer}] has {copies[layer, :, slot].sum()} copies on slot {slot} with places for "
            f"{limits.places[slot]}; use repair_copies for slots that lost their places"
        )
