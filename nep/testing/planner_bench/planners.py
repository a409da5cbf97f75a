"""The planners that are compared, each a function from loads (and what it planned before) to a placement."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nep.planning.copies.place import SlotLimits
from nep.planning.copies.warm import adapt_copies, plan_copies, repair_copies
from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.cost.step_time import placement_cost
from nep.planning.cost.workload import Workload
from nep.planning.loads import ExpertLoads
from nep.planning.placement.place import place
from nep.planning.placement.repair import repair
from nep.planning.placement.waiting import least_waiting
from nep.planning.placement.warm import warm
from nep.planning.search.drafts import far_rows
from nep.testing.planner_bench.cases import Case

Units = NDArray[np.int64]

# Cuts may take so much more memory than the mean slot.
MEMORY_SHARE = 1.06
# Of expert bytes, that one re-plan under drift may move.
DRIFT_BUDGET = 0.01


@dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """A placement.

    Attributes:
        units: int64 [layers, experts, slots]; more than one expert's on a slot are copies that it has twice.
        size: units of an expert.
        has_copies: whether tokens of an expert go to one of its copies, and not to each of its slices.
    """

    units: Units
    size: int
    has_copies: bool = False


@dataclass(frozen=True, kw_only=True)
class Planner:
    """One of those compared.

    Attributes:
        name: in the results.
        plan: loads, and the placement before or None, to a placement.
        recover: loads and a placement whose last slot has died, to a placement on the others; None: it has no way.
        why_not: why it cannot plan this case; empty if it can.
    """

    name: str
    plan: Callable[[ExpertLoads, Placed | None], Placed]
    recover: Callable[[ExpertLoads, Placed], Placed] | None = None
    why_not: str = ""


def cost_of(case: Case, workload: Workload, hardware: HardwareProfile, block: int | None = None) -> PlacementCost:
    """Prices of a case."""
    shape = case.shape if block is None else replace(case.shape, neuron_block=block)
    crosses = case.num_slots > (hardware.scale_up_slots or case.slots_per_node)
    far = far_rows([slot // (hardware.scale_up_slots or case.slots_per_node) for slot in range(case.num_slots)])
    return placement_cost(shape, workload, hardware, lanes=case.num_slots, crosses_domains=crosses, far_rows=far)


def our_planners(case: Case, workload: Workload, hardware: HardwareProfile) -> list[Planner]:
    """No balancing, and everything that nep does."""
    layers, experts = case.windows.shape[1:]
    speeds = np.array(case.speeds)
    coarse = cost_of(case, workload, hardware)
    fine = cost_of(case, workload, hardware, block=1)

    def memory(cost: PlacementCost, share: float, *, whole: bool) -> Units:
        """Units of all layers together that a slot may hold."""
        mean = layers * experts * cost.units_per_expert / case.num_slots
        least = layers * -(-experts // case.num_slots) * cost.units_per_expert if whole else -(-mean // 1)
        return np.full(case.num_slots, max(int(share * mean), int(least)), dtype=np.int64)

    def from_scratch(cost: PlacementCost, share: float, *, cut: bool) -> Callable[..., Placed]:
        limits = memory(cost, share, whole=not cut)

        def plan(loads: ExpertLoads, before: Placed | None) -> Placed:
            def at(price: PlacementCost) -> Units:
                return place(loads, speeds=speeds, cost=price, memory_units=limits, cut=cut).units

            units = least_waiting(at, loads, list(speeds), cost) if cut else at(cost)
            return Placed(units=units, size=cost.units_per_expert)

        return plan

    cut = from_scratch(coarse, MEMORY_SHARE, cut=True)

    def warm_cut(loads: ExpertLoads, before: Placed | None) -> Placed:
        if before is None:
            return cut(loads, None)
        budget = int(DRIFT_BUDGET * layers * experts * coarse.units_per_expert)
        limits = memory(coarse, MEMORY_SHARE, whole=False)
        change = warm(before.units, loads, speeds=speeds, cost=coarse, memory_units=limits, budget_units=budget)
        return Placed(units=change.units, size=coarse.units_per_expert)

    def repaired(loads: ExpertLoads, before: Placed) -> Placed:
        # Those who are left must hold everything.
        left = memory(coarse, MEMORY_SHARE, whole=False) * case.num_slots // max(1, case.num_slots - 1)
        change = repair(before.units, [case.num_slots - 1], loads, speeds=speeds, cost=coarse, memory_units=left)
        return Placed(units=change.units[:, :, :-1], size=coarse.units_per_expert)

    limits = _slot_limits(case, coarse)
    size = coarse.units_per_expert

    def copies(loads: ExpertLoads, before: Placed | None) -> Placed:
        found = plan_copies(loads, limits, num_copies=case.physical)
        return Placed(units=found.astype(np.int64) * size, size=size, has_copies=True)

    def warm_copies(loads: ExpertLoads, before: Placed | None) -> Placed:
        if before is None:
            return copies(loads, None)
        budget = int(DRIFT_BUDGET * layers * case.physical)
        found = adapt_copies((before.units > 0).astype(np.int8), loads, limits, max_moved=budget)
        return Placed(units=found.astype(np.int64) * size, size=size, has_copies=True)

    def repaired_copies(loads: ExpertLoads, before: Placed) -> Placed:
        found = repair_copies((before.units > 0).astype(np.int8), loads, limits, [case.num_slots - 1])
        return Placed(units=found[:, :, :-1].astype(np.int64) * size, size=size, has_copies=True)

    return [
        Planner(
            name="none",
            plan=lambda loads, before: _in_order(case),
            recover=lambda loads, before: _in_order(without_last(case)),
        ),
        Planner(name="nep whole", plan=from_scratch(coarse, MEMORY_SHARE, cut=False)),
        Planner(name="nep cuts", plan=cut, recover=repaired),
        Planner(name="nep cuts, warm", plan=warm_cut),
        Planner(name="nep cuts, block 1, no memory", plan=from_scratch(fine, 1.0, cut=True)),
        Planner(name="nep copies", plan=copies, recover=repaired_copies),
        Planner(name="nep copies, warm", plan=warm_copies),
    ]


def without_last(case: Case) -> Case:
    """The case after its last slot has died; as many copies on each of the others."""
    physical = case.physical * (case.num_slots - 1) // case.num_slots
    return replace(case, speeds=case.speeds[:-1], physical=max(physical, case.windows.shape[2]))


def _slot_limits(case: Case, cost: PlacementCost) -> SlotLimits:
    """Places for the copies, as even as they go; a node is a fault domain and a scale-up domain."""
    even, rest = divmod(case.physical, case.num_slots)
    nodes = tuple(slot // case.slots_per_node for slot in range(case.num_slots))
    return SlotLimits(
        places=tuple(even + (slot < rest) for slot in range(case.num_slots)),
        speeds_ppm=tuple(round(speed * 1e6) for speed in case.speeds),
        domains=nodes,
        scale_up=nodes,
        far=cost.far_sum_share,
    )


def _in_order(case: Case) -> Placed:
    """Experts dealt to the slots in order, as evenly as whole ones go."""
    layers, experts = case.windows.shape[1:]
    units = np.zeros((layers, experts, case.num_slots), dtype=np.int64)
    for expert in range(experts):
        units[:, expert, expert * case.num_slots // experts] = 1
    return Placed(units=units, size=1)


def eplb_planners(case: Case, path: Path) -> list[Planner]:
    """DeepSeek's planner, from a checkout of theirs; global, and hierarchical where it applies.

    Args:
        case: what is planned.
        path: the checkout, or its eplb.py.

    Raises:
        ValueError: it is not there.
    """
    eplb = _load(path)
    nodes = -(-case.num_slots // case.slots_per_node)
    planners = []
    for name, groups, of_nodes in (("EPLB global", 1, 1), ("EPLB hierarchical", 8, nodes)):
        why = _why_not(case, groups, of_nodes)
        if name == "EPLB hierarchical" and of_nodes == 1 and not why:
            why = "one node: the same as global"

        plan = _eplb_plan(eplb, case, groups, of_nodes)
        left = without_last(case)
        again = None if _why_not(left, groups, of_nodes) else _eplb_plan(eplb, left, groups, of_nodes)
        planners.append(Planner(name=name, plan=plan, recover=again, why_not=why))
    return planners


def _eplb_plan(eplb: Any, case: Case, groups: int, nodes: int) -> Callable[[ExpertLoads, Placed | None], Placed]:
    """It plans from scratch, whatever there was before."""

    def plan(loads: ExpertLoads, before: Placed | None) -> Placed:
        import torch

        weight = torch.from_numpy(np.array(loads.mean))
        physical, _, _ = eplb.rebalance_experts(weight, case.physical, groups, nodes, case.num_slots)
        return _from_physical(physical.numpy(), case)

    return plan


def _why_not(case: Case, groups: int, nodes: int) -> str:
    """What EPLB would fail an assertion on."""
    experts = case.windows.shape[2]
    if case.physical % case.num_slots:
        return f"{case.physical} copies are no multiple of {case.num_slots} slots"
    if case.num_slots % nodes:
        return f"{case.num_slots} slots are no multiple of {nodes} nodes"
    if experts % groups or groups % nodes:
        return f"{experts} experts in {groups} groups cannot be shared out over {nodes} nodes"
    return ""


def _from_physical(physical: Units, case: Case) -> Placed:
    """From [layers, physical experts], equally many for each slot; twice on one slot counts twice."""
    layers, experts = case.windows.shape[1:]
    size = case.shape.units_per_expert
    units = np.zeros((layers, experts, case.num_slots), dtype=np.int64)
    slot = np.arange(case.physical) // (case.physical // case.num_slots)
    np.add.at(units, (np.arange(layers)[:, None], physical, slot[None, :]), size)
    return Placed(units=units, size=size, has_copies=True)


def _load(path: Path) -> Any:
    file = path / "eplb.py" if path.is_dir() else path
    spec = importlib.util.spec_from_file_location("eplb", file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"eplb ({path}) must be a checkout of deepseek-ai/EPLB, with eplb.py in it")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
