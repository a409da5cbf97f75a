"""Moves a slot's state from one plan to another, into fresh memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from nep.distributed.groups import Communicator
from nep.distributed.waiting import Waiter
from nep.parallel.grad_sync import Probe
from nep.parallel.holding import Holding
from nep.parallel.state import OptimizerShard, SlotState, Tensors, accumulation_dtype
from nep.parallel.transfer import compile_transfer, launch
from nep.planning.layout import Layout, Lines, axes, axis_unit_numel, intersect, normalize, subtract, union
from nep.planning.plan import Plan
from nep.planning.transfer import fetch


def migrate(
    old: SlotState,
    plan: Plan,
    *,
    live: Iterable[int],
    params_versions: Mapping[int, int | None],
    version: int,
    lines: Lines,
    dtype: torch.dtype,
    communicator: Communicator,
    waiter: Waiter,
    probe: Probe,
) -> SlotState:
    """The state that `plan` makes this slot keep; `old` stays whole, so that a failure costs nothing.

    Master weights and moments come from the old owner, else the old mirror. Parameters come from the owner
    (or mirror) too, unless the slot already holds them at `version`. Whatever keeps its place is not copied:
    both states then share the tensor until one of them is dropped. All slots of `communicator` call it.

    Args:
        old: state under the committed plan, at step `version`.
        live: slots of the old plan that still have their state.
        params_versions: for each live slot, the step that all its parameters are from, or None.
        version: the committed step.

    Raises:
        Fault: `old` is untouched.
    """
    names = axes(lines)
    order = tuple(names)
    slot, before = old.slot, old.plan
    live = tuple(live)
    owners, mirrors = before.owners.restrict(live), before.mirrors.restrict(live)
    kept_state = _union(owners, mirrors, order)
    whole = [member for member in live if params_versions.get(member) == version]
    kept_params = before.holders.restrict(whole)
    wide = accumulation_dtype(dtype)

    new = SlotState(
        plan=plan,
        slot=slot,
        params=_allocate(plan.holders, kept_params, old.params, slot, lines, dtype, old.device),
        versions={},
        owned=_shard(plan.owners, old.owned, slot, lines, wide, old.device),
        mirrored=_shard(plan.mirrors, old.mirrored, slot, lines, wide, old.device),
    )
    state_sources = [old.owned.state(), old.mirrored.state()]
    weight_sources = [old.owned.weights(), old.mirrored.weights()]
    moves = (
        ("owned state", plan.owners, kept_state, state_sources, new.owned.state(), wide),
        ("mirrored state", plan.mirrors, kept_state, state_sources, new.mirrored.state(), wide),
        ("parameters", plan.holders, kept_params, weight_sources, new.held(), dtype),
    )
    for what, layout, kept, sources, destination, wire in moves:
        transfer = fetch([owners, mirrors], layout, order, have=kept, unit_numel=axis_unit_numel(lines))
        compiled = compile_transfer(transfer, transfer, names, sources=sources, destination=destination, dtype=wire)
        flight = launch(compiled, communicator, lambda: probe("recover"))
        local = [old.held()] if what == "parameters" and slot in whole else sources
        _copy_local(local, destination, kept, names)
        flight.finish(waiter, f"{what} of plan {plan.number}", "copy")
        del flight  # and its messages, before there are new ones
    new.mark_all(version, order)
    return new


def _union(first: Layout, second: Layout, order: tuple[str, ...]) -> Layout:
    slots = sorted({*first.slots(), *second.slots()})
    return Layout(
        {
            axis: {slot: union(first.intervals(axis, slot), second.intervals(axis, slot)) for slot in slots}
            for axis in order
        }
    )


def _allocate(
    layout: Layout,
    before: Layout,
    tensors: Tensors,
    slot: int,
    lines: Lines,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensors:
    """Tensors for `layout`; those of axes whose intervals stay exactly the same are shared."""
    return {
        name: tensors[name]
        if layout.intervals(line.axis, slot) == before.intervals(line.axis, slot)
        else torch.zeros(layout.num_units(line.axis, slot), *line.unit_shape, dtype=dtype, device=device)
        for name, line in lines.items()
    }


def _shard(
    layout: Layout, before: OptimizerShard, slot: int, lines: Lines, dtype: torch.dtype, device: torch.device
) -> OptimizerShard:
    return OptimizerShard(
        layout=layout,
        slot=slot,
        master=_allocate(layout, before.layout, before.master, slot, lines, dtype, device),
        moments={
            kind: _allocate(layout, before.layout, tensors, slot, lines, dtype, device)
            for kind, tensors in before.moments.items()
        },
        grad_sum=_allocate(layout, before.layout, before.grad_sum, slot, lines, dtype, device),
    )


def _copy_local(
    sources: list[Holding], destination: Holding, kept: Layout, names: Mapping[str, tuple[str, ...]]
) -> None:
    """Fill what the slot had already; tensors that both states share are left alone."""
    slot = destination.slot
    for axis, parameters in names.items():
        wanted = intersect(normalize(destination.layout.intervals(axis, slot)), normalize(kept.intervals(axis, slot)))
        for source in sources:
            if not wanted:
                break
            held = source.layout.intervals(axis, slot)
            if held == destination.layout.intervals(axis, slot) and all(
                destination.fields[0][name] is source.fields[0][name] for name in parameters
            ):
                wanted = ()
                break
            wanted = _copy_pieces(source, destination, axis, parameters, wanted)


def _copy_pieces(
    source: Holding,
    destination: Holding,
    axis: str,
    parameters: tuple[str, ...],
    wanted: tuple[tuple[int, int], ...],
) -> tuple[tuple[int, int], ...]:
    """Copy the part of `wanted` that `source` has; returns the rest."""
    slot = destination.slot
    missing = wanted
    for lo, hi in source.layout.intervals(axis, slot):
        for a, b in intersect(missing, ((lo, hi),)):
            # Cut again where the destination stores it in several pieces, so that both sides have equal views.
            for c, d in destination.layout.intervals(axis, slot):
                start, end = max(a, c), min(b, d)
                if start < end:
                    from_views = source.views(axis, parameters, start, end)
                    to_views = destination.views(axis, parameters, start, end)
                    assert from_views is not None and to_views is not None
                    torch._foreach_copy_(to_views, from_views)
    return subtract(missing, normalize(source.layout.intervals(axis, slot)))
