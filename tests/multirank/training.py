"""Trainings that the multi-rank tests run, their reference, and the comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from models.mixtral import build
from nep.fault_tolerance.runtime import SlotRun
from nep.parallel.optimizer import OptimizerConfig
from nep.planning.plan import Plan
from nep.planning.shapes import ModelShape, parameter_lines
from nep.testing.parity import ParityRun, Phase, Training, gather
from nep.testing.reference import ReferenceAux, ReferenceHyper, ReferenceRun, reference_train
from nep.train.config import TrainConfig
from tests.multirank.steps import BATCH, SEED, assert_close, samples, whole_model

STEPS = 6
OPTIMIZER = OptimizerConfig(lr=3e-3, warmup_steps=2)


def make_training(
    shape: ModelShape, config: TrainConfig | None = None, *, overlap: bool = True, bucket_mib: float = 0
) -> Training:
    """Six steps of the tests' samples; optimizer, losses and so on as the config has them. Models are small, so each
    layer is a bucket by itself unless the test says otherwise."""
    config = TrainConfig(dtype="float64", micro_batch_size=2, optimizer=OPTIMIZER) if config is None else config
    config = dataclasses.replace(config, steps=STEPS, global_batch_size=BATCH, seed=SEED, bucket_mib=bucket_mib)
    return Training(shape=shape, make_model=build, data=samples(), config=config, overlap=overlap)


def run_under(training: Training, plan: Plan) -> ParityRun:
    """All steps under one plan."""
    return training.run([Phase(plan=plan, steps=STEPS)])


def reference_of(training: Training, steps: int = STEPS) -> ReferenceRun:
    """The same in one process, in float64, by code that shares nothing with the distributed path."""
    losses, optimizer = training.config.aux_losses, training.config.optimizer
    counts: Any = losses.counts
    hyper = ReferenceHyper(
        lr=optimizer.lr,
        warmup_steps=optimizer.warmup_steps,
        clip_norm=optimizer.clip_norm,
        steps=STEPS,
        aux=ReferenceAux(
            z_loss=losses.z,
            logits_z_loss=losses.logits_z,
            balance_loss=losses.balance,
            balance_counts=counts,
            bias_rate=training.config.router_bias_rate,
        ),
    )
    whole = whole_model(parameter_lines(training.shape))
    return reference_train(
        training.shape, whole, lambda step: samples().train_batch((step - 1) * BATCH, BATCH), steps, hyper
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
