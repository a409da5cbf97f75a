"""Cuts for a step in which all slots wait for the last rows, and then for the last products.

Placement counts rows and products of each slot together. A step waits for the slot with most rows and then for the
one with most arithmetic, which may be another one: once one slot has rows of two experts, those of others come free.
So cuts are made at several prices of rows, and the one that waits least is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.objective import check_cut
from nep.planning.placement.problem import ROW_THRIFT, Cut, Floats, Problem, slot_seconds

_WEIGHTS = (1.0, 0.5, 0.25, 0.0)
"""Parts of their price at which rows are counted."""
_PAIRS = 100_000
"""Pairs of expert and slot, over all layers, up to which every weight is tried; beyond, experts are so many that most
are whole, and a slot's rows are in proportion to its arithmetic."""


def waited_seconds(units: Cut, loads: ExpertLoads, cost: PlacementCost, speeds: ArrayLike) -> Floats:
    """Predicted seconds of every layer if all wait for the last rows before the products begin, ``[layers]``.

    The slot with most rows and the one with most arithmetic may be different ones: that is how a step counts a
    layer (`nep.planning.cost.step_time`). Once one slot has rows of two experts, those of others come free.
    """
    problem = Problem.of(loads, speeds=speeds, cost=cost)
    check_cut(problem, units)
    held = np.ascontiguousarray(np.swapaxes(units, 1, 2))
    rows = slot_seconds(replace(problem, work_s=np.zeros_like(problem.work_s), piece_s=0.0), held)
    work = slot_seconds(replace(problem, row_s=np.zeros_like(problem.row_s)), held)
    waited: Floats = rows.max(axis=1) + work.max(axis=1)
    return waited


def least_waiting(
    cut_at: Callable[[PlacementCost], Cut],
    loads: ExpertLoads,
    speeds: Sequence[float],
    cost: PlacementCost,
    *,
    before: Cut | None = None,
    unit_s: float = 0.0,
    mix: bool = False,
) -> Cut:
    """Of the cuts that come of rows at several prices the one that waits least.

    Args:
        cut_at: prices -> cut.
        loads: of the layers.
        speeds: ``[slots]``.
        cost: the true prices.
        before: a complete cut in force that is one of the choices; what differs from it has to travel.
        unit_s: seconds per step that each unit which travels must gain.
        mix: whether every layer may take another one; not so where layers share a pool of memory.
    """
    pairs = loads.mean.size * len(speeds)
    weights = _WEIGHTS if cost.row_s > ROW_THRIFT * cost.token_s and pairs <= _PAIRS else _WEIGHTS[:1]
    cuts = [] if before is None else [before]
    for weight in weights:
        cut = cut_at(replace(cost, row_s=weight * cost.row_s))
        if not any(np.array_equal(cut, other) for other in cuts):
            cuts.append(cut)
    if len(cuts) == 1:
        return cuts[0]
    seconds: list[Floats] = []
    for cut in cuts:
        waited = waited_seconds(cut, loads, cost, speeds)
        if before is not None:
            waited = waited + unit_s * np.maximum(cut - before, 0).sum(axis=(1, 2))
        seconds.append(waited)
    table = np.stack(seconds)
    # By more than rounding: the first of equals is what placement itself would choose.
    table[1:] *= 1 + 1e-9
    best = cuts[int(table.sum(axis=1).argmin())]
    if not mix:
        return best
    mixed = best.copy()
    for layer, index in enumerate(table.argmin(axis=0).tolist()):
        mixed[layer] = cuts[index][layer]
    return mixed
