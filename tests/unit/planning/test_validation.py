"""What a plan from a file may have wrong; plans out of the planner are checked in its own tests."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from nep.planning.cluster import Cluster
from nep.planning.layout import Layout
from nep.planning.plan import Lane, Plan
from nep.planning.planner import plan_from_scratch
from nep.planning.validation import check_plan, check_runnable
from tests.unit.planning.strategies import debug_like_lines

LINES = debug_like_lines(num_experts=4, units_per_expert=4)
EXPERTS = "layers.0.experts"


def _plan(num_slots: int = 4, num_replicas: int = 2, lane_slots: int = 1) -> Plan:
    cluster = Cluster.uniform(num_slots, 4)
    return plan_from_scratch(cluster, LINES, num_replicas=num_replicas, global_batch_size=8, lane_slots=lane_slots)


def _held(plan: Plan, axis: str, slot: int, *intervals: tuple[int, int]) -> Plan:
    """The plan with other intervals of an axis on a slot."""
    cuts = {name: dict(by_slot) for name, by_slot in plan.holders.cuts.items()}
    cuts[axis][slot] = intervals
    return replace(plan, holders=Layout(cuts))


@pytest.mark.parametrize("lane_slots", [1, 2])
def test_what_the_planner_makes_can_be_run(lane_slots: int) -> None:
    check_runnable(_plan(lane_slots=lane_slots), LINES, slots=range(4), global_batch_size=8)


def test_slots_and_batch_must_be_those_of_the_job() -> None:
    with pytest.raises(
        ValueError, match=r"slots \[0, 1, 2, 3\] must be \[0, 1, 2, 3, 4\], all that this job runs on"
    ) as error:
        check_runnable(_plan(), LINES, slots=range(5), global_batch_size=16)
    assert "global_batch_size (8) must be that of the job (16)" in str(error.value)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda plan: _held(plan, EXPERTS, 0, (0, 9)),
            r"replica 0 \(slots \[0, 1\]\) must hold each copy of an expert on one slot, whole; expert 2 is not",
        ),
        (
            lambda plan: _held(plan, EXPERTS, 0, (4, 8), (0, 4)),
            r"slots \[0\] store layers.0.experts in an order that training does not use",
        ),
        (
            lambda plan: _held(plan, "layers.1.whole", 3),
            r"lane 3 \(slots \[3\]\) must have all on each slot of layers.1.whole",
        ),
        (
            lambda plan: _held(plan, "embedding", 2, (0, 30)),
            r"lane 2 \(slots \[2\]\) must hold all 32 units of embedding",
        ),
    ],
)
def test_what_the_layer_cannot_compute_with_is_named(break_it: Callable[[Plan], Plan], message: str) -> None:
    broken = break_it(_plan())
    check_plan(broken, LINES)
    with pytest.raises(ValueError, match=message):
        check_runnable(broken, LINES, slots=range(4), global_batch_size=8)


def test_a_query_head_needs_its_kv_head_in_its_slot() -> None:
    plan = _plan(lane_slots=2)
    assert plan.lanes[0] == Lane(0, (0, 1), 4)
    assert plan.holders.by_slot("layers.0.kv_heads")[0] == ((0, 1),)
    broken = _held(_held(plan, "layers.0.kv_heads", 0, (1, 2)), "layers.0.kv_heads", 1, (0, 1))
    with pytest.raises(ValueError, match=r"slot 0 has query heads \[\(0, 2\)\] and lacks \[\(0, 1\)\] of layers.0.kv"):
        check_runnable(broken, LINES, slots=range(4), global_batch_size=8)


def test_a_plan_for_another_model_is_not_taken_apart_line_by_line() -> None:
    other = debug_like_lines(num_layers=9, num_experts=6, vocab_size=64)
    with pytest.raises(ValueError, match=r"and \d+ more of the kind; is it a plan for another model\?$") as error:
        check_runnable(_plan(), other, slots=range(4), global_batch_size=8)
    assert len(str(error.value)) < 1000
