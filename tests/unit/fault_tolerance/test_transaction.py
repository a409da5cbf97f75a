"""The rules of the step protocol, one by one. `test_step_model` explores what they do together."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.fault_tolerance import transaction
from nep.fault_tolerance.records import NO_LAYOUT, Decision, Progress
from nep.fault_tolerance.transaction import ProtocolViolation, TooEarly, decide

# A slot that has seen step 7 committed and applied it; one that only could have finished it.
AHEAD = Progress(
    slot=0,
    tx=7,
    applied=7,
    result=b"seven",
    result_slots=(0, 1, 2),
    layout=3,
    layout_digest="three",
    params_version=None,
)
BEHIND = Progress(
    slot=1,
    tx=6,
    applied=6,
    prepared=7,
    result=b"six",
    result_slots=(0, 1, 2),
    layout=3,
    layout_digest="three",
    params_version=6,
)
THIRD = replace(BEHIND, slot=2)


def posted(*records: Progress) -> dict[int, Progress]:
    """Records by slot."""
    return {record.slot: record for record in records}


def decided(*records: Progress, dead: tuple[int, ...] = (), **changes: object) -> Decision:
    """The decision for generation 5 of slots 0, 1 and 2 that loses nothing."""
    members = {record.slot for record in records} | set(dead)
    options = {"lost": lambda digest, slots: [], "plan": lambda digest, slots: f'{{"from":"{digest}"}}'}
    return decide(5, members, posted(*records), dead, **(options | changes))


# The decision.


@pytest.mark.parametrize("order", list(permutations([AHEAD, BEHIND, THIRD])))
def test_the_maximum_is_committed_whoever_decides(order: tuple[Progress, ...]) -> None:
    decision = decided(*order)
    assert (decision.committed, decision.result, decision.result_slots) == (7, b"seven", (0, 1, 2))
    assert decision.to_json() == decided(AHEAD, BEHIND, THIRD).to_json()


def test_what_only_the_dead_saw_is_not_committed() -> None:
    decision = decided(AHEAD, BEHIND, THIRD, dead=(0,))
    assert (decision.committed, decision.result, decision.members) == (6, b"six", (1, 2))


def test_a_decision_says_all_that_is_needed_later() -> None:
    decision = decided(replace(AHEAD, params_version=7), BEHIND, dead=(2,))
    assert decision.generation == 5 and decision.action == "continue" and decision.plan == '{"from":"three"}'
    assert (decision.layout, decision.layout_digest) == (3, "three")
    assert decision.params_versions == {0: 7, 1: 6}
    assert "2" in decision.reason
    assert decided(AHEAD, BEHIND, reason="drill").reason == "drill"


def test_survivors_more_than_a_step_apart_cannot_be() -> None:
    with pytest.raises(ProtocolViolation, match="slot 1 is not within one step of 8"):
        decided(replace(AHEAD, tx=8, applied=8), BEHIND)


def test_a_step_applied_that_nobody_saw_committed_cannot_be() -> None:
    with pytest.raises(ProtocolViolation, match="slot 0 is not within one step of 6"):
        decided(replace(AHEAD, tx=6, result=b"six"), BEHIND)


def test_two_results_of_one_step_cannot_be() -> None:
    with pytest.raises(ProtocolViolation, match="slot 1 has another result of step 7 than slot 0"):
        decided(AHEAD, replace(AHEAD, slot=1, result=b"other"))


def test_the_larger_layout_number_counts() -> None:
    received = replace(BEHIND, next_layout=4, next_digest="four")
    decision = decided(replace(AHEAD, layout=4, layout_digest="four"), received)
    assert (decision.layout, decision.layout_digest, decision.plan) == (4, "four", '{"from":"four"}')


def test_two_layouts_with_one_number_cannot_be() -> None:
    with pytest.raises(ProtocolViolation, match="slot 1 has another layout 3 than slot 0"):
        decided(AHEAD, replace(BEHIND, layout_digest="tres"))


def test_nothing_is_decided_before_all_have_posted_or_are_dead() -> None:
    with pytest.raises(TooEarly, match=r"slots \[2\]"):
        decide(5, {0, 1, 2}, posted(AHEAD, BEHIND), (), lost=lambda d, s: [], plan=lambda d, s: "")
    assert transaction.waiting_for((0, 1, 2), posted(AHEAD), {2}) == (1,)
    with pytest.raises(ProtocolViolation, match="no survivor"):
        decided(AHEAD, dead=(0,))


def test_a_checkpoint_is_decided_only_if_something_is_lost() -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []

    def lost(digest: str, slots: tuple[int, ...]) -> list[tuple[str, int, int]]:
        asked.append((digest, slots))
        return [("layers.0.experts", 4, 8)]

    decision = decided(BEHIND, THIRD, dead=(0,), lost=lost)
    assert decision.action == "checkpoint" and decision.plan is None
    assert decision.lost == (("layers.0.experts", 4, 8),)
    assert asked == [("three", (1, 2))]


def test_a_returner_is_a_member_that_holds_nothing() -> None:
    asked: list[tuple[int, ...]] = []
    decision = decided(AHEAD, BEHIND, returners=(4,), lost=lambda digest, slots: asked.append(slots) or [])
    assert decision.members == (0, 1, 4) and decision.returners == (4,)
    assert asked == [(0, 1)]
    progress = transaction.after_decision(transaction.join(4, decision), decision)
    assert (progress.tx, progress.applied, progress.result, progress.layout) == (7, 7, b"seven", NO_LAYOUT)
    assert not transaction.trusts_parameters(decision, 4)


def test_a_slot_that_the_layout_leaves_out_may_go() -> None:
    """Slot 0 is drained: layout 4 does not name it. Slot 2 has not seen the vote on that layout, and stays."""
    drained = replace(AHEAD, layout=4, layout_digest="four")
    mirror = replace(AHEAD, slot=1, layout=4, layout_digest="four", params_version=7)
    late = replace(AHEAD, slot=2, next_layout=4, next_digest="four")
    named = {"three": (0, 1, 2), "four": (1, 2)}
    decision = decided(drained, mirror, late, named=named.__getitem__, incarnations={0: 3, 2: 2})
    assert (decision.members, decision.leavers, decision.returners) == ((1, 2), (0,), ())
    assert decision.params_versions == {1: 7, 2: None} and decision.incarnations == {2: 2}
    assert decision.reason == "slots [0] are drained"
    assert Decision.from_json(decision.to_json()) == decision
    # Nobody else saw the vote: the layout before counts on it.
    others = [replace(post, layout=3, layout_digest="three") for post in (drained, mirror, late)]
    assert decided(*others, named=named.__getitem__).leavers == ()


def test_who_returns_is_told_the_layout_it_does_not_know() -> None:
    origin = {"three": "plan three"}.__getitem__
    decision = decided(AHEAD, BEHIND, dead=(2,), returners=(2,), origin=origin, request=9, incarnations={1: 4, 2: 2})
    assert (decision.origin, decision.request, decision.incarnations) == ("plan three", 9, {1: 4, 2: 2})
    assert decision.reason == "slots [2] are dead, slots [2] return"
    assert decided(AHEAD, BEHIND, dead=(2,), origin=origin).origin is None


def test_a_returner_holds_nothing_until_its_first_layout_is_decided() -> None:
    # The layout may still name it from before it died.
    returned = transaction.join(2, decided(replace(AHEAD, layout=4, layout_digest="four")))
    again = decided(replace(AHEAD, layout=4, layout_digest="four"), returned)
    assert again.returners == (2,)
    received = transaction.after_receive(returned, 5, "five")
    assert decided(replace(AHEAD, layout=4, layout_digest="four"), received).returners == (2,)
    after = decided(replace(AHEAD, layout=5, layout_digest="five"), received)
    assert after.returners == () and transaction.settle_layout(received, after) == "adopt"


# After the decision.


def test_who_is_behind_rolls_forward_with_the_stored_result() -> None:
    decision = decided(AHEAD, BEHIND)
    assert transaction.must_apply(BEHIND, decision)
    after = transaction.after_decision(BEHIND, decision)
    assert (after.tx, after.applied, after.prepared, after.result) == (7, 7, None, b"seven")
    assert after.params_version is None, "its holders' parameters are still of step 6"


def test_who_is_there_stays_there_and_drops_its_sums() -> None:
    decision = decided(BEHIND, THIRD)
    assert not transaction.must_apply(BEHIND, decision)
    after = transaction.after_decision(BEHIND, decision)
    assert after == replace(BEHIND, prepared=None)


def test_a_slot_that_saw_the_vote_but_did_not_apply_rolls_forward() -> None:
    seen = replace(BEHIND, tx=7, result=b"seven")
    assert transaction.must_apply(seen, decided(seen, THIRD))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"applied": 8}, "cannot get to step 7"),
        ({"applied": 5}, "cannot get to step 7"),
        ({"prepared": None}, "must roll to step 7 without its sums"),
        ({"prepared": 6}, "must roll to step 7 without its sums"),
    ],
)
def test_a_roll_forward_that_cannot_be_is_refused(change: dict[str, int | None], message: str) -> None:
    with pytest.raises(ProtocolViolation, match=f"slot 1 {message}"):
        transaction.must_apply(replace(BEHIND, **change), decided(AHEAD, BEHIND))


def test_a_decision_behind_a_slot_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="slot 0 knows more than C = 6"):
        transaction.record_committed(AHEAD, decided(BEHIND, THIRD))


def test_a_received_layout_is_adopted_or_dropped() -> None:
    received = replace(BEHIND, prepared=None, next_layout=4, next_digest="four", params_version=None)
    drop = decided(received, THIRD)
    assert transaction.settle_layout(received, drop) == "keep"
    assert transaction.after_decision(received, drop).next_layout is None
    adopt = decided(received, replace(THIRD, layout=4, layout_digest="four"))
    assert transaction.settle_layout(received, adopt) == "adopt"
    after = transaction.after_decision(received, adopt)
    assert (after.layout, after.layout_digest, after.next_layout, after.params_version) == (
        4,
        "four",
        None,
        6,
    )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"next_layout": 5, "next_digest": "five"},
        {"next_layout": 4, "next_digest": "quatre"},
        {"layout": 5, "layout_digest": "five"},
    ],
)
def test_a_layout_that_a_slot_does_not_have_is_refused(change: dict[str, object]) -> None:
    decision = decided(replace(THIRD, layout=4, layout_digest="four"))
    with pytest.raises(ProtocolViolation, match="slot 1 cannot reach layout 4"):
        transaction.settle_layout(replace(BEHIND, **change), decision)


def test_a_received_layout_of_an_older_step_is_refused() -> None:
    received = replace(BEHIND, next_layout=4, next_digest="four")
    decision = decided(replace(AHEAD, layout=4, layout_digest="four"))
    with pytest.raises(ProtocolViolation, match="received a layout of another step"):
        transaction.settle_layout(received, decision)


@pytest.mark.parametrize(("version", "trusted"), [(7, True), (6, False), (None, False)])
def test_parameters_are_trusted_only_at_the_decided_step(version: int | None, trusted: bool) -> None:
    decision = decided(replace(AHEAD, params_version=version), BEHIND)
    assert transaction.trusts_parameters(decision, 0) is trusted


@pytest.mark.parametrize(("owner", "mirror", "source"), [(0, 1, 0), (2, 1, 1), (1, None, 1), (4, 0, 0), (0, 4, 0)])
def test_state_comes_from_the_owner_else_from_the_mirror(owner: int, mirror: int | None, source: int) -> None:
    decision = decided(AHEAD, BEHIND, dead=(2,), returners=(4,))
    assert transaction.state_source(owner, mirror, decision) == source


@pytest.mark.parametrize(("owner", "mirror"), [(2, None), (2, 3), (4, 2), (4, None)])
def test_state_without_a_source_cannot_be(owner: int, mirror: int | None) -> None:
    with pytest.raises(ProtocolViolation, match="lost both"):
        transaction.state_source(owner, mirror, decided(AHEAD, BEHIND, dead=(2,), returners=(4,)))


# The step.


def test_a_step_from_the_sums_to_the_return() -> None:
    start = replace(AHEAD, params_version=7)
    prepared = transaction.after_prepare(start, 8)
    assert not transaction.may_vote(start, 8) and transaction.may_vote(prepared, 8)
    voted = transaction.after_vote(prepared, 8, b"eight", (0, 1))
    assert (voted.tx, voted.applied, voted.prepared, voted.result, voted.result_slots) == (
        8,
        7,
        8,
        b"eight",
        (0, 1),
    )
    applied = transaction.after_apply(voted)
    assert (applied.applied, applied.prepared, applied.params_version) == (8, None, None)
    assert transaction.after_return(applied).params_version == 8


RULES_OF_ORDER: list[tuple[str, Callable[[], Progress]]] = [
    ("prepares step 8", lambda: transaction.after_prepare(BEHIND, 8)),
    ("prepares step 7", lambda: transaction.after_prepare(AHEAD, 7)),
    (
        "amid a change of layout",
        lambda: transaction.after_prepare(transaction.after_receive(AHEAD, 4, "four"), 8),
    ),
    ("sees a vote on step 8 unprepared", lambda: transaction.after_vote(AHEAD, 8, b"", ())),
    ("not the next one", lambda: transaction.after_apply(AHEAD)),
    ("not the next one", lambda: transaction.after_apply(BEHIND)),
    ("sums it does not hold", lambda: transaction.after_apply(replace(BEHIND, tx=7, prepared=None))),
    ("which is no later one", lambda: transaction.after_receive(AHEAD, 3, "three")),
    ("between two steps", lambda: transaction.after_receive(replace(BEHIND, tx=7), 4, "four")),
    ("has not received", lambda: transaction.after_adopt(AHEAD)),
]


@pytest.mark.parametrize(("message", "act"), RULES_OF_ORDER)
def test_a_step_out_of_order_is_refused(message: str, act: Callable[[], Progress]) -> None:
    with pytest.raises(ProtocolViolation, match=message):
        act()


# As JSON.

NUMBERS = st.none() | st.integers(0, 2**40)
SLOTS = st.lists(st.integers(0, 10**6), max_size=4, unique=True).map(lambda slots: tuple(sorted(slots)))

progress_st = st.builds(
    Progress,
    slot=st.integers(0, 10**6),
    tx=st.integers(0, 2**40),
    applied=st.integers(0, 2**40),
    prepared=NUMBERS,
    result=st.none() | st.binary(max_size=200),
    result_slots=SLOTS,
    layout=st.integers(0, 2**40),
    layout_digest=st.text(max_size=70),
    next_layout=NUMBERS,
    next_digest=st.none() | st.text(max_size=70),
    params_version=NUMBERS,
    times_s=st.dictionaries(st.text(max_size=5), st.floats(0, 2e9), max_size=3),
)
decision_st = st.builds(
    Decision,
    generation=st.integers(1, 2**20),
    members=SLOTS,
    returners=SLOTS,
    committed=st.integers(0, 2**40),
    result=st.none() | st.binary(max_size=200),
    result_slots=SLOTS,
    layout=st.integers(0, 2**40),
    layout_digest=st.text(max_size=70),
    action=st.sampled_from(["continue", "checkpoint"]),
    plan=st.none() | st.text(max_size=50),
    params_versions=st.dictionaries(st.integers(0, 10**6), NUMBERS, max_size=4),
    reason=st.text(max_size=20),
    lost=st.lists(st.tuples(st.text(max_size=5), st.integers(0), st.integers(0)), max_size=3).map(tuple),
)


@given(progress_st)
def test_progress_survives_json(progress: Progress) -> None:
    read = Progress.from_json(progress.to_json())
    assert read == progress and read.times_s == progress.times_s
    assert hash(read) == hash(progress)


@given(decision_st)
def test_a_decision_survives_json(decision: Decision) -> None:
    read = Decision.from_json(decision.to_json())
    assert read == decision and hash(read) == hash(decision)
    assert read.to_json() == decision.to_json(), "everybody must be able to compute the same bytes"


def test_json_is_canonical() -> None:
    text = AHEAD.to_json()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert json.loads(text)["result"] == b"seven".hex()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, r"Progress.schema \(2\) must be 1"),
        ({"schema": None}, "schema"),
        ({"color": "red"}, r"unknown or missing fields \['color'\]"),
        ({"tx": ...}, r"unknown or missing fields \['tx'\]"),
    ],
)
def test_foreign_json_is_refused(change: dict[str, object], message: str) -> None:
    document = json.loads(AHEAD.to_json()) | change
    text = json.dumps({name: value for name, value in document.items() if value is not ...})
    with pytest.raises(ValueError, match=message):
        Progress.from_json(text)


@pytest.mark.parametrize("text", ["", "[]", "7", "{"])
def test_text_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Decision.from_json(text)
