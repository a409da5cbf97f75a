import hashlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cluster import Cluster
from nep.planning.layout import Layout
from nep.planning.plan import Lane, Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch
from nep.planning.validation import check_plan
from tests.unit.planning.strategies import debug_like_lines, layouts, line_list, units_of

LINES = debug_like_lines()


def _plan(num_slots: int = 4, num_replicas: int = 2) -> Plan:
    return plan_from_scratch(Cluster.uniform(num_slots, 2), LINES, num_replicas=num_replicas, global_batch_size=8)


def _two_slots(**changes: object) -> Plan:
    """A plan over one axis of four units, written by hand so that its digest depends on the format alone."""
    plan = Plan(
        number=3,
        slots=(0, 5),
        replicas=((0,), (5,)),
        lanes=(Lane(0, (0,), 2), Lane(1, (5,), 1)),
        holders=Layout({"a": {0: ((0, 4),), 5: ((2, 4), (0, 2))}}),
        owners=Layout({"a": {0: ((0, 3),), 5: ((3, 4),)}}),
        mirrors=Layout({"a": {5: ((0, 1),), 0: ((3, 4),)}}),
        redundancy="device",
        speeds_ppm=(1_000_000, 500_000),
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


@given(st.integers(1, 9), st.data())
def test_a_plan_survives_json_with_its_digest(num_slots: int, data: st.DataObject) -> None:
    plan = _plan(num_slots, data.draw(st.integers(1, min(3, num_slots))))
    text = plan.canonical_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.canonical_json() == text
    assert again.digest == plan.digest == hashlib.sha256(text.encode()).hexdigest()
    assert " " not in text
    # Indented and in another order it is still the same plan.
    assert Plan.from_json(json.dumps(json.loads(text), indent=2)).digest == plan.digest


def test_a_plan_read_back_leads_to_the_same_next_plan() -> None:
    """One slot plans from the plan it made, the next one from JSON: mappings are in another order there."""
    cluster = Cluster.uniform(11, 2)
    lines = debug_like_lines(num_layers=12)  # layers.10 sorts before layers.2
    plan = plan_from_scratch(cluster, lines, num_replicas=2, global_batch_size=8)
    again = Plan.from_json(plan.canonical_json())
    assert list(again.holders.cuts) != list(plan.holders.cuts)
    after = [plan_after_failure(one, cluster.fail([3, 9]), lines) for one in (plan, again)]
    assert after[0].canonical_json() == after[1].canonical_json()


def test_the_text_of_a_plan_is_stable() -> None:
    """A change of format changes this text; then SCHEMA has to change too."""
    plan = _two_slots()
    assert plan.canonical_json() == (
        '{"holders":{"a":{"0":[[0,4]],"5":[[2,4],[0,2]]}},'
        '"lanes":[{"num_sequences":2,"replica":0,"slots":[0]},{"num_sequences":1,"replica":1,"slots":[5]}],'
        '"mirrors":{"a":{"0":[[3,4]],"5":[[0,1]]}},"number":3,"owners":{"a":{"0":[[0,3]],"5":[[3,4]]}},'
        '"redundancy":"device","replicas":[[0],[5]],"schema":1,"slots":[0,5],"speeds_ppm":[1000000,500000]}'
    )
    assert plan.digest == "f9feb5c248107f780492f99f16427f67da0ddde5c642105f3f0633948159337a"


def test_every_field_is_in_the_digest() -> None:
    plan = _two_slots()
    others = [
        replace(plan, number=4),
        replace(plan, lanes=(Lane(0, (0,), 1), Lane(1, (5,), 2))),
        replace(plan, holders=Layout({"a": {0: ((0, 4),), 5: ((0, 4),)}})),
        replace(plan, owners=Layout({"a": {0: ((0, 4),)}})),
        replace(plan, mirrors=Layout({})),
        replace(plan, redundancy="host"),
        replace(plan, speeds_ppm=(1, 1)),
    ]
    assert len({one.digest for one in (plan, *others)}) == 1 + len(others)


def test_who_is_where() -> None:
    plan = _plan(5, 2)  # two, two and one slot a node
    assert plan.replicas == ((0, 1), (2, 3, 4))
    assert [plan.replica_of(slot) for slot in plan.slots] == [0, 0, 1, 1, 1]
    assert [plan.lanes[plan.lane_of(slot)].slots for slot in plan.slots] == [(slot,) for slot in plan.slots]
    assert plan.global_batch_size == 8
    with pytest.raises(ValueError, match=r"slot \(9\) is not of plan 1"):
        plan.replica_of(9)
    with pytest.raises(ValueError, match=r"slot \(9\) is not of plan 1"):
        plan.lane_of(9)


@given(st.data())
def test_unprotected_is_what_no_other_slot_mirrors(data: st.DataObject) -> None:
    num_units = {"b": data.draw(st.integers(1, 10)), "a": 5}
    slots = (0, 1, 2)
    plan = Plan(
        number=1,
        slots=slots,
        replicas=(slots,),
        lanes=tuple(Lane(0, (slot,), 1) for slot in slots),
        holders=Layout({}),
        owners=data.draw(layouts(num_units, slots, "partition")),
        mirrors=data.draw(layouts(num_units, slots)),
        redundancy="device",
        speeds_ppm=(1, 1, 1),
    )
    owners, mirrors = units_of(plan.owners), units_of(plan.mirrors)
    expected = [
        (axis, unit)
        for axis, count in num_units.items()
        for unit in range(count)
        for owner in slots
        if unit in owners.get((axis, owner), ())
        and not any(unit in mirrors.get((axis, slot), ()) for slot in slots if slot != owner)
    ]
    found = plan.unprotected(line_list(num_units))
    assert [(axis, unit) for axis, lo, hi in found for unit in range(lo, hi)] == expected


def test_other_formats_are_refused_with_a_sentence() -> None:
    value = json.loads(_two_slots().canonical_json())
    for text, message in (
        ("{", "must be JSON"),
        ("[1]", "another kind of file"),
        ("{}", "another kind of file"),
        (
            json.dumps({**value, "schema": 2}),
            r"schema \(2\) of the plan must be 1.*use the version that wrote",
        ),
        (json.dumps({"schema": "1"}), r"schema \('1'\)"),
        (json.dumps({**value, "colour": 1}), "colour is unknown; remove it"),
        (
            json.dumps({k: v for k, v in value.items() if k not in ("owners", "slots")}),
            "owners.*slots is missing",
        ),
        (json.dumps({**value, "replicas": [1, 2]}), "wrong form"),
        (json.dumps({**value, "lanes": [{"replica": 0}]}), "wrong form"),
        (json.dumps({**value, "owners": {"a": {"0": [[3, 1]]}}}), r"\[3, 1\) is no interval"),
        (json.dumps({**value, "number": 1.0}), "must be integers"),
    ):
        with pytest.raises(ValueError, match=message):
            Plan.from_json(text)


def test_a_plan_that_contradicts_itself_is_refused_with_all_reasons() -> None:
    cases = {
        r"slots \[5, 0\] must ascend": {"slots": (5, 0)},
        r"replicas .* must share out the slots .*lanes\[1\].slots \(5,\) must be of replica 1": {
            "replicas": ((0,), (0,))
        },
        r"lanes must share out": {"lanes": (Lane(0, (0,), 2),)},
        r"lanes\[1\].slots \(5,\) must be of replica 9": {"lanes": (Lane(0, (0,), 2), Lane(9, (5,), 1))},
        r"speeds_ppm \(1\) must be as many as slots \(2\); redundancy \('twice'\) must be one of": {
            "speeds_ppm": (1,),
            "redundancy": "twice",
        },
        r"redundancy \(none\) allows no mirrors": {"redundancy": "none"},
        r"owners names slots \[7\]": {"owners": Layout({"a": {7: ((0, 4),)}})},
        r"must be integers of at least 0": {"number": -1},
    }
    for message, changes in cases.items():
        with pytest.raises(ValueError, match=message):
            _two_slots(**changes)


def test_check_plan_accepts_what_the_planner_makes_and_names_every_fault() -> None:
    check_plan(_two_slots(), line_list({"a": 4}))
    check_plan(_plan(), LINES)
    broken = _two_slots(
        holders=Layout({"a": {0: ((0, 4),), 5: ((0, 2),)}}),
        owners=Layout({"a": {0: ((0, 3),), 5: ((2, 4),)}}),
        mirrors=Layout({"a": {0: ((2, 3),), 5: ((0, 3),)}, "z": {0: ((0, 1),)}}),
    )
    with pytest.raises(ValueError, match="plan 3: ") as caught:
        check_plan(broken, line_list({"a": 4}))
    for message in (
        "mirrors has axes ['z']",
        "replicas[1] holds [(0, 2)] of a and must hold [0, 4)",
        "owners of a must share out [0, 4), each unit once",
        "mirrors of a overlap",
        "slot 0 mirrors [(2, 3)] of a, which it owns",
        "slot 5 mirrors [(2, 3)] of a, which it owns",
    ):
        assert message in str(caught.value)
