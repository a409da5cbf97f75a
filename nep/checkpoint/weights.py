"""Usable weights in one safetensors file: global names, logical experts, whatever the layout was."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from nep.distributed.groups import Communicator
from nep.distributed.waiting import Waiter
from nep.moe.routing_state import RoutingState
from nep.moe.weights import bias_names, file_metadata, split_experts
from nep.parallel.holding import Holding, allocate
from nep.parallel.state import SlotState
from nep.parallel.transfer import compile_transfer, launch
from nep.planning.layout import Layout, LineKind, Lines, axes
from nep.planning.shapes import ModelShape
from nep.planning.transfer import fetch


def gather_parameters(
    state: SlotState, lines: Lines, dtype: torch.dtype, *, to: int, communicator: Communicator, waiter: Waiter
) -> dict[str, torch.Tensor]:
    """The whole model on slot `to`, from the owners, axis by axis; empty elsewhere. All members call it."""
    gathered: dict[str, torch.Tensor] = {}
    for axis, names in axes(lines).items():
        part = {name: lines[name] for name in names}
        layout = Layout({axis: {to: ((0, lines[names[0]].num_units),)}})
        tensors = allocate(layout, state.slot, part, dtype, state.device)
        transfer = fetch([state.plan.owners], layout, (axis,))
        compiled = compile_transfer(
            transfer,
            transfer,
            {axis: names},
            sources=[state.owned.weights()],
            destination=Holding(layout, state.slot, tensors),
            dtype=dtype,
        )
        launch(compiled, communicator).finish(waiter, f"the weights of {axis}", "copy")
        if state.slot == to:
            gathered.update({name: tensor.cpu() for name, tensor in tensors.items()})
    return gathered


def save_parameters(
    path: Path,
    shape: ModelShape,
    lines: Lines,
    tensors: dict[str, torch.Tensor],
    routing: RoutingState | None = None,
) -> None:
    """Write the file at once or not at all.

    Args:
        path: where to; replaced if it exists.
        shape: of the model, kept in the file's metadata.
        tensors: every parameter, whole, as `[num_units, *unit_shape]`.
        routing: has the biases of the routers, for a model with any.
    """
    logical: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor[0] if lines[name].kind is LineKind.WHOLE else tensor
        logical.update({key: value.contiguous() for key, value in split_experts(name, whole, shape).items()})
    for layer, name in enumerate(bias_names(shape)):
        assert routing is not None, f"{name} is a part of the model"
        logical[name] = routing.bias_le[layer].to("cpu", copy=True)
    unfinished = path.with_name(path.name + ".unfinished")
    save_file(logical, unfinished, metadata=file_metadata(shape))
    os.replace(unfinished, path)
