"""The way from one plan to another: what travels, and memory while both layouts are there."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cluster import Cluster
from nep.planning.cost.memory import change_memory
from nep.planning.cost.profiles import PROFILES
from nep.planning.cost.workload import Workload
from nep.planning.layout import axes
from nep.planning.plan import Plan
from nep.planning.planner import lost_intervals, plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.search.changes import count_parts, find_change
from nep.planning.shapes import parameter_lines, preset
from tests.unit.planning.strategies import units_of

SHAPE = preset("debug")
LINES = parameter_lines(SHAPE)
WORKLOAD = Workload(global_batch_size=24, micro_batch_size=1, seq_len=128)


def _plans(num_slots: int, num_replicas: int, dying: tuple[int, ...]) -> tuple[Plan, Plan, Cluster]:
    cluster = Cluster.uniform(num_slots, 2)
    before = plan_from_scratch(cluster, LINES, num_replicas=num_replicas, global_batch_size=24)
    cluster = cluster.fail(dying)
    return before, plan_mirrors(plan_after_failure(before, cluster, LINES), cluster, LINES), cluster


def _parts(before: Plan, after: Plan, limit: int | None, *, in_parts: bool = True) -> int:
    limits = dict.fromkeys(after.slots, limit)
    return count_parts(before, after, lines=LINES, workload=WORKLOAD, memory_bytes=limits, in_parts=in_parts)


@given(st.integers(2, 8), st.integers(1, 2), st.data())
def test_all_at_once_takes_what_the_memory_model_says(num_slots: int, replicas: int, data: st.DataObject) -> None:
    before, after, _ = _plans(num_slots, replicas, (data.draw(st.integers(0, num_slots - 1)),))
    model = change_memory(before, after, shape=SHAPE, workload=WORKLOAD)
    peak = max(model.total(slot) for slot in after.slots)
    assert _parts(before, after, None) == _parts(before, after, peak) == 1
    assert _parts(before, after, peak, in_parts=False) == 1
    with pytest.raises(ValueError, match=r"needs \d+ bytes .* while old and new layout are both there"):
        _parts(before, after, peak - 1, in_parts=False)


def test_less_memory_takes_more_parts_until_one_axis_is_too_much() -> None:
    before, after, _ = _plans(4, 1, (1,))
    model = change_memory(before, after, shape=SHAPE, workload=WORKLOAD)
    peak = max(model.total(slot) for slot in after.slots)
    counts = [_parts(before, after, peak * percent // 100) for percent in (100, 95, 90, 85, 80, 75)]
    assert counts[0] == 1 and counts == sorted(counts) and counts[-1] > 1
    with pytest.raises(ValueError, match=r"slot \d+ needs \d+ bytes"):
        _parts(before, after, peak // 3)


def test_nothing_to_change_is_no_part_and_needs_nothing() -> None:
    before, _, cluster = _plans(4, 2, ())
    assert _parts(before, replace(before, number=2), 0) == 0
    change = find_change(
        before,
        before,
        cluster=cluster,
        lines=LINES,
        workload=WORKLOAD,
        hardware=PROFILES["h100-sxm"],
        memory_bytes=dict.fromkeys(before.slots, 0),
    )
    assert (change.moved_bytes, change.seconds, change.lost) == (0, 0.0, ())


@given(st.integers(3, 8), st.integers(1, 2), st.data())
def test_failed_slots_give_nothing_and_everybody_gets_what_is_missing(
    num_slots: int, replicas: int, data: st.DataObject
) -> None:
    dying = tuple(sorted(data.draw(st.sets(st.integers(0, num_slots - 1), min_size=1, max_size=2))))
    before, after, cluster = _plans(num_slots, replicas, dying)
    change = find_change(
        before,
        after,
        cluster=cluster,
        lines=LINES,
        workload=WORKLOAD,
        hardware=PROFILES["h100-sxm"],
        memory_bytes=dict.fromkeys(after.slots, None),
    )
    lost = {axis: tuple((lo, hi) for name, lo, hi in change.lost if name == axis) for axis in axes(LINES)}
    state = (before.owners, before.mirrors)
    for kind, wanted, had in (
        ("parameters", after.holders, (before.holders,)),
        ("state", after.owners, state),
        ("mirrors", after.mirrors, state),
    ):
        have: dict[tuple[str, int], set[int]] = {}
        for layout in had:
            for where, units in units_of(layout).items():
                have[where] = have.get(where, set()) | units
        for axis, lo, hi, src, dst in change.transfers[kind]:
            assert src not in dying and dst not in dying and src != dst
            assert not have.setdefault((axis, dst), set()) & set(range(lo, hi)), "sent twice, or there already"
            have[axis, dst] |= set(range(lo, hi))
        if kind == "parameters":  # its own master weight is a slot's parameter without a journey
            for layout in state:
                for where, units in units_of(layout).items():
                    have[where] = have.get(where, set()) | units
        for (axis, slot), units in units_of(wanted).items():
            missing = units - have.get((axis, slot), set())
            assert missing <= {unit for lo, hi in lost[axis] for unit in range(lo, hi)}
    expected = lost_intervals(before, cluster.live, LINES)
    assert list(change.lost) == expected and (len(dying) > 1 or not expected)
