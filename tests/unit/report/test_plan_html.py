"""The page: one file, complete, and its map says what the plan says."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import numpy as np

from nep.planning.cluster import Cluster
from nep.planning.plan import Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch
from nep.planning.search.request import Planned, PlanRequest
from nep.planning.shapes import ModelShape, parameter_lines, preset
from nep.report.plan_figures import held_experts
from nep.report.plan_html import MAX_SLOTS, plan_page
from tests.unit.report.planned import WORKLOAD, planned_of, request_of, uneven_loads, whole_plan

SHAPE = preset("debug")
VOID = {"meta", "input", "br", "link", "img"}


class Checker(HTMLParser):
    """Collects text and addresses, and makes sure that tags are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text += data


def page_of(request: PlanRequest, plan: Plan, **fields) -> tuple[str, dict, Planned]:
    planned = planned_of(request, plan, **fields)
    page = plan_page(request, planned, notes=["a <note> & more"])
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return page, json.loads(found[1]), planned


def after_failure(shape: ModelShape = SHAPE) -> tuple[PlanRequest, Plan]:
    cluster, lines = Cluster.uniform(8, 4), parameter_lines(shape)
    before = plan_from_scratch(cluster, lines, num_replicas=2, global_batch_size=8)
    request = request_of(shape=shape, cluster=cluster.fail([3]), current=before, loads=uneven_loads(shape))
    return request, plan_after_failure(before, request.cluster, lines)


def test_the_page_is_whole_and_asks_the_network_for_nothing() -> None:
    page, _, planned = page_of(*after_failure())
    checker = Checker(page)
    assert checker.open == []
    assert checker.addresses == []
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest|import\(", page)
    assert not re.search(r"@[A-Z_]{3,}@", page)
    assert "a <note> & more" in checker.text
    assert checker.tags.count("table") == 5
    for text in ("debug: plan 2", planned.report.binds, "wait for repair", "none is known"):
        assert text in checker.text


def units_of(data: dict, side: str, layer: int) -> np.ndarray:
    """[rows, experts] as the page's script reads them."""
    table = data[side]["tables"][data[side]["of"][layer]]
    units = np.zeros((len(data["rows"]), data["experts"]), dtype=np.int64)
    for row, flat in enumerate(table):
        for expert, held in zip(flat[::2], flat[1::2], strict=True):
            units[row, expert] = held
    return units


def test_the_map_is_the_plan_before_and_after() -> None:
    request, plan = after_failure(dataclasses.replace(SHAPE, num_layers=3))
    _, data, _ = page_of(request, plan)
    assert data["layers"] == [0, 1, 2]
    assert [row["slot"] for row in data["rows"]] == list(range(8))
    assert [row["after"] for row in data["rows"]] == [True] * 3 + [False] + [True] * 4
    assert all(row["before"] for row in data["rows"])
    assert [row["replica"] for row in data["rows"]] == [0] * 4 + [1] * 4  # the dead one stays with its replica
    for side, shown in (("before", request.current), ("after", plan)):
        held = held_experts(shown, parameter_lines(request.shape))
        for layer in range(3):
            units = units_of(data, side, layer)
            for row, entry in enumerate(data["rows"]):
                expected = held.units(layer, shown.slots.index(entry["slot"])) if entry["slot"] in shown.slots else 0
                np.testing.assert_array_equal(units[row], expected)
    assert data["size"] == SHAPE.units_per_expert


def test_loads_are_multiples_of_an_even_share() -> None:
    request, plan = after_failure()
    _, data, _ = page_of(request, plan)
    loads = np.array(data["loads"])
    np.testing.assert_allclose(loads.mean(axis=1), 1, atol=1e-3)
    np.testing.assert_allclose(loads, request.loads.normalised().mean * 8, atol=1e-3)


def test_without_a_plan_in_force_there_is_one_map() -> None:
    request = request_of()
    page, data, _ = page_of(request, whole_plan(request))
    assert data["before"] is None
    assert [step["name"] for step in data["steps"]] == ["healthy", "planned"]
    assert "Nothing." in Checker(page).text


def test_layers_that_are_alike_share_a_table() -> None:
    request = request_of(shape=dataclasses.replace(SHAPE, num_layers=20))
    _, data, _ = page_of(request, whole_plan(request))
    assert len(data["after"]["tables"]) == 1
    assert data["after"]["of"] == [0] * 20


def test_a_text_cannot_end_the_script() -> None:
    shape = dataclasses.replace(SHAPE, name="</script><script>alert(1)</script>")
    request = request_of(shape=shape)
    page, _, _ = page_of(request, whole_plan(request))
    assert Checker(page).tags.count("script") == 2


def test_of_a_large_cluster_the_replicas_that_change_are_drawn() -> None:
    cluster, lines = Cluster.uniform(512, 8), parameter_lines(SHAPE)
    before = plan_from_scratch(cluster, lines, num_replicas=64, global_batch_size=512)
    workload = dataclasses.replace(WORKLOAD, global_batch_size=512)
    request = request_of(cluster=cluster.fail([500]), current=before, workload=workload)
    plan = plan_after_failure(before, request.cluster, lines)
    page, data, _ = page_of(request, plan)
    assert len(data["rows"]) == MAX_SLOTS
    assert [row["slot"] for row in data["rows"][:8]] == list(range(496, 504))
    assert "256 slots" in Checker(page).text
    assert len(page) < 400_000
