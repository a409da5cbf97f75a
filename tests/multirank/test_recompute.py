"""Activation checkpointing changes no bit, no collective and no count; it only keeps less."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from models.mixtral import MixtralModel
from nep.fault_tolerance.runtime import SlotRun
from nep.moe.aux_losses import AuxLosses
from nep.planning.plan import Plan
from nep.planning.shapes import ModelShape
from nep.testing.parity import Phase
from nep.train.config import TrainConfig
from tests.multirank.test_training import FINE, GATED, lanes_of
from tests.multirank.training import OPTIMIZER, assert_equals, make_training, reference_of, run_under

AUX = AuxLosses(z=0.1, balance=0.2, logits_z=0.1)


def trained(shape: ModelShape, plan: Plan, recompute: bool, dtype: str) -> dict[int, tuple[SlotRun, list]]:
    config = TrainConfig(
        optimizer=OPTIMIZER,
        dtype=dtype,
        aux_losses=AUX,
        router_bias_rate=1e-2 * shape.router_bias,
        micro_batch_size=2,
        recompute=recompute,
    )
    done = make_training(shape, config).run([Phase(plan=plan, steps=3)])
    return {slot: (run, done.operations[0][slot]) for slot, run in done.slots.items()}


@pytest.mark.parametrize("dtype", ["float64", pytest.param("bfloat16", marks=pytest.mark.soak)])
@pytest.mark.parametrize("shape", [FINE, GATED], ids=["fine", "gated"])
@pytest.mark.parametrize("topology", ["alone", "tp3, tp2 and tp1", "unlike lanes in one replica"])
def test_the_same_bits_and_the_same_operations(topology: str, shape: ModelShape, dtype: str) -> None:
    plan = lanes_of(topology, shape)
    kept, again = (trained(shape, plan, recompute, dtype) for recompute in (False, True))
    for slot in plan.slots:
        (run, operations), (other, other_operations) = kept[slot], again[slot]
        assert operations == other_operations, "a collective ran in a checkpointed region"
        assert len(operations) > 0 or len(plan.slots) == 1
        assert run.history.steps == other.history.steps
        assert run.routing is not None and other.routing is not None
        assert torch.equal(run.routing.counts_le, other.routing.counts_le), "a counter ran in a checkpointed region"
        for name, master in run.state.owned.master.items():
            assert torch.equal(master, other.state.owned.master[name]), name
            assert torch.equal(run.state.params[name], other.state.params[name]), name


def test_recomputed_steps_are_the_reference_s() -> None:
    config = TrainConfig(
        optimizer=OPTIMIZER,
        dtype="float64",
        aux_losses=AUX,
        router_bias_rate=1e-2,
        micro_batch_size=1,
        recompute=True,
    )
    training = make_training(FINE, config)
    assert_equals(run_under(training, lanes_of("tp3, tp2 and tp1", FINE)).slots, reference_of(training))


def kept_bytes(recompute: bool) -> int:
    """What autograd keeps of one forward, parameters not counted."""
    shape = dataclasses.replace(FINE, hidden_size=32, ffn_hidden_size=64, dense_ffn_hidden_size=128)
    model = MixtralModel(shape, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    if recompute:
        model.use_recompute()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(tokens[:, :-1], tokens[:, 1:])
    # Without backward: tensors of regions that run again are not packed by these hooks, their inputs are.
    assert output.loss is not None
    return sum(kept.values())


def test_less_is_kept() -> None:
    assert kept_bytes(True) < 0.6 * kept_bytes(False)
