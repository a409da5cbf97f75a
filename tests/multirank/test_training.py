"""Six steps against the single-process reference: shared and small experts, dense layers, auxiliary losses, biases."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from nep.moe.aux_losses import AuxLosses
from nep.planning.cluster import Cluster
from nep.planning.plan import Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.shapes import ModelShape, parameter_lines, preset
from nep.testing.parity import Training, gather
from nep.testing.reference import ReferenceAux, ReferenceRun, reference_gradients
from nep.testing.threads import ThreadSlot, run_slots
from nep.train.config import TrainConfig
from tests.multirank.plans import lane_plan
from tests.multirank.steps import BATCH, assert_close, make_state, samples, step_sums, whole_model
from tests.multirank.training import OPTIMIZER, assert_equals, make_training, reference_of, run_under

# Seven experts on any number of slots, heads that do not divide, neurons that do not either.
FINE = dataclasses.replace(
    preset("debug-fine"), hidden_size=16, ffn_hidden_size=6, neuron_block=2, num_experts=7, top_k=3, num_heads=6,
    num_kv_heads=3, head_dim=4, num_shared_experts=2, shared_ffn_hidden_size=5, dense_ffn_hidden_size=11,
)  # fmt: skip
# As Qwen1.5-MoE routes: a gated shared expert, weights that do not sum to one.
GATED = dataclasses.replace(
    FINE, num_dense_layers=0, dense_ffn_hidden_size=0, num_layers=2, shared_gate=True, norm_topk=False,
    router_scores="softmax", router_bias=False, routed_scaling=1.0,
)  # fmt: skip
SHAPES = {"fine": FINE, "gated": GATED, "fine tied": dataclasses.replace(FINE, tied_embeddings=True)}

LOSSES = {
    "none": AuxLosses(),
    "all per token and sequence": AuxLosses(z=0.02, balance=0.3, logits_z=0.01),
    "previous step": AuxLosses(balance=0.4, counts="previous"),
    "running step": AuxLosses(balance=0.4, counts="step", logits_z=0.02),
}


def lanes_of(name: str, shape: ModelShape) -> Plan:
    lanes, shares = {
        "alone": ([[[0]]], [6]),
        "three lanes": ([[[0], [1], [2]]], [2, 3, 1]),
        "tp3": ([[[0, 1, 2]]], [6]),
        "tp3, tp2 and tp1": ([[[0, 1, 2]], [[3, 4]], [[5]]], [1, 3, 2]),
        "unlike lanes in one replica": ([[[0, 1], [2]], [[3, 4]]], [2, 1, 3]),
    }[name]
    return lane_plan(lanes, shape, shares)


@cache
def training_of(shape: str, losses: str, rate: float = 0.0, micro_batch_size: int = 2) -> Training:
    config = TrainConfig(
        optimizer=OPTIMIZER,
        dtype="float64",
        aux_losses=LOSSES[losses],
        router_bias_rate=rate,
        micro_batch_size=micro_batch_size,
    )
    return make_training(SHAPES[shape], config)


@cache
def expected_of(shape: str, losses: str, rate: float = 0.0) -> ReferenceRun:
    return reference_of(training_of(shape, losses, rate))


@pytest.mark.parametrize("topology", ["alone", "three lanes", "tp3", "tp3, tp2 and tp1", "unlike lanes in one replica"])
@pytest.mark.parametrize(
    ("shape", "losses", "rate"),
    [
        ("fine", "none", 0.0),
        ("fine", "all per token and sequence", 1e-2),
        ("fine tied", "previous step", 1e-2),
        ("gated", "all per token and sequence", 0.0),
        ("gated", "running step", 0.0),
    ],
)
def test_any_cut_trains_like_the_reference(topology: str, shape: str, losses: str, rate: float) -> None:
    plan = lanes_of(topology, SHAPES[shape])
    assert_equals(run_under(training_of(shape, losses, rate), plan).slots, expected_of(shape, losses, rate))


@pytest.mark.parametrize("losses", [name for name in LOSSES if name != "none"])
def test_each_option_changes_the_training(losses: str) -> None:
    """Otherwise the comparisons above would prove nothing."""
    plain, other = expected_of("fine", "none"), expected_of("fine", losses)
    router = "layers.1.moe.router.weight"
    assert (plain.params[router] - other.params[router]).abs().max() > 1e-4 * plain.params[router].abs().max()


def test_biases_change_who_computes() -> None:
    plain, biased = expected_of("fine", "none"), expected_of("fine", "none", 1e-2)
    assert biased.biases_le.abs().max() > 1e-2 and not plain.biases_le.any()
    assert not plain.counts_le.equal(biased.counts_le)


def failure(num_slots: int, replicas: int, dead: int, tp: int = 1) -> tuple[Plan, Plan]:
    """A plan, and that of the survivors."""
    lines, cluster = parameter_lines(FINE), Cluster.uniform(num_slots, num_slots)
    plan = plan_from_scratch(cluster, lines, num_replicas=replicas, global_batch_size=BATCH, lane_slots=tp)
    after = plan_after_failure(plan, cluster.fail([dead]), lines)
    return plan, plan_mirrors(after, cluster.fail([dead]), lines)


@pytest.mark.parametrize(
    ("num_slots", "replicas", "tp", "dead", "saw_the_vote"),
    [
        (3, 1, 1, 1, ()),  # the vote was seen by nobody alive: the step is replayed, on the same biases and counts
        (3, 1, 1, 1, (1,)),
        (3, 1, 1, 1, (0,)),  # seen by one survivor: the other rolls forward
        (4, 2, 2, 3, (0, 2)),  # a lane of two becomes one of one
        (4, 2, 2, 0, ()),
    ],
)
@pytest.mark.parametrize("losses", ["previous step", "running step"])
def test_a_slot_is_lost_and_biases_and_counts_are_not(
    num_slots: int, replicas: int, tp: int, dead: int, saw_the_vote: tuple[int, ...], losses: str
) -> None:
    plan, after = failure(num_slots, replicas, dead, tp)
    runs = training_of("fine", losses, 1e-2).run_with_loss(plan, after, 3, saw_the_vote)
    assert sorted(runs) == [slot for slot in range(num_slots) if slot != dead]
    assert_equals(runs, expected_of("fine", losses, 1e-2))


def test_a_skipped_step_changes_neither_biases_nor_counts() -> None:
    training, plan = training_of("fine", "previous step", 1e-2), lanes_of("three lanes", FINE)

    def body(me: ThreadSlot) -> tuple[bytes, bytes]:
        run = training.start(plan, me.slot)
        training.enter(run, me, plan, 1)
        training.go_on(run, me, 1)
        assert run.routing is not None
        before = run.routing.to_bytes()
        run.state.params["head.weight"].fill_(torch.nan)
        training.go_on(run, me, 2)
        assert [entry.skipped for entry in run.history.steps] == [False, True]
        return before, run.routing.to_bytes()

    found = run_slots(plan.replicas, body, lanes=[lane.slots for lane in plan.lanes])
    assert all(before == after for before, after in found.values())
    assert len({after for _, after in found.values()}) == 1


@pytest.mark.parametrize("topology", ["three lanes", "tp3, tp2 and tp1", "unlike lanes in one replica"])
@pytest.mark.parametrize("shape", [dataclasses.replace(FINE, router_bias=False), GATED], ids=["fine", "gated"])
def test_every_gradient_before_clipping(topology: str, shape: ModelShape) -> None:
    plan, lines = lanes_of(topology, shape), parameter_lines(shape)
    states = {slot: make_state(plan, slot, lines) for slot in plan.slots}
    losses = AuxLosses(z=0.3, balance=0.5, logits_z=0.2)
    run_slots(
        plan.replicas,
        lambda me: step_sums(me, states[me.slot], shape, 1, losses),
        lanes=[lane.slots for lane in plan.lanes],
    )
    aux = ReferenceAux(z_loss=0.3, balance_loss=0.5, logits_z_loss=0.2)
    tokens, targets = samples().train_batch(0, BATCH)
    _, expected = reference_gradients(shape, whole_model(lines), tokens, targets, aux=aux)
    owned = gather(plan.owners, {slot: state.owned.grad_sum for slot, state in states.items()}, lines)
    assert_close({name: tensor / targets.size for name, tensor in owned.items()}, expected)
