"""Pinned degrees: what is meant by EP8, EP4xETP2, TP2xEP4 and TP8, also where it does not come out even."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cluster import Cluster
from nep.planning.degrees import Degrees
from nep.planning.intervals import count_units, normalize
from nep.planning.layout import LineKind, axis_lines
from nep.planning.planner import plan_after_failure, plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from nep.planning.validation import check_runnable

SHAPE = preset("debug")
LINES = parameter_lines(SHAPE)
EXPERTS = {axis: line for axis, line in axis_lines(LINES).items() if line.kind is LineKind.EXPERTS}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("EP8", Degrees(tp=1, ep=8, etp=1)),
        ("EP4xETP2", Degrees(tp=1, ep=4, etp=2)),
        ("TP2xEP4", Degrees(tp=2, ep=4, etp=2)),
        ("TP8", Degrees(tp=8, ep=1, etp=8)),
        ("ep4Xetp1xtp2", Degrees(tp=2, ep=4, etp=1)),
    ],
)
def test_the_common_shapes(text: str, expected: Degrees) -> None:
    degrees = Degrees.parse(text)
    assert degrees == expected
    assert Degrees.parse(str(degrees)) == degrees
    slots = 8 if degrees.replica_slots == 8 else 4
    plan = plan_from_scratch(
        Cluster.uniform(2 * slots, 4), LINES, num_replicas=1, global_batch_size=16, degrees=degrees
    )
    check_runnable(plan, LINES, slots=range(2 * slots), global_batch_size=16)
    assert [len(replica) for replica in plan.replicas] == [slots, slots]
    assert {len(lane.slots) for lane in plan.lanes} == {degrees.tp}
    for axis, line in EXPERTS.items():
        size = line.units_per_expert
        assert size is not None
        for replica in plan.replicas:
            for expert in range(SHAPE.num_experts):
                held = [
                    sum(max(0, min(hi, (expert + 1) * size) - max(lo, expert * size)) for lo, hi in intervals)
                    for slot in replica
                    for intervals in [plan.holders.intervals(axis, slot)]
                ]
                assert sorted(held, reverse=True) == [size // degrees.etp] * degrees.etp + [0] * (slots - degrees.etp)


@given(
    ep=st.integers(1, 5),
    etp=st.integers(1, 4),
    num_experts=st.integers(1, 9),
    size=st.integers(1, 7),
    speeds=st.lists(st.integers(1, 3), min_size=20, max_size=20),
)
def test_whatever_does_not_divide_is_held_once(
    ep: int, etp: int, num_experts: int, size: int, speeds: list[int]
) -> None:
    degrees = Degrees(ep=ep, etp=etp)
    slots = range(ep * etp)
    held = degrees.cut_experts(slots, dict(enumerate(speeds)), num_experts, size)
    everything = [interval for intervals in held for interval in intervals]
    assert normalize(everything) == ((0, num_experts * size),)
    assert count_units(everything) == num_experts * size
    if len({speeds[slot] for slot in slots}) == 1:
        groups = [sum(count_units(held[g * etp + place]) for place in range(etp)) for g in range(ep)]
        assert max(groups) - min(groups) <= 1


def test_a_job_that_began_with_degrees_goes_on_without_them() -> None:
    cluster = Cluster.uniform(8, 4)
    plan = plan_from_scratch(cluster, LINES, num_replicas=1, global_batch_size=16, degrees=Degrees.parse("EP4xETP2"))
    after = plan_after_failure(plan, cluster.fail([3]), LINES)
    check_runnable(after, LINES, slots=after.slots, global_batch_size=16)
    assert len(after.slots) == 7


@pytest.mark.parametrize("text", ["", "EP", "EP0", "DP4", "EP4xEP2", "EP4*ETP2", "8"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as EP8"):
        Degrees.parse(text)


def test_lanes_must_fit_into_the_replica_and_replicas_into_the_job() -> None:
    with pytest.raises(ValueError, match=r"multiple of tp \(4\)"):
        Degrees.parse("TP4xEP2xETP1")
    with pytest.raises(ValueError, match="needs 8 slots for each replica and there are 12"):
        plan_from_scratch(
            Cluster.uniform(12, 4), LINES, num_replicas=1, global_batch_size=16, degrees=Degrees.parse("EP8")
        )
