"""The table says what the plan and its report say."""

import dataclasses

import pytest

from nep.planning.cluster import Cluster
from nep.planning.planner import plan_after_failure, plan_from_scratch
from nep.planning.search.request import PlanRequest
from nep.planning.shapes import parameter_lines, preset
from nep.report.plan_table import cluster_text, loads_text, plan_text
from nep.report.readers.cluster_file import ClusterFlags, cluster_from_flags
from tests.unit.report.planned import WORKLOAD, planned_of, request_of, uneven_loads, whole_plan, with_slices

SHAPE = preset("debug")
LINES = parameter_lines(SHAPE)


def after_failure() -> tuple[PlanRequest, object]:
    cluster = Cluster.uniform(8, 4)
    before = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=8)
    request = request_of(
        cluster=cluster.fail([3]), current=before, loads=uneven_loads(SHAPE), num_replicas=2, redundancy="device"
    )
    return request, plan_after_failure(before, request.cluster, LINES)


def rows(text: str, title: str) -> dict[str, list[str]]:
    """First cell -> other cells of the table that begins with a title."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(title))
    found = {}
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        found[cells[0]] = cells[1:]
    return found


def test_everything_is_there() -> None:
    request, plan = after_failure()
    planned = planned_of(request, plan)
    text = plan_text(request, planned, notes=["something was left out"], width=120)
    assert "debug: 1.7 M parameters" in text
    assert "8 slots on 2 nodes; failed 3" in text
    assert "note      something was left out" in text
    assert f"digest {plan.digest[:12]}" in text
    assert "7 slots in 2 replicas (3, 4)" in text
    assert "0.9876" in text and "99.0% of what is possible" in text
    assert "all slots are busy all the time" in text
    assert "1 death 100.0%, 2 deaths 75.0%" in text
    assert "* repair" in text and "wait for repair" in text and "none is known" in text


def test_parts_of_the_step_for_each_state() -> None:
    request, plan = after_failure()
    planned = planned_of(request, plan)
    halved = dataclasses.replace(
        planned.report.predicted, parts={part: time / 2 for part, time in planned.report.predicted.parts.items()}
    )
    planned = dataclasses.replace(planned, report=dataclasses.replace(planned.report, healthy=halved))
    table = rows(plan_text(request, planned, width=120), "step, us")
    total = planned.report.predicted.total * 1e6
    assert [float(cell) for cell in table["total"]] == pytest.approx([total / 2, total, total], abs=0.06)
    parts = sum(float(cells[2]) for name, cells in table.items() if name != "total")
    assert parts == pytest.approx(total, rel=1e-2)
    assert "50.0% of" in plan_text(request, planned)


def test_slots_with_equal_entries_share_a_row() -> None:
    request = request_of(cluster=Cluster.uniform(8, 8))
    plan = whole_plan(request)
    planned = planned_of(request, plan)
    slots = tuple(dataclasses.replace(one, memory_bytes=2**30, step_s=1e-3) for one in planned.report.slots)
    planned = dataclasses.replace(planned, report=dataclasses.replace(planned.report, slots=slots))
    text = plan_text(request, planned, width=120)
    assert set(rows(text, "slots")) == {str(slot) for slot in range(8)}  # each has another expert
    assert rows(text, "slots")["5"][-1] == "5"
    many = request_of(
        shape=dataclasses.replace(SHAPE, num_experts=64),
        cluster=Cluster.uniform(64, 8),
        workload=dataclasses.replace(WORKLOAD, global_batch_size=64),
    )
    plan = whole_plan(many)
    planned = planned_of(many, plan)
    slots = tuple(dataclasses.replace(one, memory_bytes=2**30, step_s=1e-3) for one in planned.report.slots)
    planned = dataclasses.replace(planned, report=dataclasses.replace(planned.report, slots=slots))
    # Too many rows: the experts themselves are left out, and what remains is equal.
    assert set(rows(plan_text(many, planned, width=120), "slots")) == {"0-63"}


def test_more_kinds_of_slots_than_rows_are_summed_up() -> None:
    request = request_of(shape=dataclasses.replace(SHAPE, num_experts=64), cluster=Cluster.uniform(64, 8))
    planned = planned_of(request, whole_plan(request))
    slots = tuple(dataclasses.replace(one, load=1 + one.slot / 64) for one in planned.report.slots)
    planned = dataclasses.replace(planned, report=dataclasses.replace(planned.report, slots=slots))
    assert "and 16 other slots" in plan_text(request, planned, width=120)


def test_fractions_are_shown() -> None:
    request = request_of()
    plan = with_slices(SHAPE, whole_plan(request))
    table = rows(plan_text(request, planned_of(request, plan), width=140), "slots")
    assert table["0"][-1] == "4 0:1/2"
    assert table["3"][-1] == "3,7 0:1/2"
    assert table["0"][-3:-1] == ["1.0", "1.0"]


def test_transfers_are_listed_or_left_out() -> None:
    request, plan = after_failure()
    table = rows(plan_text(request, planned_of(request, plan), width=120), "transfers")
    assert set(table) == {"parameters", "state"}
    calm = request_of()
    assert "transfers" not in plan_text(calm, planned_of(calm, whole_plan(calm)))


def test_a_plan_that_is_kept_says_why() -> None:
    request = request_of()
    planned = planned_of(request, whole_plan(request), skipped="moving 3 GB would not pay within 10 steps")
    assert "kept          moving 3 GB would not pay within 10 steps" in plan_text(request, planned)


def test_state_that_is_lost_is_said() -> None:
    request = request_of()
    size = sum(line.num_units * line.unit_numel for line in LINES.values() if line.axis == "layers.0.experts")
    lost = (("layers.0.experts", 0, 8 * SHAPE.units_per_expert),)
    planned = planned_of(request, whole_plan(request), lost=lost)
    share = f"{size / SHAPE.num_parameters:.2%}"
    assert f"state of {share} of the parameters: no owner and no mirror lives" in plan_text(request, planned)
    assert "no mirror lives" not in plan_text(request, planned_of(request, whole_plan(request)))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_keep_to_the_width(width: int) -> None:
    request, plan = after_failure()
    text = plan_text(request, planned_of(request, plan), width=width)
    tables = text[text.index("\nslots ") :]
    assert all(len(line) <= width for line in tables.splitlines())
    slots = rows(text, "slots")
    assert set(slots) == {str(slot) for slot in plan.slots}
    assert not any("…" in cell for cells in slots.values() for cell in cells[:-1])


def test_clusters_in_words() -> None:
    flags = ClusterFlags(
        nodes=2,
        gpus_per_node="4,3",
        failed="1",
        draining="2",
        idle="3",
        spare="4",
        slow="5-6=0.7",
        memory_gib="80,0=40",
    )
    assert cluster_text(cluster_from_flags(flags)) == (
        "7 slots on 2 nodes; failed 1; draining 2; idle 3; spare 4; at 0.70 of the speed: 5-6; 40.0 or 80.0 GiB each"
    )
    assert cluster_text(Cluster.uniform(1, 1)) == "1 slot on 1 node"


def test_loads_in_words() -> None:
    assert loads_text(None) == "equal (none given)"
    assert loads_text(uneven_loads(SHAPE)).startswith("3 steps, the hottest expert of a layer has 1.")


def test_a_step_that_takes_no_time_divides_by_nothing() -> None:
    request = request_of()
    planned = planned_of(request, whole_plan(request))
    nothing = dataclasses.replace(planned.report.predicted, parts=dict.fromkeys(planned.report.predicted.parts, 0.0))
    report = dataclasses.replace(planned.report, predicted=nothing, healthy=nothing, placement_s=0.0, bound_s=0.0)
    assert "0 s, 0.00 sequences/s" in plan_text(request, dataclasses.replace(planned, report=report))
