"""One slot of an emulated job: the real training code on this slot's accelerator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import nn

from nep.distributed.groups import Communicator
from nep.distributed.timeouts import Timeouts
from nep.fault_tolerance.commit import commit_layout, commit_step, settle
from nep.fault_tolerance.records import Progress
from nep.fault_tolerance.runtime import Generation, Recipe, SlotRun
from nep.parallel.grad_sync import GradSync, Reduction
from nep.parallel.migrate import migrate
from nep.parallel.optimizer import OptimizerConfig
from nep.parallel.overlap import Overlap
from nep.parallel.parallelize import parallelize
from nep.parallel.state import SlotState
from nep.planning.cost.dispatch_rows import inclusion
from nep.planning.cost.hardware import scale_up_domains
from nep.planning.layout import Layout
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.shapes import parameter_lines
from nep.testing.emulation.accelerator import Accelerator, Accounts, Speed, WallClock
from nep.testing.emulation.kernels import KernelSeconds
from nep.testing.emulation.links import KIND_OF_PROBE, Board, EmulatedCommunicator, Role, emulate_groups
from nep.testing.emulation.model import Workbench, emulate_model
from nep.testing.emulation.routing import ExpertSampler, route_as_drawn
from nep.testing.emulation.scaling import Scale
from nep.testing.emulation.setting import Emulation
from nep.testing.emulation.sizes import BucketSizes
from nep.testing.threads import ThreadSlot
from nep.train.initialization import initial_units
from nep.train.step import forward_backward


@dataclass(frozen=True, kw_only=True)
class Marker:
    """A slot's clocks when it saw a vote.

    Attributes:
        moment: on its time line.
        wall: on the wall clock, in emulated seconds.
        accounts: what it has done so far.
    """

    moment: float
    wall: float
    accounts: Accounts


class EmulatedClock:
    """What the kernels of an emulated accelerator take; see `nep.distributed.compute_clock`.

    Args:
        accelerator: whose.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def wait_begins(self) -> None:
        """Kernels alone count."""

    def wait_ends(self) -> None:
        """Kernels alone count."""

    def seconds(self) -> float:
        """See `ComputeClock`."""
        return self._accelerator.compute_s


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps that run under one plan; shared by the threads of all its slots.

    Attributes:
        emulation: what is emulated.
        plan: in force.
        first, last: steps.
        speed: of all slots.
        clock: starts when all slots are ready.
        start: called by each slot when it is ready, before moving state and before the first step; returns when all
            are, and the clock is at 0 then.
        board: of this stretch.
        goes_on: asked by every slot after each step, with its run; False ends the stretch there, on all slots alike.
    """

    emulation: Emulation
    plan: Plan
    first: int
    last: int
    speed: Speed
    clock: WallClock
    start: Callable[[], object]
    board: Board
    goes_on: Callable[[SlotRun], bool] = lambda run: True


class EmulatedSlot:
    """Everything of one slot for one stretch.

    Args:
        me: the real slot.
        stretch: what to run.
        carried: the slot's run under the plan before, whose state has to move; None at the beginning.
    """

    def __init__(self, me: ThreadSlot, stretch: Stretch, carried: SlotRun | None):
        emulation, plan = stretch.emulation, stretch.plan
        self._me, self._stretch = me, stretch
        self._scale = Scale.of(emulation.shape, emulation.workload, emulation.seq_len)
        self._lines = parameter_lines(self._scale.small)
        self._accelerator = Accelerator(me.slot, stretch.clock, stretch.speed)
        self._kernels = KernelSeconds(emulation.shape, emulation.workload, emulation.hardware)
        domains = scale_up_domains(emulation.cluster, emulation.hardware)

        buckets = BucketSizes(plan, me.slot, self._lines, parameter_lines(emulation.shape))

        def wrap(inner: Communicator, role: Role) -> EmulatedCommunicator:
            return EmulatedCommunicator(
                inner,
                role=role,
                accelerator=self._accelerator,
                board=stretch.board,
                scale=self._scale,
                hardware=emulation.hardware,
                kernels=self._kernels,
                domains=domains,
                free=role in emulation.free,
                buckets=buckets if role == "transfer" else None,
            )

        groups = emulate_groups(me.groups, wrap)
        self._transfer = cast(EmulatedCommunicator, groups.transfer)
        self._generation = Generation(number=1, members=plan.slots, groups=groups, waiter=me.waiter)
        self.run = self._new_run() if carried is None else carried
        self.run.generation = self._generation
        self.run.probe = self._probe
        self.moved_s = 0.0
        self.markers: list[Marker] = []

    @property
    def behind_s(self) -> float:
        """See `Accelerator.behind_s`."""
        return self._accelerator.behind_s

    def act(self) -> None:
        """Move the state if the plan is a new one, then run the steps."""
        stretch, accelerator = self._stretch, self._accelerator
        if self.run.state.plan is not stretch.plan:
            stretch.start()
            self._change_layout()
            self.moved_s = accelerator.idle_from
        model = self._model()
        overlap = Overlap(model, self.run.sync.grads)
        samples = _Samples(self._scale.small.vocab_size, self._scale.seq_len)
        stretch.start()
        accelerator.restart()
        self._mark()
        for step in range(stretch.first, stretch.last + 1):
            accelerator.step = step
            probe = self.run.probe_at(step)
            groups = self._generation.groups
            reduction = Reduction(self.run.sync, groups.transfer, self._me.waiter, probe, overlap.collect)
            sums = forward_backward(
                model,
                overlap,
                self.run.sync,
                reduction,
                samples,  # type: ignore[arg-type]
                first_sample=(step - 1) * stretch.plan.global_batch_size,
                micro_batch_size=stretch.emulation.workload.micro_batch_size,
                probe=probe,
                clock=EmulatedClock(accelerator),
            )
            commit_step(self.run, step, sums, reduction)
            overlap.returning = self.run.returning
            self._mark()
            if not stretch.goes_on(self.run):
                break
        settle(self.run)

    def _mark(self) -> None:
        accelerator = self._accelerator
        self.markers.append(
            Marker(moment=accelerator.host, wall=accelerator.clock.now(), accounts=accelerator.accounts.copy())
        )

    def _new_run(self) -> SlotRun:
        """The state before step 1. What needs a store or a supervisor is not there: nothing fails inside a step."""
        emulation, plan, slot = self._stretch.emulation, self._stretch.plan, self._me.slot
        state = SlotState.initial(
            plan,
            slot,
            self._lines,
            emulation.dtype,
            lambda name, lo, hi: initial_units(0, name, self._lines[name], lo, hi),
        )
        absent: Any = None
        return SlotRun(
            job=cast(Any, SimpleNamespace(slot=slot)),
            store=absent,
            connections=absent,
            transport=absent,
            recipe=Recipe(
                lines=self._lines,
                dtype=emulation.dtype,
                optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0),
                total_steps=10**6,
                timeouts=Timeouts(base_s=self._me.waiter.deadline_s),
                keep_loads=True,
            ),
            probe=self._probe,
            cluster=emulation.cluster,
            progress=Progress(slot=slot, layout=plan.number, layout_digest=plan.digest),
            state=state,
            sync=GradSync.build(state, self._lines, emulation.dtype),
        )

    def _model(self) -> nn.Module:
        emulation = self._stretch.emulation
        model = parallelize(
            emulation.build(self._scale.small, emulation.dtype),
            state=self.run.state,
            sync=self.run.sync,
            groups=self._generation.groups,
            waiter=self._me.waiter,
            probe=lambda phase: self._probe(phase, 0),
        )
        emulate_model(model, Workbench(self._accelerator, self._kernels, self._scale))
        loads = emulation.loads or ExpertLoads.uniform(emulation.shape.num_moe_layers, emulation.shape.num_experts)
        chances_le = inclusion(loads.normalised().mean, emulation.shape.top_k)
        for layer, moe in enumerate(cast(Any, model).moe_layers().values()):
            seed = (emulation.seed * 1000 + self._me.slot) * 1000 + layer
            route_as_drawn(moe.router, ExpertSampler(chances_le[layer], seed))
        return model

    def _probe(self, phase: str, step: int) -> None:
        """Where failures would be injected the emulation learns what the code is doing."""
        if phase in KIND_OF_PROBE:
            self._transfer.name_last(KIND_OF_PROBE[phase])
        elif phase == "apply":
            plan = self.run.state.plan
            owned, mirrored = (self._elements(layout) for layout in (plan.owners, plan.mirrors))
            self._accelerator.compute("optimizer", self._kernels.optimizer(owned, mirrored))

    def _elements(self, layout: Layout) -> int:
        """Of the full model that this slot has."""
        lines = parameter_lines(self._stretch.emulation.shape)
        return sum(layout.num_units(line.axis, self._me.slot) * line.unit_numel for line in lines.values())

    def _change_layout(self) -> None:
        """Survivors take over the state, as recovery does."""
        run, plan = self.run, self._stretch.plan
        moved = migrate(
            run.state,
            plan,
            live=plan.slots,
            params_versions=dict.fromkeys(plan.slots, run.progress.tx),
            version=run.progress.tx,
            lines=self._lines,
            dtype=run.recipe.dtype,
            communicator=self._transfer,
            waiter=self._me.waiter,
            probe=run.probe_at(run.progress.tx + 1),
        )
        commit_layout(run, moved)


class _Samples:
    """Any tokens: what the small model learns does not matter."""

    def __init__(self, vocab_size: int, seq_len: int):
        self._vocab_size = vocab_size
        self._seq_len = seq_len

    def train_batch(self, first_index: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """See `nep.train.data.SampleSource`."""
        ids = (np.arange(first_index, first_index + count)[:, None] * 7 + np.arange(self._seq_len + 1)) * 31
        ids %= self._vocab_size
        return ids[:, :-1].copy(), ids[:, 1:].copy()
