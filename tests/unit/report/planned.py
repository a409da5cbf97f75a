"""Requests and answers put together by hand, without the search: for tests of what is shown of them."""

import dataclasses

import numpy as np

from nep.planning.cluster import Cluster
from nep.planning.cost.memory import step_memory
from nep.planning.cost.profiles import PROFILES
from nep.planning.cost.step_time import step_time
from nep.planning.cost.workload import Workload
from nep.planning.layout import Layout
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Lane, Plan
from nep.planning.search.request import Alternative, Planned, PlanReport, PlanRequest, SlotFigures
from nep.planning.shapes import ModelShape, parameter_lines, preset
from nep.planning.transfer import fetch, overlaps

WORKLOAD = Workload(global_batch_size=8, micro_batch_size=1, seq_len=128)


def request_of(
    *, shape: ModelShape | None = None, cluster: Cluster | None = None, workload: Workload = WORKLOAD, **fields
) -> PlanRequest:
    """A request with something for every field."""
    return PlanRequest(
        cluster=cluster or Cluster.uniform(4, 4),
        shape=shape or preset("debug"),
        workload=workload,
        hardware=PROFILES["h100-sxm"],
        **fields,
    )


def whole_plan(request: PlanRequest, *, copies: int = 0, number: int = 0) -> Plan:
    """Whole experts dealt to the healthy slots of one replica in turn, and `copies` further ones of the first.

    Dense axes are held by every slot, and the first holder of a unit owns it.
    """
    slots = request.cluster.healthy
    shape, lines = request.shape, parameter_lines(request.shape)
    size = shape.units_per_expert
    holders: dict[str, dict[int, list[tuple[int, int]]]] = {}
    owners: dict[str, dict[int, list[tuple[int, int]]]] = {}
    for line in lines.values():
        if line.units_per_expert is None:
            holders[line.axis] = {slot: [(0, line.num_units)] for slot in slots}
            owners[line.axis] = {slots[0]: [(0, line.num_units)]}
            continue
        held: dict[int, set[int]] = {slot: set() for slot in slots}
        for expert in range(shape.num_experts):
            held[slots[expert % len(slots)]].add(expert)
        owners[line.axis] = {slot: [(e * size, e * size + size) for e in sorted(held[slot])] for slot in slots}
        for copy in range(copies):
            held[slots[(copy + 1) % len(slots)]].add(copy % shape.num_experts)
        holders[line.axis] = {slot: [(e * size, e * size + size) for e in sorted(held[slot])] for slot in slots}
    even = request.workload.global_batch_size // len(slots)
    rest = request.workload.global_batch_size - even * len(slots)
    speeds = request.cluster.speeds_ppm
    return Plan(
        number=number,
        slots=slots,
        replicas=(slots,),
        lanes=tuple(Lane(0, (slot,), even + (place < rest)) for place, slot in enumerate(slots)),
        holders=_layout(holders),
        owners=_layout(owners),
        mirrors=Layout({}),
        redundancy="none",
        speeds_ppm=tuple(speeds[slot] for slot in slots),
    )


def _layout(cuts: dict[str, dict[int, list[tuple[int, int]]]]) -> Layout:
    return Layout({axis: {slot: tuple(parts) for slot, parts in by.items()} for axis, by in cuts.items()})


def planned_of(request: PlanRequest, plan: Plan, **fields) -> Planned:
    """The plan with a report whose times are the cost model's and whose other numbers are made up."""
    costs = {"shape": request.shape, "workload": request.workload, "hardware": request.hardware}
    predicted = step_time(plan, cluster=request.cluster, loads=request.loads, **costs)
    memory = step_memory(plan, shape=request.shape, workload=request.workload)
    lines = parameter_lines(request.shape)
    transfers = {}
    if request.current is not None:
        sources = [request.current.holders.restrict(request.cluster.live)]
        transfers["parameters"] = fetch(sources, plan.holders, list(plan.holders.cuts), have=sources[0])
        transfers["state"] = overlaps(request.current.owners, plan.owners, list(plan.owners.cuts))
    values = {
        "predicted": predicted,
        "healthy": predicted,
        "current": None if request.current is None else predicted,
        "balance": 0.9876,
        "bound_s": predicted["expert_gemm"] * 0.99,
        "placement_s": predicted["expert_gemm"],
        "binds": "all slots are busy all the time: only more or faster slots help",
        "slots": tuple(
            SlotFigures(
                slot=slot,
                speed=ppm / 1e6,
                load=1.0,
                rows=1.0,
                memory_bytes=memory.total(slot),
                memory_limit_bytes=request.hardware.memory_bytes,
                step_s=sum(predicted.by_slot[slot].values()),
            )
            for slot, ppm in zip(plan.slots, plan.speeds_ppm, strict=True)
        ),
        "copies": None,
        "transfers": transfers,
        "moved_bytes": sum(one.remote().num_bytes(lines, 2) for one in transfers.values()),
        "move_s": 0.125,
        "survival": {1: 1.0, 2: 0.75},
        "alternatives": (
            Alternative(
                name="repair", step_s=predicted.total, move_s=0.125, samples_per_s=80.0, chosen=True, why="fastest"
            ),
            Alternative(
                name="wait for repair", step_s=None, move_s=0.0, samples_per_s=None, chosen=False, why="none is known"
            ),
        ),
        "skipped": None,
    }
    return Planned(plan=plan, report=PlanReport(**(values | fields)))


def uneven_loads(shape: ModelShape, seed: int = 0) -> ExpertLoads:
    """Three steps of counts."""
    counts = np.random.default_rng(seed).integers(1, 100, (3, shape.num_moe_layers, shape.num_experts))
    return ExpertLoads.from_counts(counts)


def with_slices(shape: ModelShape, plan: Plan) -> Plan:
    """The plan with the first expert of every layer cut in two halves, the second on the last slot."""
    size = shape.units_per_expert
    cuts = {axis: dict(by) for axis, by in plan.holders.cuts.items()}
    last = plan.slots[-1]
    for axis, by_slot in cuts.items():
        if not axis.endswith("experts"):
            continue
        first = next(slot for slot in plan.slots if (0, size) in by_slot[slot])
        kept = [part for part in by_slot[first] if part != (0, size)]
        by_slot[first] = (*kept, (0, size // 2))
        by_slot[last] = (*by_slot[last], (size // 2, size))
    return dataclasses.replace(plan, holders=Layout(cuts))
