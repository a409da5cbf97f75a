"""Turns a single-device model into one slot's part of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import nn

from nep.distributed.groups import Groups
from nep.distributed.waiting import Waiter
from nep.moe.experts import expert_slices
from nep.moe.layer import MoE
from nep.parallel.dispatcher import AllToAllDispatcher
from nep.parallel.grad_sync import GradSync
from nep.parallel.state import SlotState
from nep.parallel.tensor_parallel import SlotLane, VocabularyParallelLoss, local_rows
from nep.planning.layout import Line, LineKind, Lines


class ParallelizableModel(Protocol):
    """What `parallelize` asks of a model (an `nn.Module`, built on the meta device)."""

    def parameter_lines(self) -> Mapping[str, Line]:
        """Global parameter names and how each may be cut."""

    def moe_layers(self) -> Mapping[str, MoE]:
        """MoE layers by the axis of their experts."""


def parallelize(
    model: nn.Module,
    *,
    state: SlotState,
    sync: GradSync,
    groups: Groups,
    waiter: Waiter,
    probe: Callable[[str], None],
) -> nn.Module:
    """Give `model` the slot's parameters and its dispatchers, in this order:

    1. parameters: the slot's storage, no copy; buffers, which no layout cuts, are zero until they are replaced;
    2. experts: which slices the storage holds;
    3. dispatch: an all-to-all in the replica's group (a replica of one slot keeps the local dispatcher);
    4. lane: collectives around attention, embedding and loss (a lane of one slot has none);
    5. gradients: accumulated where `sync` sends from.

    Args:
        model: fresh, on the meta device; it is changed and returned.
        state, sync: of the same plan.
        probe: failure injection, see `AllToAllDispatcher`.
    """
    lines: Lines = model.parameter_lines()  # type: ignore[operator]
    for name, line in lines.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(_module_view(line, state.params[name])))
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            owner, _, attribute = name.rpartition(".")
            setattr(
                model.get_submodule(owner),
                attribute,
                torch.zeros(buffer.shape, dtype=buffer.dtype, device=state.device),
            )

    layers: Mapping[str, MoE] = model.moe_layers()  # type: ignore[operator]
    expert_lines = {line.axis: line for line in lines.values() if line.kind is LineKind.EXPERTS}
    holders = state.plan.holders
    for axis, layer in layers.items():
        units_per_expert = expert_lines[axis].units_per_expert
        assert units_per_expert is not None
        slices = expert_slices(holders.intervals(axis, state.slot), units_per_expert)
        layer.experts.replace(slices, layer.experts.w13.detach(), layer.experts.w2.detach())
        if groups.dispatch.size > 1:
            cuts = {slot: holders.intervals(axis, slot) for slot in groups.dispatch.slots}
            layer.dispatcher = AllToAllDispatcher(
                groups.dispatch,
                waiter,
                cuts=cuts,
                units_per_expert=units_per_expert,
                num_experts=layer.router.num_experts,
                speeds_ppm=dict(zip(state.plan.slots, state.plan.speeds_ppm, strict=True)),
                probe=probe,
                device=state.device,
            )

    if groups.lane.size > 1:
        _share_lane(model, lines, state, SlotLane(groups.lane, waiter))

    for name, parameter in model.named_parameters():
        if sync.grads[name].dtype == parameter.dtype:
            parameter.grad = _module_view(lines[name], sync.grads[name])  # backward adds in place
    return model


def _share_lane(model: nn.Module, lines: Lines, state: SlotState, lane: SlotLane) -> None:
    """Tell the model which heads and vocabulary rows are here."""
    holders, slot = state.plan.holders, state.slot

    def units(kind: LineKind) -> dict[int, list[int]]:
        return {
            line.layer: [unit for lo, hi in holders.intervals(line.axis, slot) for unit in range(lo, hi)]
            for line in lines.values()
            if line.kind is kind
        }

    vocabulary = [line for line in lines.values() if line.kind is LineKind.VOCAB]
    # In forward order the first is the embedding and the last the head; a tied model has one for both.
    embedding_rows_v, head_rows_v = (
        local_rows(holders.intervals(line.axis, slot), line.num_units).to(state.device)
        for line in (vocabulary[0], vocabulary[-1])
    )
    model.share_lane(  # type: ignore[operator]
        lane,
        VocabularyParallelLoss(lane, head_rows_v),
        query_heads=units(LineKind.HEADS),
        kv_heads=units(LineKind.KV_HEADS),
        embedding_rows_v=embedding_rows_v,
    )


def _module_view(line: Line, tensor: torch.Tensor) -> torch.Tensor:
    """What a module computes with: a parameter that is one unit loses the dimension of units."""
    return tensor[0] if line.kind is LineKind.WHOLE else tensor
