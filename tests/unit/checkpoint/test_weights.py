"""The weights that a job saves: whole, by global names, whatever the layout was."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from models.mixtral import build
from models.weights import load_params
from nep.checkpoint.weights import gather_parameters, save_parameters
from nep.moe.routing_state import RoutingState
from nep.moe.weights import logical_shapes
from nep.parallel.state import SlotState
from nep.planning.cluster import Cluster
from nep.planning.plan import Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.shapes import ModelShape, parameter_lines, preset
from nep.testing.threads import run_slots
from nep.train.initialization import initial_units

SHAPE = dataclasses.replace(
    preset("debug"),
    hidden_size=16,
    ffn_hidden_size=12,
    neuron_block=1,
    num_experts=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)
LINES = parameter_lines(SHAPE)


def initial(name: str, lo: int, hi: int) -> torch.Tensor:
    return initial_units(3, name, LINES[name], lo, hi)


def plan_without(dead: list[int]) -> Plan:
    cluster = Cluster.uniform(4, 4)
    plan = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=4)
    for slot in dead:
        cluster = cluster.fail([slot])
        plan = plan_mirrors(plan_after_failure(plan, cluster, LINES), cluster, LINES)
    return plan


@pytest.mark.parametrize(("dead", "dtype"), [([], torch.float64), ([1], torch.float32), ([0, 3], torch.bfloat16)])
def test_one_slot_gets_all_weights_and_the_others_none(dead: list[int], dtype: torch.dtype) -> None:
    plan = plan_without(dead)
    states = {slot: SlotState.initial(plan, slot, LINES, dtype, initial) for slot in plan.slots}
    for state in states.values():  # they come from the owners' master weights, not from what is computed with
        for tensor in state.params.values():
            tensor.fill_(7.0)
    to = plan.slots[-1]
    gathered = run_slots(
        plan.replicas,
        lambda me: gather_parameters(
            states[me.slot], LINES, dtype, to=to, communicator=me.groups.transfer, waiter=me.waiter
        ),
    )
    assert all(tensors == {} for slot, tensors in gathered.items() if slot != to)
    assert gathered[to].keys() == LINES.keys()
    for name, line in LINES.items():
        whole = initial(name, 0, line.num_units)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert torch.equal(gathered[to][name], whole.to(wide).to(dtype)), name


def test_biases_are_saved_with_the_parameters(tmp_path: Path) -> None:
    shape = dataclasses.replace(preset("debug-fine"), num_experts=6, hidden_size=16)
    lines = parameter_lines(shape)
    routing = RoutingState.initial(lines, torch.float32)
    routing.commit(torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]]), 0.25)
    save_parameters(tmp_path / "params", shape, lines, make_params(shape), routing)
    tensors = load_file(tmp_path / "params")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == logical_shapes(shape)
    assert tensors["layers.1.moe.router.bias"].tolist() == [0.25, 0.25, 0.25, -0.25, -0.25, -0.25]
    model = build(shape, torch.float32)
    load_params(model.to_empty(device="cpu"), tmp_path / "params")
    assert torch.equal(model.get_buffer("layers.2.moe.router.bias"), routing.bias_le[1])


def make_params(shape: ModelShape) -> dict[str, torch.Tensor]:
    return {
        name: initial_units(3, name, line, 0, line.num_units).float() for name, line in parameter_lines(shape).items()
    }


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_saved_is_loaded_again(tied: bool, tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, tied_embeddings=tied)
    params = make_params(shape)
    path = tmp_path / "params.safetensors"
    path.write_text("the run before")
    save_parameters(path, shape, parameter_lines(shape), params)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "nothing unfinished is left"
    assert {name: tuple(tensor.shape) for name, tensor in load_file(path).items()} == logical_shapes(shape)
    with safe_open(path, "pt") as file:
        assert ModelShape.from_json(file.metadata()["shape"]) == shape
    model = build(shape, torch.float32)
    load_params(model.to_empty(device="cpu"), path)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), params[name].reshape(parameter.shape)), name
