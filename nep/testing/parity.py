"""The parity harness: a few training steps on threads as ranks, over plans that follow each other.

Everything a job does to numbers is done here by the same code (forward, dispatch, backward, sums, clipping, update,
return, moves of state), without votes and stores; what comes out is put together for a comparison with
`nep.testing.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from nep.distributed.collectives import all_gather
from nep.parallel.grad_sync import GradSync, Reduction, Return
from nep.parallel.holding import Holding
from nep.parallel.migrate import migrate
from nep.parallel.optimizer import OptimizerConfig, apply_update
from nep.parallel.overlap import Overlap
from nep.parallel.parallelize import parallelize
from nep.parallel.state import SlotState, Tensors
from nep.planning.layout import Layout, LineKind, Lines
from nep.planning.plan import Plan
from nep.testing.threads import ThreadSlot, run_slots
from nep.train.data import SampleSource
from nep.train.step import forward_backward


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Some steps under one plan.

    Attributes:
        plan: in force; slots that only the plan before has are lost with all they have.
        steps: how many.
    """

    plan: Plan
    steps: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained and how.

    Attributes:
        make_model: the single-device model on the meta device.
        lines: its parameters.
        initial: (name, lo, hi) -> initial units, float64.
        data: the samples.
        optimizer: and its schedule.
        total_steps: where the schedule ends.
        micro_batch_size: sequences that a lane runs at a time.
        overlap: sums during backward, return during the next forward; otherwise one after the other.
    """

    make_model: Callable[[], nn.Module]
    lines: Lines
    initial: Callable[[str, int, int], torch.Tensor]
    data: SampleSource
    optimizer: OptimizerConfig
    total_steps: int
    micro_batch_size: int = 2
    overlap: bool = True
    dtype: torch.dtype = torch.float64


@dataclass(kw_only=True)
class ParityRun:
    """What a run left, whole tensors by global name.

    Attributes:
        losses: mean per token of each step.
        gradients: of each step's mean loss, before clipping.
        master: weights after the last step.
        moments: of the optimizer after the last step, by kind.
        operations: phase -> slot -> (communicator, operation) of every launch, in order.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    master: Tensors = field(default_factory=dict)
    moments: dict[str, Tensors] = field(default_factory=dict)
    operations: list[dict[int, list[tuple[str, str]]]] = field(default_factory=list)


def train_in_threads(recipe: Recipe, phases: Sequence[Phase]) -> ParityRun:
    """Train over the phases; in between state moves as it does in a recovery.

    Raises:
        AssertionError: a mirror or a holder has other bits than the owner.
        Exception: the first error of any slot.
    """
    run = ParityRun()
    states: dict[int, SlotState] = {}
    step = 0
    for phase in phases:
        act = partial(_act, recipe, phase, states, step)
        results = run_slots(phase.plan.replicas, act, lanes=[lane.slots for lane in phase.plan.lanes])
        step += phase.steps
        parts = list(results.values())
        run.operations.append({slot: result.operations for slot, result in results.items()})
        for index in range(phase.steps):
            tokens = sum(part.tokens[index] for part in parts)
            run.losses.append(sum(part.losses[index] for part in parts) / tokens)
            sums = gather(phase.plan.owners, {s: r.sums[index] for s, r in results.items()}, recipe.lines)
            run.gradients.append({name: tensor / tokens for name, tensor in sums.items()})
        states = {slot: result.state for slot, result in results.items()}
        _check_agreement(phase.plan, states, recipe.lines)
    owners = phases[-1].plan.owners
    run.master = gather(owners, {slot: state.owned.master for slot, state in states.items()}, recipe.lines)
    for kind in recipe.optimizer.moments:
        kept = {slot: state.owned.moments[kind] for slot, state in states.items()}
        run.moments[kind] = gather(owners, kept, recipe.lines)
    return run


def _act(recipe: Recipe, phase: Phase, before: Mapping[int, SlotState], step: int, me: ThreadSlot) -> _Result:
    return _SlotPhase(recipe, phase.plan, me, before, step).run(phase.steps)


@dataclass(kw_only=True)
class _Result:
    """What one slot has after a phase."""

    state: SlotState
    operations: list[tuple[str, str]]
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sums: list[Tensors] = field(default_factory=list)


class _SlotPhase:
    """One slot's part of a phase."""

    def __init__(self, recipe: Recipe, plan: Plan, me: ThreadSlot, before: Mapping[int, SlotState], step: int):
        self._recipe, self._me, self._step = recipe, me, step
        if me.slot in before:
            live = [slot for slot in sorted(before) if slot in plan.slots]
            state = migrate(
                before[me.slot],
                plan,
                live=live,
                params_versions=dict.fromkeys(live, step),
                version=step,
                lines=recipe.lines,
                dtype=recipe.dtype,
                communicator=me.groups.transfer,
                waiter=me.waiter,
                probe=_no_probe,
            )
        else:
            state = SlotState.initial(
                plan, me.slot, recipe.lines, recipe.dtype, recipe.initial, recipe.optimizer.moments
            )
        self._state = state
        self._sync = GradSync.build(state, recipe.lines, recipe.dtype)
        model = parallelize(
            recipe.make_model(), state=state, sync=self._sync, groups=me.groups, waiter=me.waiter, probe=_no_probe
        )
        self._model = model
        self._overlap = Overlap(model, self._sync.grads)
        self._result = _Result(state=state, operations=me.operations)

    def run(self, steps: int) -> _Result:
        for _ in range(steps):
            self._step += 1
            self._one_step()
        self._settle()
        return self._result

    def _one_step(self) -> None:
        recipe, me, sync = self._recipe, self._me, self._sync
        batch = self._state.plan.global_batch_size
        reduction = Reduction(sync, me.groups.transfer, me.waiter, _no_probe, self._overlap.collect)
        idle = Reduction(sync, me.groups.transfer, me.waiter, _no_probe, self._overlap.collect)
        idle.reached = lambda layer: None  # type: ignore[method-assign]
        sums = forward_backward(
            self._model,
            self._overlap,
            sync,
            reduction if recipe.overlap else idle,
            recipe.data,
            first_sample=(self._step - 1) * batch,
            micro_batch_size=recipe.micro_batch_size,
            probe=_no_probe,
        )
        self._settle()
        reduction.finish()
        self._result.losses.append(sums.loss)
        self._result.tokens.append(sums.tokens)
        self._result.sums.append({name: tensor.clone() for name, tensor in self._state.owned.grad_sum.items()})
        mine = torch.tensor([sync.norm2_owned(), sums.tokens], dtype=torch.float64)
        norm2, tokens = torch.stack(all_gather(me.groups.vote, mine, me.waiter, "the norm")).sum(0).tolist()
        apply_update(
            [self._state.owned, self._state.mirrored],
            recipe.lines,
            recipe.optimizer,
            lr=recipe.optimizer.learning_rate(self._step, recipe.total_steps),
            update=self._step,
            scale=recipe.optimizer.gradient_scale(math.sqrt(norm2), int(tokens)),
        )
        self._overlap.returning = Return(sync, me.groups.transfer, me.waiter, self._step, _no_probe)
        if not recipe.overlap:
            self._settle()

    def _settle(self) -> None:
        if self._overlap.returning is not None:
            self._overlap.returning.finish()
            self._overlap.returning = None
        assert self._state.params_version in (self._step - 1, self._step)


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


def _check_agreement(plan: Plan, states: Mapping[int, SlotState], lines: Lines) -> None:
    """All holders have the rounded master weights, and mirrors the owners' bits."""
    whole = gather(plan.owners, {slot: state.owned.master for slot, state in states.items()}, lines)
    whole = {name: tensor.view(lines[name].shape) for name, tensor in whole.items()}
    for slot, state in states.items():
        _check_holding(state.held(), whole, lines, f"slot {slot} holds")
        _check_holding(state.mirrored.weights(), whole, lines, f"slot {slot} mirrors")
    for kind in next(iter(states.values())).owned.moments:
        owned = gather(plan.owners, {slot: state.owned.moments[kind] for slot, state in states.items()}, lines)
        owned = {name: tensor.view(lines[name].shape) for name, tensor in owned.items()}
        for slot, state in states.items():
            mirrored = Holding(plan.mirrors, slot, state.mirrored.moments[kind])
            _check_holding(mirrored, owned, lines, f"slot {slot} mirrors {kind} of")


def _check_holding(holding: Holding, whole: Tensors, lines: Lines, what: str) -> None:
    for name, line in lines.items():
        for lo, hi in holding.layout.intervals(line.axis, holding.slot):
            views = holding.views(line.axis, [name], lo, hi) or []
            found = torch.cat(views)
            assert torch.equal(found, whole[name][lo:hi].to(found.dtype)), f"{what} {name} [{lo}, {hi}) differently"


def _no_probe(phase: str) -> None:
    return None
