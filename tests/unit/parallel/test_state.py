"""What a slot keeps: equal initial values at holder, owner and mirror, and versions of parameters."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nep.parallel.state import SlotState, accumulation_dtype
from nep.planning.cluster import Cluster
from nep.planning.layout import Layout, axes
from nep.planning.plan import Plan
from nep.planning.planner import plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from nep.train.initialization import initial_units

LINES = parameter_lines(preset("debug"))
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def make_plan() -> Plan:
    return plan_from_scratch(Cluster.uniform(3, 3), LINES, num_replicas=1, global_batch_size=3)


def initial(plan: Plan, slot: int, dtype: torch.dtype) -> SlotState:
    return SlotState.initial(plan, slot, LINES, dtype, lambda name, lo, hi: initial_units(5, name, LINES[name], lo, hi))


def units(layout: Layout, slot: int, tensors: dict[str, torch.Tensor], name: str) -> dict[int, torch.Tensor]:
    numbers = [unit for lo, hi in layout.intervals(LINES[name].axis, slot) for unit in range(lo, hi)]
    return dict(zip(numbers, tensors[name], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_are_the_rounded_master_weights_and_mirrors_the_same_bits(dtype: torch.dtype) -> None:
    """As after every later step; else a slot that gets its parameters anew would go on with others."""
    plan = make_plan()
    states = {slot: initial(plan, slot, dtype) for slot in plan.slots}
    for name in LINES:
        master: dict[int, torch.Tensor] = {}
        for slot, state in states.items():
            assert state.owned.master[name].dtype == accumulation_dtype(dtype)
            assert state.params[name].dtype == dtype
            master |= units(plan.owners, slot, state.owned.master, name)
        assert sorted(master) == list(range(LINES[name].num_units))
        for slot, state in states.items():
            for unit, value in units(plan.mirrors, slot, state.mirrored.master, name).items():
                assert torch.equal(value, master[unit]), name
            for unit, value in units(plan.holders, slot, state.params, name).items():
                assert torch.equal(value, master[unit].to(dtype)), f"{name} unit {unit}"
    assert not any(
        tensor.any()
        for state in states.values()
        for tensor in (*state.owned.moments["exp_avg"].values(), *state.owned.moments["exp_avg_sq"].values())
    )


def test_sums_are_at_least_float32() -> None:
    assert [accumulation_dtype(dtype) for dtype in (*DTYPES, torch.float16)] == [
        torch.float64,
        torch.float32,
        torch.float32,
        torch.float32,
    ]


def test_parameters_have_a_version_only_when_all_are_of_one_step() -> None:
    plan = make_plan()
    state = initial(plan, 1, torch.float32)
    assert state.params_version == 0
    held = {(axis, slot) for axis in axes(LINES) for slot in plan.slots if plan.holders.intervals(axis, 1)}
    assert {axis for axis, _, _ in state.versions} == {axis for axis, _ in held}
    first, *others = state.versions
    state.versions[first] = 1
    assert state.params_version is None
    state.versions.update(dict.fromkeys(others, 1))
    assert state.params_version == 1
    state.versions[first] = None  # being written
    assert state.params_version is None
    state.mark_all(7, tuple(axes(LINES)))
    assert state.params_version == 7


def test_an_interval_has_a_version_per_owner_that_returns_it() -> None:
    """Each owner's part arrives by itself, so each has a version of its own."""
    plan = make_plan()
    state = initial(plan, 0, torch.float32)
    for axis in axes(LINES):
        marked = sorted((lo, hi) for name, lo, hi in state.versions if name == axis)
        assert sum(hi - lo for lo, hi in marked) == plan.holders.num_units(axis, 0)
        for lo, hi in marked:
            owners = [
                slot for slot in plan.slots if any(a <= lo and hi <= b for a, b in plan.owners.intervals(axis, slot))
            ]
            assert len(owners) == 1


def test_a_slot_outside_the_layout_keeps_nothing() -> None:
    plan = dataclasses.replace(make_plan(), mirrors=Layout({}), redundancy="none")
    state = SlotState.empty(plan, 0, LINES, torch.float32)
    assert all(tensor.numel() == 0 for tensor in state.mirrored.master.values())
    assert state.params_version is None
