"""Whole trainings over threads as ranks: several committed steps, and slots that are lost in the middle of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from models.mixtral import build
from nep.distributed.collectives import sum_exact
from nep.distributed.timeouts import Timeouts
from nep.fault_tolerance import recovery, transaction
from nep.fault_tolerance.commit import commit_layout, commit_step, settle
from nep.fault_tolerance.runtime import Generation, Recipe, SlotRun
from nep.fault_tolerance.transaction import Progress
from nep.moe.routing_state import RoutingState
from nep.parallel.grad_sync import GradSync, Reduction
from nep.parallel.migrate import migrate
from nep.parallel.optimizer import OptimizerConfig
from nep.parallel.overlap import Overlap
from nep.parallel.parallelize import parallelize
from nep.parallel.state import SlotState
from nep.planning.cluster import Cluster
from nep.planning.plan import Plan
from nep.planning.shapes import ModelShape, parameter_lines
from nep.testing.parity import gather
from nep.testing.reference import ReferenceAux, ReferenceHyper, ReferenceRun, reference_train
from nep.testing.threads import ThreadSlot, run_slots
from nep.train.config import TrainConfig
from nep.train.initialization import initial_units
from nep.train.step import forward_backward, prepare_model
from tests.multirank.steps import BATCH, SEED, assert_close, samples, whole_model

STEPS = 6
OPTIMIZER = OptimizerConfig(lr=3e-3, warmup_steps=2)


class Lost(Exception):
    """A slot has gone no further."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and how.

    Attributes:
        shape: of the model.
        config: losses, biases, micro-batches, dtype and recomputation are taken from it.
    """

    shape: ModelShape
    config: TrainConfig

    def start(self, plan: Plan, slot: int) -> SlotRun:
        """A slot before the first step."""
        config, lines = self.config, parameter_lines(self.shape)
        state = SlotState.initial(
            plan,
            slot,
            lines,
            config.torch_dtype,
            lambda name, lo, hi: initial_units(SEED, name, lines[name], lo, hi),
        )
        anything: Any = SimpleNamespace(slot=slot)
        return SlotRun(
            job=anything,
            store=anything,
            connections=anything,
            device=None,
            recipe=Recipe(
                lines=lines,
                dtype=config.torch_dtype,
                optimizer=OPTIMIZER,
                total_steps=STEPS,
                timeouts=Timeouts(),
                router_bias_rate=config.router_bias_rate,
            ),
            probe=lambda phase, step: None,
            cluster=Cluster.uniform(len(plan.slots), len(plan.slots)),
            progress=Progress(slot=slot, layout=plan.number, layout_digest=plan.digest),
            state=state,
            sync=GradSync.build(state, lines, config.torch_dtype),
            routing=RoutingState.initial(lines, config.torch_dtype),
        )

    def go_on(self, run: SlotRun, me: ThreadSlot, until: int, lost_at: tuple[int, str] | None = None) -> SlotRun:
        """Steps up to `until`, or up to the phase of the step in which this slot stops."""
        if run.generation is None:
            run.generation = Generation(number=1, members=run.state.plan.slots, groups=me.groups, waiter=me.waiter)
        config = self.config

        def probe(phase: str, step: int) -> None:
            if (step, phase) == lost_at:
                raise Lost

        run.probe = probe
        model = parallelize(
            build(self.shape, config.torch_dtype),
            state=run.state,
            sync=run.sync,
            groups=me.groups,
            waiter=me.waiter,
            probe=lambda phase: None,
        )
        prepare_model(model, config, run.routing, lambda counts: sum_exact(me.groups.vote, counts, me.waiter, "counts"))
        overlap = Overlap(model, run.sync.grads)
        try:
            for step in range(run.progress.tx + 1, until + 1):
                at = run.probe_at(step)
                reduction = Reduction(run.sync, me.groups.transfer, me.waiter, at, overlap.collect)
                sums = forward_backward(
                    model,
                    overlap,
                    run.sync,
                    reduction,
                    samples(),
                    first_sample=(step - 1) * BATCH,
                    micro_batch_size=config.sequences_per_round(run.state.plan),
                    probe=at,
                )
                commit_step(run, step, sums, reduction)
                overlap.returning = run.returning
            if lost_at is None:
                settle(run)
        except Lost:
            pass
        return run

    def recover(self, run: SlotRun, me: ThreadSlot, decision: transaction.Decision, plan: Plan) -> SlotRun:
        """What a survivor does before it goes on under the plan without the others."""
        run.returning = None
        recovery._settle(run, decision)
        run.generation = Generation(number=2, members=plan.slots, groups=me.groups, waiter=me.waiter)
        moved = migrate(
            run.state,
            plan,
            live=plan.slots,
            params_versions=decision.params_versions,
            version=decision.committed,
            lines=run.recipe.lines,
            dtype=run.recipe.dtype,
            communicator=me.groups.transfer,
            waiter=me.waiter,
            probe=lambda phase: None,
        )
        commit_layout(run, moved)
        return run

    def run(self, plan: Plan) -> dict[int, SlotRun]:
        """All steps with all slots."""
        return run_slots(
            plan.replicas,
            lambda me: self.go_on(self.start(plan, me.slot), me, STEPS),
            lanes=[lane.slots for lane in plan.lanes],
        )

    def run_with_loss(self, plan: Plan, after: Plan, step: int, saw_the_vote: Collection[int]) -> dict[int, SlotRun]:
        """Slots that are not in `after` are lost while step `step` is voted on.

        Args:
            plan: to begin with.
            after: of the survivors.
            step: which the last vote is about.
            saw_the_vote: those, of all slots, that have applied the step; the others have only voted.
        """
        before = run_slots(
            plan.replicas,
            lambda me: self.go_on(
                self.start(plan, me.slot), me, step, (step, "return" if me.slot in saw_the_vote else "vote")
            ),
            lanes=[lane.slots for lane in plan.lanes],
        )
        records = {
            slot: dataclasses.replace(before[slot].progress, params_version=before[slot].state.params_version)
            for slot in after.slots
        }
        decision = transaction.decide(
            2,
            plan.slots,
            records,
            set(plan.slots) - set(after.slots),
            lost=lambda digest, live: (),
            plan=lambda digest, live: after.canonical_json(),
        )
        return run_slots(
            after.replicas,
            lambda me: self.go_on(self.recover(before[me.slot], me, decision, after), me, STEPS),
            lanes=[lane.slots for lane in after.lanes],
        )

    def reference(self) -> ReferenceRun:
        """The same in one process, in float64, by code that shares nothing with the distributed path."""
        losses = self.config.aux_losses
        counts: Any = losses.counts
        hyper = ReferenceHyper(
            lr=OPTIMIZER.lr,
            warmup_steps=OPTIMIZER.warmup_steps,
            steps=STEPS,
            aux=ReferenceAux(
                z_loss=losses.z,
                logits_z_loss=losses.logits_z,
                balance_loss=losses.balance,
                balance_counts=counts,
                bias_rate=self.config.router_bias_rate,
            ),
        )
        whole = whole_model(parameter_lines(self.shape))
        return reference_train(
            self.shape, whole, lambda step: samples().train_batch((step - 1) * BATCH, BATCH), STEPS, hyper
        )


def assert_equals(runs: Mapping[int, SlotRun], expected: ReferenceRun) -> None:
    """Losses to 1e-12, parameters to 1e-11 of their largest entry; routing state exactly and on every slot."""
    first = runs[min(runs)]
    plan, lines = first.state.plan, first.recipe.lines
    assert set(plan.slots) == set(runs)
    for run in runs.values():
        assert [entry.step for entry in run.history.steps] == list(range(1, STEPS + 1))
        for entry, loss in zip(run.history.steps, expected.losses, strict=True):
            assert abs(entry.loss - loss) <= 1e-12 * abs(loss), f"step {entry.step}"
        assert run.routing is not None
        assert torch.equal(run.routing.counts_le, expected.counts_le)
        assert torch.equal(run.routing.bias_le, expected.biases_le) or run.recipe.router_bias_rate == 0
    for part, layout in (("owned", plan.owners), ("mirrored", plan.mirrors)):
        if part == "mirrored" and len(plan.slots) == 1:
            continue
        masters = {slot: getattr(run.state, part).master for slot, run in runs.items()}
        assert_close(gather(layout, masters, lines), expected.params)
