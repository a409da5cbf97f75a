import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cluster import Cluster
from nep.planning.layout import Layout
from nep.planning.plan import Lane, Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.shapes import parameter_lines, preset
from nep.report.layouts import experts_text, layout_picture, layouts_before_after

LINES = parameter_lines(preset("debug"))  # 2 layers, 8 experts of 8 units


def make_plan(held: dict[int, tuple[tuple[int, int], ...]], replicas) -> Plan:
    """A plan whose slots hold these units of the experts of both layers, and nothing else."""
    slots = tuple(sorted(held))
    layout = Layout({f"layers.{layer}.experts": held for layer in range(2)})
    lanes = tuple(Lane(number, (slot,), 2) for number, members in enumerate(replicas) for slot in members)
    return Plan(
        number=5,
        slots=slots,
        replicas=tuple(map(tuple, replicas)),
        lanes=lanes,
        holders=layout,
        owners=Layout({}),
        mirrors=Layout({}),
        redundancy="none",
        speeds_ppm=(1_000_000,) * len(slots),
    )


def test_whole_experts_and_slices():
    plan = make_plan({0: ((0, 24), (56, 60)), 3: ((24, 56), (60, 64))}, [[0, 3]])
    assert layout_picture(plan, LINES, 58).splitlines() == [
        "layout 5: 2 slots, 1 replica",
        "layers 0-1: 8 experts",
        "         0    1    2    3    4    5    6    7",
        "replica 0, 4 sequences per step",
        "  slot 0 ████ ████ ████ ···· ···· ···· ···· ██·· 0-2 7:1/2",
        "  slot 3 ···· ···· ···· ████ ████ ████ ████ ··██ 3-6 7:1/2",
    ]


def test_a_column_that_is_held_in_part_is_shaded():
    # With two columns per expert one column is four units: a quarter, a half, three quarters of it.
    plan = make_plan({0: ((0, 1), (8, 10), (16, 19)), 1: ((1, 8), (10, 16), (19, 64))}, [[0, 1]])
    row = layout_picture(plan, LINES, 56).splitlines()[4]
    assert row == "  slot 0 ░· ▒· ▓· ·· ·· ·· ·· ·· 0:1/8 1:1/4 2:3/8"


def test_layers_that_are_cut_differently_are_drawn_apart_and_only_where_they_differ():
    held = {0: ((0, 32),), 1: ((32, 64),), 2: ((0, 64),)}
    other = {**held, 0: ((0, 16),), 1: ((16, 64),)}
    plan = make_plan(held, [[0, 1], [2]])
    layout = Layout({"layers.0.experts": held, "layers.1.experts": other})
    text = layout_picture(Plan(**{**vars(plan), "holders": layout}), LINES, 60)
    assert text.count("slot 0") == 2
    assert text.count("slot 2") == 1
    assert re.findall(r"layer.*experts", text) == ["layer 0: 8 experts", "layer 1: 8 experts"]
    assert "replica 1, 2 sequences per step: as above" in text


def test_more_experts_than_columns():
    row = layout_picture(make_plan({0: ((0, 32),), 1: ((32, 64),)}, [[0, 1]]), LINES, 17).splitlines()[4]
    assert row == "  slot 0 ██·· 0-3"


@given(
    num_slots=st.integers(2, 12),
    num_replicas=st.integers(1, 4),
    dead=st.integers(0, 11),
    width=st.integers(30, 200),
)
def test_every_plan_fits_the_width_and_shows_what_is_held(num_slots, num_replicas, dead, width):
    num_replicas = min(num_replicas, num_slots // 2)
    cluster = Cluster.uniform(num_slots, num_slots)
    plan = plan_from_scratch(cluster, LINES, num_replicas=num_replicas, global_batch_size=16)
    after = plan_after_failure(plan, cluster.fail([dead % num_slots]), LINES)
    for text in (layout_picture(after, LINES, width), layouts_before_after(plan, after, LINES, width)):
        assert max(map(len, text.splitlines())) <= width
        assert text == "\n".join(line.rstrip() for line in text.splitlines())
    drawn = {int(slot) for slot in re.findall(r"slot (\d+)", layout_picture(after, LINES, width))}
    assert drawn == set(after.slots)


def test_before_and_after_stand_side_by_side_row_by_row():
    cluster = Cluster.uniform(4, 4)
    plan = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=8)
    after = plan_after_failure(plan, cluster.fail([0, 1]), LINES)
    rows = layouts_before_after(plan, after, LINES, 100).splitlines()
    assert re.fullmatch(r"before +after", rows[0])
    assert re.fullmatch(r"layout 1: 4 slots, 2 replicas +layout 2: 2 slots, 1 replica", rows[1])
    assert re.search(r"replica 0, 4 sequences per step +replica gone", rows[4])
    assert re.search(r"slot 1 .*4-7 +slot 1 gone", rows[6])
    # The replica that is left has moved up; its row has not.
    assert re.search(r"replica 1, 4 sequences per step +replica 0, 8 sequences per step", rows[7])
    left, right = rows[8][:48].strip(), rows[8][48:].strip()
    assert left == right
    assert left.startswith("slot 2 ")


def test_a_narrow_terminal_gets_one_below_the_other():
    plan = make_plan({0: ((0, 64),), 1: ((0, 64),)}, [[0], [1]])
    after = make_plan({1: ((0, 64),)}, [[1]])
    blocks = layouts_before_after(plan, after, LINES, 60).split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == ["before", "after"]
    assert "  slot 0 gone" in blocks[1]


def test_units_without_a_mirror_are_told():
    cluster = Cluster.uniform(4, 4)
    plan = plan_from_scratch(cluster, LINES, num_replicas=1, global_batch_size=8)
    assert "without a mirror" not in layout_picture(plan, LINES)
    broken = cluster.fail([1])
    after = plan_after_failure(plan, broken, LINES)
    assert re.search(r"without a mirror: \d+\.\d% of the parameters", layout_picture(after, LINES))
    assert "without a mirror" not in layout_picture(plan_mirrors(after, broken, LINES), LINES)


@pytest.mark.parametrize(
    ("intervals", "text"),
    [
        ((), "-"),
        (((0, 16),), "0-1"),
        (((0, 8), (32, 40)), "0,4"),
        (((4, 12),), "0:1/2 1:1/2"),
        (((8, 16), (2, 4), (6, 8)), "1 0:1/2"),  # two slices of one expert
        (((0, 4), (4, 8)), "0"),  # that make it whole
    ],
)
def test_experts_text(intervals, text):
    assert experts_text(intervals, 8) == text
