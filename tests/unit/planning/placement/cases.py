"""Random placement problems and slow, readable references that the placement tests share."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from numpy.typing import NDArray

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.problem import Problem

Cut = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Everything that `place` takes."""

    loads: ExpertLoads
    speeds: tuple[float, ...]
    cost: PlacementCost
    memory_units: NDArray[np.int64] | None

    @property
    def shape(self) -> tuple[int, int, int]:
        return (*self.loads.mean.shape, len(self.speeds))

    @property
    def size(self) -> int:
        return self.cost.units_per_expert

    def problem(self) -> Problem:
        return Problem.of(self.loads, speeds=self.speeds, cost=self.cost, memory_units=self.memory_units)

    def keywords(self) -> dict[str, object]:
        return {"speeds": self.speeds, "cost": self.cost, "memory_units": self.memory_units}


LOADS = st.sampled_from((0.0, 0.01, 0.5, 1.0, 1.0, 2.0, 7.3, 50.0, 1e6))
SPEEDS = st.sampled_from((1.0, 1.0, 1.0, 0.7, 0.85, 2.0, 0.1))
PRICES = st.sampled_from((0.0, 0.05, 0.25, 1.0, 4.0))


@st.composite
def costs(draw: DrawFn, max_units: int = 9) -> PlacementCost:
    """Any prices, all of them free included."""
    return PlacementCost(
        token_s=draw(st.sampled_from((1.0, 1.0, 1.0, 2e-7, 0.0))),
        row_s=draw(PRICES),
        piece_s=draw(st.sampled_from((0.0, 0.0, 0.1, 5.0))),
        units_per_expert=draw(st.integers(1, max_units)),
        tokens=draw(st.sampled_from((1.0, 1000.0, 0.0))),
    )


@st.composite
def cases(draw: DrawFn, max_layers: int = 3, max_experts: int = 7, max_slots: int = 5, max_units: int = 9) -> Case:
    """Problems that can be solved: any counts, unequal speeds, uneven memory of either kind, or no limit."""
    layers = draw(st.integers(1, max_layers))
    experts = draw(st.integers(1, max_experts))
    slots = draw(st.integers(1, max_slots))
    cost = draw(costs(max_units))
    mean = draw(st.lists(LOADS, min_size=layers * experts, max_size=layers * experts))
    speeds = tuple(draw(st.lists(SPEEDS, min_size=slots, max_size=slots)))
    loads = ExpertLoads(mean=np.array(mean).reshape(layers, experts))
    kind = draw(st.sampled_from(("none", "pool", "layers")))
    memory = None
    whole = experts * cost.units_per_expert
    if kind == "pool":
        memory = draw(limits(whole * layers, slots))
    elif kind == "layers":
        memory = np.stack([draw(limits(whole, slots)) for _ in range(layers)])
    return Case(loads=loads, speeds=speeds, cost=cost, memory_units=memory)


@st.composite
def limits(draw: DrawFn, needed: int, slots: int) -> NDArray[np.int64]:
    """Units that each slot can hold, together at least as many as needed; some slots may hold none."""
    weights = draw(st.lists(st.integers(0, 4), min_size=slots, max_size=slots).filter(any))
    slack = draw(st.sampled_from((1.0, 1.0, 1.06, 1.5)))
    parts = np.floor(np.array(weights) / sum(weights) * needed * slack).astype(np.int64)
    parts[int(np.argmax(weights))] += max(0, needed - int(parts.sum()))
    return parts


def slow_slot_seconds(case: Case, units: Cut) -> NDArray[np.float64]:
    """Seconds of every slot, piece by piece."""
    layers, experts, slots = case.shape
    seconds = np.zeros((layers, slots))
    for layer in range(layers):
        mean = case.loads.mean[layer]
        share = mean / mean.sum() if mean.any() else np.full(experts, 1 / experts)
        for expert in range(experts):
            tokens = share[expert] * case.cost.tokens
            for slot in range(slots):
                count = units[layer, expert, slot]
                if count:
                    work = tokens * case.cost.token_s * count / case.size
                    seconds[layer, slot] += (work + case.cost.piece_s) / case.speeds[slot]
                    seconds[layer, slot] += tokens * case.cost.row_s
    return seconds


def slow_longest_first(case: Case, layer: int, places: NDArray[np.int64]) -> list[int] | None:
    """The plain whole-expert rule: the hottest expert to the slot that ends first, by load over speed.

    Args:
        case: loads and speeds.
        layer: of it.
        places: whole experts that each slot can hold of this layer.

    Returns:
        The slot of each expert, or None if they do not fit.
    """
    _, experts, slots = case.shape
    mean = case.loads.normalised().mean[layer] * case.cost.tokens
    busy, left, slot_of = [0.0] * slots, list(places), [-1] * experts
    for expert in sorted(range(experts), key=lambda expert: (-mean[expert], expert)):
        free = [slot for slot in range(slots) if left[slot] > 0]
        if not free:
            return None
        best = min(free, key=lambda slot: (busy[slot] + mean[expert] / case.speeds[slot], slot))
        busy[best] += mean[expert] / case.speeds[best]
        left[best] -= 1
        slot_of[expert] = best
    return slot_of


def check_memory(case: Case, units: Cut) -> None:
    """Asserts that no slot holds more than its memory."""
    memory = case.memory_units
    if memory is None:
        return
    if memory.ndim == 1:
        assert (units.sum(axis=(0, 1)) <= memory).all()
    else:
        assert (units.sum(axis=1) <= memory).all()


def check_complete(case: Case, units: Cut) -> None:
    """Asserts that every unit of every expert is somewhere, once."""
    assert units.shape == case.shape
    assert np.issubdtype(units.dtype, np.integer)
    assert (units >= 0).all()
    assert (units.sum(axis=2) == case.size).all()
