"""What the multi-rank tests share: a tiny model, its whole parameters, and one step on each slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from models.mixtral import build
from nep.moe.aux_losses import AuxLosses
from nep.parallel.grad_sync import GradSync, Reduction
from nep.parallel.overlap import Overlap
from nep.parallel.parallelize import parallelize
from nep.parallel.state import SlotState
from nep.planning.cluster import Cluster
from nep.planning.layout import LineKind, Lines
from nep.planning.plan import Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.shapes import ModelShape, parameter_lines, preset
from nep.testing.threads import ThreadSlot
from nep.train.data import TextCorpus, TextSamples
from nep.train.initialization import initial_units
from nep.train.step import forward_backward

SHAPE = dataclasses.replace(
    preset("debug"),
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=12,
    neuron_block=1,
    num_experts=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)
BATCH, SEQ_LEN, SEED = 6, 8, 3
DTYPE = torch.float64


def no_probe(phase: str) -> None:
    return None


def samples() -> TextSamples:
    return TextCorpus.generated(seed=2, num_bytes=20_000).samples(seq_len=SEQ_LEN, seed=SEED)


def whole_model(lines: Lines) -> dict[str, torch.Tensor]:
    return {
        name: values[0] if line.kind is LineKind.WHOLE else values
        for name, line in lines.items()
        for values in [initial_units(SEED, name, line, 0, line.num_units)]
    }


def make_state(plan: Plan, slot: int, lines: Lines) -> SlotState:
    return SlotState.initial(
        plan, slot, lines, DTYPE, lambda name, lo, hi: initial_units(SEED, name, lines[name], lo, hi)
    )


def make_plan(num_slots: int, replicas: int, dead: Sequence[int], lines: Lines) -> Plan:
    """A plan that has gone through the loss of some slots, one after the other, mirrors completed each time."""
    cluster = Cluster.uniform(num_slots, num_slots)
    plan = plan_from_scratch(cluster, lines, num_replicas=replicas, global_batch_size=BATCH)
    for slot in dead:
        cluster = cluster.fail([slot])
        plan = plan_mirrors(plan_after_failure(plan, cluster, lines), cluster, lines)
    return plan


def step_sums(
    me: ThreadSlot,
    state: SlotState,
    shape: ModelShape,
    micro_batch_size: int = 2,
    aux_losses: AuxLosses | None = None,
) -> tuple[GradSync, float]:
    """Forward, backward and sums of one step on one slot; the loss is this slot's sum."""
    sync = GradSync.build(state, parameter_lines(shape), DTYPE)
    model = parallelize(build(shape, DTYPE), state=state, sync=sync, groups=me.groups, waiter=me.waiter, probe=no_probe)
    if aux_losses is not None:
        model.use_aux_losses(aux_losses)
    overlap = Overlap(model, sync.grads)
    reduction = Reduction(sync, me.groups.transfer, me.waiter, no_probe, overlap.collect)
    sums = forward_backward(
        model, overlap, sync, reduction, samples(), first_sample=0, micro_batch_size=micro_batch_size, probe=no_probe
    )
    reduction.finish()
    return sync, sums.loss


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-11 * tensor.abs().max(), name
