"""Numbers that are derived for people: who holds what, what travels, how it is written."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cluster import Cluster
from nep.planning.cost.replica_time import expert_units
from nep.planning.layout import Layout, axis_unit_numel
from nep.planning.planner import plan_after_failure, plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from nep.planning.transfer import Piece, Transfer
from nep.report.plan_figures import (
    bytes_between,
    bytes_text,
    count_text,
    gib_text,
    held_experts,
    samples_per_s,
    time_text,
    time_unit,
    transfer_figures,
)
from tests.unit.report.planned import planned_of, request_of, whole_plan, with_slices

SHAPE = preset("debug")
LINES = parameter_lines(SHAPE)


@pytest.mark.parametrize("slots", [1, 3, 4, 7])
def test_who_holds_what_agrees_with_the_cost_models_view(slots: int) -> None:
    cluster = Cluster.uniform(slots, 4)
    plan = plan_from_scratch(cluster, LINES, num_replicas=1, global_batch_size=8)
    if slots > 1:
        plan = plan_after_failure(plan, cluster.fail([0]), LINES)
    held = held_experts(plan, LINES)
    units, _ = expert_units(plan.holders, plan.slots, LINES)
    for layer in range(len(held.layers)):
        for place in range(len(plan.slots)):
            np.testing.assert_array_equal(held.units(layer, place), units[layer, :, place])
    np.testing.assert_allclose(held.whole, (units == held.units_per_expert).sum(axis=1).mean(axis=0))
    partial = (units > 0) & (units < held.units_per_expert)
    np.testing.assert_allclose(held.slices, partial.sum(axis=1).mean(axis=0))
    assert held.are_whole == (not partial.any())


def test_layers_are_alike_whatever_the_order_in_storage() -> None:
    plan = whole_plan(request_of())
    assert held_experts(plan, LINES).layers_are_alike
    cuts = {axis: dict(by) for axis, by in plan.holders.cuts.items()}
    cuts["layers.1.experts"][0] = tuple(reversed(cuts["layers.1.experts"][0]))
    shuffled = held_experts(type(plan)(**(vars(plan) | {"holders": Layout(cuts)})), LINES)
    assert shuffled.layers_are_alike
    cuts["layers.1.experts"][0], cuts["layers.1.experts"][1] = cuts["layers.1.experts"][1], cuts["layers.1.experts"][0]
    assert not held_experts(type(plan)(**(vars(plan) | {"holders": Layout(cuts)})), LINES).layers_are_alike


def test_slices_are_counted_as_slices() -> None:
    held = held_experts(with_slices(SHAPE, whole_plan(request_of())), LINES)
    assert held.whole.tolist() == [1, 2, 2, 2]
    assert held.slices.tolist() == [1, 0, 0, 1]
    assert not held.are_whole


def test_transfers_count_what_leaves_a_slot() -> None:
    request = request_of()
    plan = whole_plan(request)
    size = SHAPE.units_per_expert
    pieces = (
        Piece("layers.0.experts", 0, size, 0, 1),
        Piece("layers.0.experts", 0, size, 0, 2),
        Piece("layers.0.experts", 0, size, 3, 3),
    )
    transfers = {"parameters": Transfer(pieces), "state": Transfer(pieces[2:]), "mirrors": Transfer(pieces[:1])}
    planned = planned_of(request, plan, transfers=transfers)
    expert = size * axis_unit_numel(LINES)["layers.0.experts"]
    parameters, mirrors = transfer_figures(request, planned)
    assert (parameters.kind, parameters.pieces, parameters.num_bytes) == ("parameters", 2, 2 * expert * 2)
    assert parameters.busiest_bytes == 2 * expert * 2
    assert (parameters.sources, parameters.destinations) == ((0,), (1, 2))
    assert (mirrors.kind, mirrors.num_bytes) == ("mirrors", expert * 12)
    assert parameters.seconds > 0
    assert bytes_between(request, planned) == {(0, 1): expert * (2 + 12), (0, 2): expert * 2}


def test_nothing_travels() -> None:
    request = request_of()
    planned = planned_of(request, whole_plan(request))
    assert transfer_figures(request, planned) == ()
    assert bytes_between(request, planned) == {}


def test_sequences_per_second() -> None:
    request = request_of()
    planned = planned_of(request, whole_plan(request))
    rate = samples_per_s(planned.report.predicted, request)
    assert rate * planned.report.predicted.total == pytest.approx(request.workload.global_batch_size)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.23456, "1.235 s"),
        (123.4, "123.4 s"),
        (0.0123, "12.30 ms"),
        (4e-6, "4.000 us"),
        (1e-9, "0.001 us"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@given(st.lists(st.floats(0, 1e6), max_size=5))
def test_a_column_of_times_has_one_unit_and_loses_little(seconds: list[float]) -> None:
    unit, write = time_unit(*seconds)
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
    largest = max(seconds, default=0.0)
    for value in seconds:
        assert abs(float(write(value)) * scale - value) <= max(5e-3 * largest, 1e-9)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1.234e6, "1.23 MB"), (5.6789e10, "56.8 GB"), (1.5e15, "1500 TB")],
)
def test_sizes(size: float, text: str) -> None:
    assert bytes_text(size) == text


def test_memory_and_counts() -> None:
    assert (gib_text(0), gib_text(2**29), gib_text(74.5 * 2**30)) == ("0.0", "0.5", "74.5")
    assert (count_text(671e9), count_text(46.7e9), count_text(1.66e6), count_text(12)) == (
        "671 B",
        "46.7 B",
        "1.7 M",
        "12",
    )
