"""What the planner is asked, and what it answers beside the plan."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nep.planning.cluster import Cluster
from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.step_time import StepTime
from nep.planning.cost.workload import Workload
from nep.planning.degrees import Degrees
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan, Redundancy
from nep.planning.search.flows import Flow
from nep.planning.shapes import ModelShape
from nep.planning.transfer import Transfer


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What whoever carries out the plan can do.

    Attributes:
        fractions: experts may be cut; otherwise they are placed whole (other frameworks).
        physical_experts: expert copies per layer and replica, at least the experts; None: no copies. A slot holds
            a copy whole. Where experts may not be cut, so many places are there to be filled (servers).
        copies_apart: copies of an expert lie in two fault domains where memory allows, also where the sums of their
            gradients then go over the network; otherwise only where that costs nothing.
        max_tp: largest number of slots of a lane; 1: everything but experts is held whole by every slot.
        degrees: cut replicas, lanes and experts just so, from scratch; the number of replicas follows.
        memory_share: part of a slot's memory that the plan may use.
        change_in_parts: a change of layout may be carried out a few axes at a time, freeing memory in between;
            otherwise all of the old and the new layout has to fit at once.
    """

    fractions: bool = True
    physical_experts: int | None = None
    copies_apart: bool = False
    max_tp: int = 1
    degrees: Degrees | None = None
    memory_share: float = 0.9
    change_in_parts: bool = True


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Everything that a plan depends on; values only.

    Attributes:
        cluster: all slots with their health, speeds and memory.
        shape: the model.
        workload: the step.
        hardware: the accelerator.
        loads: statistics of the router; None: equal loads.
        num_replicas: data-parallel copies; None: the largest number that fits into memory.
        redundancy: where owners are mirrored.
        limits: of whoever carries it out.
        current: the plan in force; None: from scratch.
        horizon_steps: steps for which the plan will hold; moving must pay within them.
    """

    cluster: Cluster
    shape: ModelShape
    workload: Workload
    hardware: HardwareProfile
    loads: ExpertLoads | None = None
    num_replicas: int | None = 1
    redundancy: Redundancy = "device"
    limits: Limits = Limits()
    current: Plan | None = None
    horizon_steps: int = 1000


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Something else that was considered.

    Attributes:
        name: `drop the replica`, `whole experts`, `keep the layout`, `window cut`, `wait for repair`, ...
        step_s: predicted seconds of its step; None if it is not possible.
        move_s: seconds to get there; None where that was not worked out, as it could not win (in large jobs).
        samples_per_s: sequences per second.
        chosen: whether it is the plan.
        why: one sentence: why it lost (or won).
    """

    name: str
    step_s: float | None
    move_s: float | None
    samples_per_s: float | None
    chosen: bool
    why: str


@dataclass(frozen=True, kw_only=True)
class SlotFigures:
    """One slot under the plan.

    Attributes:
        slot: its number.
        speed: relative.
        load: share of its replica's routed tokens times units, mean over layers, over an even share (1: even).
        rows: rows it receives, over the mean of its replica.
        memory_bytes: what it needs.
        memory_limit_bytes: what it has; None if unknown.
        step_s: seconds it is busy in a step.
    """

    slot: int
    speed: float
    load: float
    rows: float
    memory_bytes: int
    memory_limit_bytes: int | None
    step_s: float


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What people and scripts want to know about a plan.

    Attributes:
        predicted: the step under the plan.
        healthy: the step as if every slot were healthy and at full speed (same planner).
        current: the step under the plan in force, as far as it can go on; None without one.
        balance: mean over max of load per speed, mean over layers.
        bound_s: what no plan can do the expert layers in, as placement counts them: every expert of a token costs a
            row, even where two of them are on one slot. The step, which counts such rows once, may be shorter.
        placement_s: what the plan needs, counted in the same way.
        binds: what keeps the plan from doing better, in words.
        slots: one entry per slot of the plan.
        copies: expert copies [layers, experts, slots of the plan] in {0, 1}, or None.
        transfers: what has to travel to get there, by kind (`parameters`, `state`, `mirrors`); empty in large jobs,
            of which only `flows` are worked out.
        flows: sums of the same; None: those of `transfers`.
        moved_bytes: their bytes.
        move_s: their seconds.
        survival: failures of slots (1, 2, ...) -> probability that the state survives without a checkpoint.
        alternatives: what was considered, the chosen one included.
        skipped: why the plan in force is kept, or None.
        change_parts: into how many changes of layout, a few axes each, the way there has to be cut to fit into
            memory: 0 if nothing changes, 1 if all of it fits at once.
        lost: ``(axis, lo, hi)`` whose master weights and moments nobody has any more: a checkpoint is needed.
    """

    predicted: StepTime
    healthy: StepTime
    current: StepTime | None
    balance: float
    bound_s: float
    placement_s: float
    binds: str
    slots: tuple[SlotFigures, ...]
    copies: NDArray[np.int64] | None
    transfers: Mapping[str, Transfer]
    moved_bytes: int
    move_s: float
    survival: Mapping[int, float]
    alternatives: tuple[Alternative, ...]
    skipped: str | None
    change_parts: int = 0
    lost: tuple[tuple[str, int, int], ...] = ()
    flows: Mapping[str, Flow] | None = None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and what there is to say about it."""

    plan: Plan
    report: PlanReport
