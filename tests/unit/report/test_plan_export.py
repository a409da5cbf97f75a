"""Exports say where each expert lies, in the form that the frameworks read; what they cannot say is refused."""

import dataclasses
import json

import pytest

from nep.planning.cluster import Cluster
from nep.planning.layout import Layout
from nep.planning.plan import Lane, Plan
from nep.planning.shapes import ModelShape, preset
from nep.report.plan_export import FORMATS, export_plan
from tests.unit.report.planned import request_of, whole_plan, with_slices

SHAPE = preset("debug")
DENSE = dataclasses.replace(SHAPE, num_layers=4, num_dense_layers=2, dense_ffn_hidden_size=8)


def plan_of(slots: int, *, copies: int = 0, shape: ModelShape = SHAPE) -> Plan:
    return whole_plan(request_of(shape=shape, cluster=Cluster.uniform(slots, 4)), copies=copies)


def holders(plan: Plan, axis: str, size: int) -> dict[int, set[int]]:
    """Expert -> slots, read from the layout independently of the exporter."""
    found: dict[int, set[int]] = {}
    for slot, intervals in plan.holders.by_slot(axis).items():
        for lo, hi in intervals:
            for unit in range(lo, hi):
                found.setdefault(unit // size, set()).add(slot)
    return found


@pytest.mark.parametrize("shape", [SHAPE, DENSE])
@pytest.mark.parametrize("copies", [0, 4])
def test_sglang(copies: int, shape: ModelShape) -> None:
    plan = plan_of(4, copies=copies, shape=shape)
    export = export_plan(plan, shape, "sglang")
    value = json.loads(export.text)
    assert list(value) == ["physical_to_logical_map"]
    rows = value["physical_to_logical_map"]
    assert len(rows) == shape.num_layers
    assert {len(row) for row in rows} == {8 + copies}
    assert all(set(row) == set(range(8)) for row in rows)
    per_rank = (8 + copies) // 4
    for layer in range(shape.num_dense_layers, shape.num_layers):
        where: dict[int, set[int]] = {}
        for physical, expert in enumerate(rows[layer]):
            where.setdefault(expert, set()).add(physical // per_rank)
        assert where == holders(plan, f"layers.{layer}.experts", shape.units_per_expert)
    for flag in ("--ep-size 4", f"--ep-num-redundant-experts {copies}", "--init-expert-location {file}"):
        assert flag in export.use


def test_vllm_has_moe_layers_only() -> None:
    plan = plan_of(4, copies=4, shape=DENSE)
    rows = json.loads(export_plan(plan, DENSE, "vllm").text)
    assert rows == json.loads(export_plan(plan, DENSE, "sglang").text)["physical_to_logical_map"][2:]
    assert "num_redundant_experts 4" in export_plan(plan, DENSE, "vllm").use


def test_megatron_nep() -> None:
    export = export_plan(plan_of(3), SHAPE, "megatron-nep")
    assert json.loads(export.text) == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert "--expert-model-parallel-size 3 --nonuniform-ep-placement-path {file}" in export.use


@pytest.mark.parametrize("form", FORMATS)
def test_slices_are_refused_with_the_remedy(form) -> None:
    with pytest.raises(ValueError, match=rf"2 slices per layer.*{form}.*--whole-experts"):
        export_plan(with_slices(SHAPE, plan_of(4)), SHAPE, form)


@pytest.mark.parametrize("form", ["sglang", "vllm"])
def test_servers_need_equal_ranks(form) -> None:
    with pytest.raises(
        ValueError, match=r"hold 2 to 3 experts.*--physical-experts 9 or another multiple of the 3 slots"
    ):
        export_plan(plan_of(3), SHAPE, form)


def two_replicas(plan: Plan, second: Plan) -> Plan:
    """The plan, and as a second replica another one's slots moved behind its own."""
    offset = max(plan.slots) + 1
    slots = tuple(slot + offset for slot in second.slots)
    cuts = {
        axis: dict(by) | {slot + offset: held for slot, held in second.holders.by_slot(axis).items()}
        for axis, by in plan.holders.cuts.items()
    }
    return dataclasses.replace(
        plan,
        slots=plan.slots + slots,
        replicas=(plan.slots, slots),
        lanes=plan.lanes + tuple(Lane(1, (slot,), 0) for slot in slots),
        holders=Layout(cuts),
        speeds_ppm=plan.speeds_ppm + second.speeds_ppm,
    )


@pytest.mark.parametrize("form", FORMATS)
def test_equal_replicas_are_one_placement(form) -> None:
    plan = plan_of(4)
    assert export_plan(two_replicas(plan, plan), SHAPE, form) == export_plan(plan, SHAPE, form)


def test_unlike_replicas_are_refused() -> None:
    plan = plan_of(4)
    swapped = {slot: plan.holders.intervals("layers.1.experts", 3 - slot) for slot in plan.slots}
    other = dataclasses.replace(plan, holders=Layout(dict(plan.holders.cuts) | {"layers.1.experts": swapped}))
    for form in ("sglang", "vllm"):
        with pytest.raises(ValueError, match=r"replicas 0 and 1 .* place experts differently.*--replicas 1"):
            export_plan(two_replicas(plan, other), SHAPE, form)
    with pytest.raises(ValueError, match=r"have 4, 3 slots.*--nonuniform-ep-num-tp-cp-per-replica"):
        export_plan(two_replicas(plan, plan_of(3)), SHAPE, "megatron-nep")
    with pytest.raises(ValueError, match=r"layers of plan .* place experts differently"):
        export_plan(other, SHAPE, "megatron-nep")


def test_megatron_nep_knows_no_copies() -> None:
    with pytest.raises(ValueError, match=r"copies of experts.*without --physical-experts"):
        export_plan(plan_of(4, copies=4), SHAPE, "megatron-nep")
