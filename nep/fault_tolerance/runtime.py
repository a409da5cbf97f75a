"""What one slot carries through the generations of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nep.distributed.groups import Groups, ParkingLot
from nep.distributed.timeouts import Timeouts
from nep.distributed.transports.base import Transport
from nep.distributed.waiting import Waiter
from nep.fault_tolerance.connections import Connections
from nep.fault_tolerance.control_store import ControlStore
from nep.fault_tolerance.history import History
from nep.fault_tolerance.integrity import Integrity
from nep.fault_tolerance.job import Job
from nep.fault_tolerance.records import Progress
from nep.fault_tolerance.requests import Requests
from nep.moe.routing_state import RoutingState
from nep.parallel.grad_sync import GradSync, Return
from nep.parallel.optimizer import OptimizerConfig
from nep.parallel.state import SlotState
from nep.planning.cluster import Cluster
from nep.planning.layout import Lines


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is the same in every generation.

    Attributes:
        lines: the model's parameters.
        dtype: of the parameters.
        optimizer: AdamW and its schedule.
        total_steps: T of the protocol.
        timeouts: derived from one base.
        smallest_bucket_bytes: of gradients that travel together, see `nep.parallel.grad_sync.layer_groups`.
        keep_loads: remember the expert loads of every committed step.
        num_replicas, lane_slots: what the job aims at when slots come back.
        num_members: the slots that shall train, spares not counted; 0: as many as there are.
        router_bias_rate: what a step adds to, or takes from, the biases that experts are chosen with.
        bias_to_speed: those biases aim at loads by speed, not at even ones.
    """

    lines: Lines
    dtype: torch.dtype
    optimizer: OptimizerConfig
    total_steps: int
    timeouts: Timeouts
    smallest_bucket_bytes: int = 0
    keep_loads: bool = False
    router_bias_rate: float = 0.0
    bias_to_speed: bool = False
    num_replicas: int = 1
    lane_slots: int = 1
    num_members: int = 0


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One membership, as this slot takes part in it.

    Attributes:
        number: from 1.
        members: slots, ascending; the position is the rank.
        groups: communicators, rebuilt whole for each generation.
        waiter: gives up at a fault of this generation.
    """

    number: int
    members: tuple[int, ...]
    groups: Groups
    waiter: Waiter


@dataclass(kw_only=True)
class SlotRun:
    """One slot's tensors and what it can prove about them.

    Attributes:
        store: the main thread's connection to the control store; `connections` has more.
        transport: makes the channels of communicators; also says where tensors are.
        progress: the local variables of the protocol; changed only by the rules in
            `nep.fault_tolerance.transaction`.
        state: tensors under the committed layout, the one that `progress.layout` names.
        next_state: complete state under `progress.next_layout`, or None.
        sync: transfers compiled for `state`.
        returning: new parameters on their way to the holders, or None.
        counts_le: global tokens per layer and expert of the prepared step.
        cluster: health as this slot knows it.
        history: what was committed.
        requests: those that this slot has read; `history.request` says how many are in effect.
        considered: number of the last request that a decision has answered.
        incarnations: which trainer of each slot is a member; the first where nothing is said.
        story: what returners are told beside tensors: how this slot tells it, and how it takes it.
        routing: what routing remembers of it; None: the model keeps nothing.
        integrity: compares copies of the same units; it does not by default.
        parking: groups and operations of broken generations.
        stop_requested: whether somebody has told this slot to stop.
        stopping: some slot was told to, and the step that said so is committed: the job ends here.
        on_applied: called when a step has been applied, also by a roll-forward: owned and mirrored state are of it.
    """

    job: Job
    store: ControlStore
    connections: Connections
    transport: Transport
    recipe: Recipe
    probe: Callable[[str, int], None]
    cluster: Cluster
    progress: Progress
    state: SlotState
    sync: GradSync
    next_state: SlotState | None = None
    returning: Return | None = None
    counts_le: torch.Tensor | None = None
    history: History = field(default_factory=History)
    requests: Requests = field(default_factory=Requests)
    considered: int = 0
    incarnations: dict[int, int] = field(default_factory=dict)
    story: tuple[Callable[[], bytes], Callable[[bytes], None]] = (bytes, lambda told: None)
    routing: RoutingState | None = None
    integrity: Integrity = field(default_factory=Integrity)
    generation: Generation | None = None
    parking: ParkingLot = field(default_factory=ParkingLot)
    stop_requested: Callable[[], bool] = lambda: False
    stopping: bool = False
    on_applied: Callable[[], None] = lambda: None

    @property
    def slot(self) -> int:
        return self.job.slot

    @property
    def wanted_members(self) -> int:
        """How many slots shall train."""
        return self.recipe.num_members or self.job.num_slots

    @property
    def current(self) -> Generation:
        """The generation this slot is in."""
        assert self.generation is not None
        return self.generation

    def probe_at(self, step: int) -> Callable[[str], None]:
        """Failure injection for one step."""
        return lambda phase: self.probe(phase, step)
