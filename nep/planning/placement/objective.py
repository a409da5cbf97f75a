"""The objective of a placement: predicted seconds, summed over layers, of the busiest slot of each."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.problem import Cut, Floats, Problem
from nep.planning.placement.problem import slot_seconds as _slot_seconds


def slot_seconds(units: Cut, loads: ExpertLoads, cost: PlacementCost, speeds: ArrayLike) -> Floats:
    """Predicted seconds of every slot in every layer.

    Args:
        units: ``[layers, experts, slots]``.
        loads: ``[layers, experts]``; only the shares within a layer count.
        cost: prices; its ``tokens`` are shared over the experts by load.
        speeds: ``[slots]``, relative.

    Returns:
        ``[layers, slots]``.

    Raises:
        ValueError: if the shapes do not fit, or speeds are not positive.
    """
    problem = Problem.of(loads, speeds=speeds, cost=cost)
    check_cut(problem, units)
    return _slot_seconds(problem, np.ascontiguousarray(np.swapaxes(units, 1, 2)))


def layer_seconds(units: Cut, loads: ExpertLoads, cost: PlacementCost, speeds: ArrayLike) -> Floats:
    """Predicted seconds of every layer, ``[layers]``: those of its busiest slot, which the others wait for.

    Their sum is the objective.
    """
    busiest: Floats = slot_seconds(units, loads, cost, speeds).max(axis=1)
    return busiest


def check_cut(problem: Problem, units: Cut, *, complete: bool = False) -> None:
    """Makes sure that an array is a cut of the problem's experts.

    Args:
        problem: says how many layers, experts and slots there are.
        units: what should be a cut.
        complete: whether every expert must have all its units somewhere.

    Raises:
        ValueError: if it is none.
    """
    shape = (problem.num_layers, problem.num_experts, problem.num_slots)
    if units.shape != shape:
        raise ValueError(f"the cut has shape {units.shape}; loads and speeds make it {shape}")
    if not np.issubdtype(units.dtype, np.integer) or (units < 0).any():
        raise ValueError("the cut must be integers of at least 0: units of each expert on each slot")
    if complete:
        sums = units.sum(axis=2)
        wrong = np.argwhere(sums != problem.units_per_expert)
        if wrong.size:
            layer, expert = (int(index) for index in wrong[0])
            raise ValueError(
                f"the cut places {sums[layer, expert]} units of expert {expert} in layer {layer}; it must "
                f"place each of the {problem.units_per_expert} once"
            )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a cut is like under given loads. All are means over layers.

    Attributes:
        balance: mean over max of load per speed; 1 is perfect. Load alone: not what decides.
        rows: rows per routed token and expert (1 if no expert is cut).
        busiest_rows: rows of the slot with the most, as a multiple of an even share of the uncut rows.
        memory: units of the fullest slot over those of the mean one, all layers together.
        pieces: pieces per layer.
    """

    balance: float
    rows: float
    busiest_rows: float
    memory: float
    pieces: float


def figures(units: Cut, loads: ExpertLoads, speeds: ArrayLike) -> Figures:
    """Balance, rows, memory and pieces of a cut.

    Args:
        units: ``[layers, experts, slots]``.
        loads: ``[layers, experts]``.
        speeds: ``[slots]``; slots that should not count are left out by the caller.
    """
    speed = np.asarray(speeds, dtype=np.float64)
    share = loads.normalised().mean
    sizes = np.maximum(units.sum(axis=2), 1)
    load = np.einsum("le,les->ls", share / sizes, units.astype(np.float64))
    rows = np.einsum("le,les->ls", share, (units > 0).astype(np.float64))
    used = units.sum(axis=(0, 1))
    return Figures(
        balance=float((1 / speed.sum() / (load / speed).max(axis=1)).mean()),
        rows=float(rows.sum(axis=1).mean()),
        busiest_rows=float(rows.max(axis=1).mean() * speed.shape[0]),
        memory=float(used.max() / max(used.mean(), 1e-300)),
        pieces=float((units > 0).sum() / units.shape[0]),
    )
