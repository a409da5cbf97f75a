"""The parity harness: training steps on threads as ranks, by the code that jobs run, over plans that follow each other.

Steps and changes of layout are the real transactions (`nep.fault_tolerance.commit`), without supervisors and without a
control store; what comes out is put together for a comparison with `nep.testing.reference`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from nep.distributed.collectives import sum_exact
from nep.distributed.timeouts import Timeouts
from nep.fault_tolerance import recovery, transaction
from nep.fault_tolerance.commit import commit_layout, commit_step, settle
from nep.fault_tolerance.integrity import Integrity
from nep.fault_tolerance.records import Decision, Progress
from nep.fault_tolerance.runtime import Generation, Recipe, SlotRun
from nep.moe.routing_state import RoutingState
from nep.parallel.grad_sync import GradSync, Reduction
from nep.parallel.holding import Holding
from nep.parallel.migrate import migrate
from nep.parallel.overlap import Overlap
from nep.parallel.parallelize import parallelize
from nep.parallel.state import SlotState, Tensors
from nep.planning.cluster import Cluster
from nep.planning.layout import Layout, LineKind, Lines
from nep.planning.plan import Plan
from nep.planning.shapes import ModelShape, parameter_lines
from nep.testing.threads import ThreadSlot, run_slots
from nep.train.config import TrainConfig
from nep.train.data import SampleSource
from nep.train.initialization import initial_units
from nep.train.step import forward_backward, prepare_model


class Lost(Exception):
    """A slot has gone no further."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Some steps under one plan.

    Attributes:
        plan: in force; slots that only the plan before has are lost with all they have.
        steps: how many.
    """

    plan: Plan
    steps: int


@dataclass(kw_only=True)
class SlotTrace:
    """What one slot did in a phase.

    Attributes:
        run: its state afterwards.
        operations: (communicator, operation) of every launch, in order.
        sums: finished gradient sums of what it owns, of each step, before they are scaled and clipped.
    """

    run: SlotRun
    operations: list[tuple[str, str]]
    sums: list[Tensors] = field(default_factory=list)


@dataclass(kw_only=True)
class ParityRun:
    """What a training left, whole tensors by global name.

    Attributes:
        slots: the last state of each slot of the last plan.
        losses: mean per token of each step.
        gradients: of each step's mean loss, before clipping.
        master: weights after the last step.
        moments: of the optimizer after the last step, by kind.
        operations: phase -> slot -> (communicator, operation) of every launch, in order.
    """

    slots: dict[int, SlotRun] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    master: Tensors = field(default_factory=dict)
    moments: dict[str, Tensors] = field(default_factory=dict)
    operations: list[dict[int, list[tuple[str, str]]]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and how.

    Attributes:
        shape: of the model.
        make_model: shape, dtype -> the single-device model on the meta device.
        data: the samples.
        config: steps, batch, optimizer, losses, biases, micro-batches, dtype, seed and recomputation are taken from it.
        overlap: sums during backward and the return during the next forward; otherwise one after the other.
    """

    shape: ModelShape
    make_model: Callable[[ModelShape, torch.dtype], nn.Module]
    data: SampleSource
    config: TrainConfig
    overlap: bool = True

    @property
    def lines(self) -> Lines:
        """The model's parameters."""
        return parameter_lines(self.shape)

    def run(self, phases: Sequence[Phase]) -> ParityRun:
        """Train over the phases; in between state moves as in a recovery.

        Raises:
            AssertionError: a mirror or a holder has other bits than the owner.
            Exception: the first error of any slot.
        """
        done = ParityRun()
        before: dict[int, SlotRun] = {}
        until = 0
        for number, phase in enumerate(phases, 1):
            until += phase.steps
            traces = run_slots(
                phase.plan.replicas,
                _PhaseOfSlot(self, phase.plan, number, before, until),
                lanes=[lane.slots for lane in phase.plan.lanes],
            )
            before = {slot: trace.run for slot, trace in traces.items()}
            self._collect(done, phase, traces)
            check_agreement(phase.plan, before, self.lines)
        done.slots = before
        owners = phases[-1].plan.owners
        done.losses = [entry.loss for entry in before[min(before)].history.steps]
        done.master = gather(owners, {slot: run.state.owned.master for slot, run in before.items()}, self.lines)
        for kind in self.config.optimizer.moments:
            kept = {slot: run.state.owned.moments[kind] for slot, run in before.items()}
            done.moments[kind] = gather(owners, kept, self.lines)
        return done

    def _collect(self, done: ParityRun, phase: Phase, traces: Mapping[int, SlotTrace]) -> None:
        done.operations.append({slot: trace.operations for slot, trace in traces.items()})
        history = next(iter(traces.values())).run.history.steps
        for index in range(phase.steps):
            sums = gather(phase.plan.owners, {s: trace.sums[index] for s, trace in traces.items()}, self.lines)
            tokens = history[index - phase.steps].tokens
            done.gradients.append({name: tensor / tokens for name, tensor in sums.items()})

    # What one slot does.

    def start(self, plan: Plan, slot: int) -> SlotRun:
        """A slot before the first step."""
        config, lines = self.config, self.lines
        state = SlotState.initial(
            plan,
            slot,
            lines,
            config.torch_dtype,
            lambda name, lo, hi: initial_units(config.seed, name, lines[name], lo, hi),
            config.optimizer.moments,
        )
        nothing: Any = SimpleNamespace(slot=slot)
        return SlotRun(
            job=nothing,
            store=nothing,
            connections=nothing,
            transport=nothing,
            recipe=Recipe(
                lines=lines,
                dtype=config.torch_dtype,
                optimizer=config.optimizer,
                total_steps=config.steps,
                timeouts=Timeouts(),
                smallest_bucket_bytes=config.smallest_bucket_bytes,
                router_bias_rate=config.router_bias_rate,
            ),
            probe=lambda phase, step: None,
            cluster=Cluster.uniform(len(plan.slots), len(plan.slots)),
            progress=Progress(slot=slot, layout=plan.number, layout_digest=plan.digest),
            state=state,
            sync=GradSync.build(state, lines, config.torch_dtype, config.smallest_bucket_bytes),
            routing=RoutingState.initial(lines, config.torch_dtype),
            integrity=Integrity(config.state_check_every, config.corruption_action),
        )

    def change(self, run: SlotRun, me: ThreadSlot, plan: Plan, number: int, live: Sequence[int], version: int) -> None:
        """Join generation `number` under a plan, with state from the slots `live`, all at step `version`."""
        self.enter(run, me, plan, number)
        moved = migrate(
            run.state,
            plan,
            live=live,
            params_versions=dict.fromkeys(live, run.state.params_version),
            version=version,
            lines=run.recipe.lines,
            dtype=run.recipe.dtype,
            communicator=me.groups.transfer,
            waiter=me.waiter,
            probe=_no_probe,
        )
        commit_layout(run, moved)

    def enter(self, run: SlotRun, me: ThreadSlot, plan: Plan, number: int) -> None:
        """Take part in a generation."""
        run.returning = None
        run.generation = Generation(number=number, members=plan.slots, groups=me.groups, waiter=me.waiter)

    def go_on(
        self,
        run: SlotRun,
        me: ThreadSlot,
        until: int,
        lost_at: tuple[int, str] | None = None,
        meddle: Callable[[str, int], None] = lambda phase, step: None,
    ) -> SlotTrace:
        """Steps up to `until`, or up to the phase of the step in which this slot stops.

        Args:
            meddle: called with each phase of each step.
        """
        trace = SlotTrace(run=run, operations=me.operations)

        def probe(phase: str, step: int) -> None:
            if (step, phase) == lost_at:
                raise Lost
            meddle(phase, step)
            if phase == "apply":
                trace.sums.append({name: tensor.clone() for name, tensor in run.state.owned.grad_sum.items()})

        run.probe = probe
        model = parallelize(
            self.make_model(self.shape, self.config.torch_dtype),
            state=run.state,
            sync=run.sync,
            groups=me.groups,
            waiter=me.waiter,
            probe=_no_probe,
        )
        prepare_model(
            model, self.config, run.routing, lambda counts: sum_exact(me.groups.vote, counts, me.waiter, "counts")
        )
        overlap = Overlap(model, run.sync.grads)
        try:
            for step in range(run.progress.tx + 1, until + 1):
                while not self._step(run, me, model, overlap, step):
                    pass  # refused, and mended
            if lost_at is None:
                settle(run)
        except Lost:
            pass
        return trace

    def _step(self, run: SlotRun, me: ThreadSlot, model: nn.Module, overlap: Overlap, step: int) -> bool:
        config = self.config
        run.integrity.seal_for(run, step)
        reduction = Reduction(run.sync, me.groups.transfer, me.waiter, run.probe_at(step), overlap.collect)
        sums = forward_backward(
            model,
            overlap,
            run.sync,
            reduction if self.overlap else _Later(run.sync, me.groups.transfer, me.waiter, _no_probe, overlap.collect),
            self.data,
            first_sample=(step - 1) * config.global_batch_size,
            micro_batch_size=config.sequences_per_round(run.state.plan),
            probe=run.probe_at(step),
        )
        committed = commit_step(run, step, sums, reduction)
        overlap.returning = run.returning
        if not self.overlap:
            settle(run)
            overlap.returning = None
        return committed

    # A slot that is lost while a step is voted on.

    def run_with_loss(
        self,
        plan: Plan,
        after: Plan,
        step: int,
        saw_the_vote: Collection[int],
        meddle: Callable[[SlotRun, str, int], None] = lambda run, phase, step: None,
    ) -> dict[int, SlotRun]:
        """Slots that are not in `after` are lost while step `step` is voted on; the others go on to the end.

        Args:
            plan: to begin with.
            after: of the survivors.
            step: which the last vote is about.
            saw_the_vote: those, of all slots, that have applied the step; the others have only voted.
            meddle: called with each phase of each step up to the loss, on every slot.
        """

        def until_the_loss(me: ThreadSlot) -> SlotRun:
            run = self.start(plan, me.slot)
            self.enter(run, me, plan, 1)
            lost_at = (step, "return" if me.slot in saw_the_vote else "vote")
            return self.go_on(run, me, step, lost_at, lambda phase, now: meddle(run, phase, now)).run

        before = run_slots(plan.replicas, until_the_loss, lanes=[lane.slots for lane in plan.lanes])
        decision = _decide(before, plan, after)

        def from_the_loss(me: ThreadSlot) -> SlotRun:
            run = before[me.slot]
            run.returning = None
            recovery._settle(run, decision)
            self.change(run, me, after, 2, after.slots, decision.committed)
            return self.go_on(run, me, self.config.steps).run

        return run_slots(after.replicas, from_the_loss, lanes=[lane.slots for lane in after.lanes])


class _Later(Reduction):
    """A reduction that is never started by backward."""

    def reached(self, layer: int) -> None:
        """Not yet."""


@dataclass(frozen=True)
class _PhaseOfSlot:
    """One slot's part of a phase."""

    training: Training
    plan: Plan
    number: int
    before: Mapping[int, SlotRun]
    until: int

    def __call__(self, me: ThreadSlot) -> SlotTrace:
        training, run = self.training, self.before.get(me.slot)
        if run is None:
            run = training.start(self.plan, me.slot)
            training.enter(run, me, self.plan, self.number)
        else:
            live = [slot for slot in sorted(self.before) if slot in self.plan.slots]
            training.change(run, me, self.plan, self.number, live, run.progress.tx)
        return training.go_on(run, me, self.until)


def _decide(before: Mapping[int, SlotRun], plan: Plan, after: Plan) -> Decision:
    """What the survivors agree on."""
    records = {
        slot: dataclasses.replace(before[slot].progress, params_version=before[slot].state.params_version)
        for slot in after.slots
    }
    return transaction.decide(
        2,
        plan.slots,
        records,
        set(plan.slots) - set(after.slots),
        lost=lambda digest, live: (),
        plan=lambda digest, live: after.canonical_json(),
    )


def gather(layout: Layout, parts: Mapping[int, Tensors], lines: Lines) -> Tensors:
    """Whole tensors from the parts of a layout.

    Raises:
        AssertionError: a unit is there twice or not at all.
    """
    dtype = next(iter(next(iter(parts.values())).values())).dtype
    full = {name: torch.full(line.shape, torch.nan, dtype=dtype) for name, line in lines.items()}
    for slot, tensors in parts.items():
        for name, line in lines.items():
            offset = 0
            for lo, hi in layout.intervals(line.axis, slot):
                assert full[name][lo:hi].isnan().all(), f"{name} [{lo}, {hi}) twice"
                full[name][lo:hi] = tensors[name][offset : offset + hi - lo]
                offset += hi - lo
    missing = [name for name, tensor in full.items() if tensor.isnan().any()]
    assert not missing, f"units of {missing} are nowhere, or not numbers"
    return {name: tensor[0] if lines[name].kind is LineKind.WHOLE else tensor for name, tensor in full.items()}


def check_agreement(plan: Plan, runs: Mapping[int, SlotRun], lines: Lines) -> None:
    """All holders have the rounded master weights, and mirrors the owners' bits.

    Raises:
        AssertionError: somebody has other bits.
    """
    for kind in next(iter(runs.values())).state.owned.kinds:
        owned = gather(plan.owners, {slot: run.state.owned.kinds[kind] for slot, run in runs.items()}, lines)
        owned = {name: tensor.view(lines[name].shape) for name, tensor in owned.items()}
        for slot, run in runs.items():
            mirrored = Holding(plan.mirrors, slot, run.state.mirrored.kinds[kind])
            _check_holding(mirrored, owned, lines, f"slot {slot} mirrors {kind} of")
            if kind == "master":
                _check_holding(run.state.held(), owned, lines, f"slot {slot} holds")


def _check_holding(holding: Holding, whole: Tensors, lines: Lines, what: str) -> None:
    for name, line in lines.items():
        for lo, hi in holding.layout.intervals(line.axis, holding.slot):
            found = torch.cat(holding.views(line.axis, [name], lo, hi) or [])
            assert torch.equal(found, whole[name][lo:hi].to(found.dtype)), f"{what} {name} [{lo}, {hi}) differently"


def _no_probe(phase: str) -> None:
    return None
