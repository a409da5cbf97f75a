"""The step protocol, explored: no interleaving breaks it, and every rule is needed."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from nep.fault_tolerance import transaction
from nep.fault_tolerance.records import Progress
from nep.testing.step_model import DROPPABLE, StepModel, explore
from nep.testing.step_model.__main__ import main
from nep.testing.step_model.world import LEAVE, Event, Slot, World, move

CHECKPOINTS_OF_DRAIN = 0


def test_nothing_breaks_when_nothing_fails() -> None:
    outcome = explore(StepModel(3, 2))
    assert outcome.violation is None and outcome.complete
    assert outcome.ends == 1 and outcome.checkpoints == 0


@pytest.mark.parametrize("remirror", [True, False])
def test_one_crash_at_any_point_loses_nothing(remirror: bool) -> None:
    outcome = explore(StepModel(3, 2, crashes=1, remirror=remirror))
    assert outcome.violation is None, outcome.trace
    assert outcome.complete and outcome.states > 10_000
    assert outcome.checkpoints == 0, "with one crash every interval has an owner or a mirror"


def test_two_crashes_need_a_checkpoint_only_when_owner_and_mirror_died() -> None:
    # That each checkpoint was needed is checked at every decision.
    outcome = explore(StepModel(3, 2, crashes=2))
    assert outcome.violation is None, outcome.trace
    assert outcome.complete and outcome.checkpoints > 0 and outcome.ends > 100


def _crash(model: StepModel, world: World, slot: int) -> World:
    label = f"slot {slot} crashes"
    return _after(world, next(event for event in model.events(world) if event.label.startswith(label)))


def _run(model: StepModel, world: World, last_step: int) -> World | None:
    """One way to go on without crashes until all that live are beyond a step; None: with a checkpoint."""
    while any(slot.alive and (slot.posted or slot.at[0] <= last_step) for slot in world.slots):
        if model.is_over(world):
            break
        event = next(event for event in model.events(world) if event.progress)
        if event.checkpoint:
            return None
        world = _after(world, event)
    return world


def _after(world: World, event: Event) -> World:
    slots = list(world.slots)
    for index, slot in event.slots:
        slots[index] = slot
    return World(tuple(slots), event.store or world.store)


@pytest.mark.parametrize("second", [1, 2])
def test_restored_mirrors_save_the_checkpoint(second: int) -> None:
    def ends(remirror: bool) -> World | None:
        model = StepModel(3, 3, crashes=2, remirror=remirror)
        damaged = _run(model, _crash(model, model.initial(), 0), last_step=2)
        assert damaged is not None and damaged.store.decision.generation == 2
        return _run(model, _crash(model, damaged, second), last_step=3)

    finished = ends(remirror=True)
    assert finished is not None and len(finished.slots[3 - second].history) == 3
    # Slot 2 owns the interval that slot 0 mirrored.
    assert (ends(remirror=False) is None) == (second == 2)


def test_slots_may_come_back() -> None:
    outcome = explore(StepModel(3, 1, crashes=1, returns=1))
    assert outcome.violation is None, outcome.trace
    assert outcome.complete and outcome.checkpoints == 0


def test_a_drained_slot_leaves_and_one_crash_anywhere_loses_nothing() -> None:
    outcome = explore(StepModel(3, 2, crashes=1, drain=True))
    assert outcome.violation is None, outcome.trace
    assert outcome.complete and outcome.ends > 0
    assert outcome.checkpoints == CHECKPOINTS_OF_DRAIN


class _LeaveAtOnce(StepModel):
    """The drained slot leaves when it has seen the vote, without waiting for the decision."""

    def fail(self, world: World, r: int, slot: Slot) -> Event:
        if slot.at[1] == LEAVE and r in self.drained(slot):
            return move(r, slot.dead(), "leaves")
        return super().fail(world, r, slot)


def test_a_drained_slot_must_wait_for_the_decision() -> None:
    outcome = explore(_LeaveAtOnce(3, 2, crashes=1, drain=True))
    assert outcome.checkpoints > CHECKPOINTS_OF_DRAIN


def test_a_false_alarm_at_any_point_loses_nothing() -> None:
    outcome = explore(StepModel(3, 1, alarms=1))
    assert outcome.violation is None, outcome.trace
    assert outcome.complete and outcome.checkpoints == 0


@pytest.mark.parametrize("rule", DROPPABLE)
def test_every_rule_is_needed(rule: str) -> None:
    mutant = DROPPABLE[rule]
    outcome = explore(mutant(*mutant.shown_by))
    assert outcome.violation is not None
    assert 0 < len(outcome.trace) < 60


def _minimum(records: Mapping[int, Progress]) -> tuple[int, bytes | None, tuple[int, ...]]:
    oldest = min(records.values(), key=lambda progress: progress.tx)
    return oldest.tx, oldest.result, oldest.result_slots


def _smallest(records: Mapping[int, Progress]) -> tuple[int, str]:
    oldest = min(records.values(), key=lambda progress: progress.layout)
    return oldest.layout, oldest.layout_digest


BROKEN: dict[str, Any] = {
    "choose_committed": _minimum,
    "choose_layout": _smallest,
    "settle_layout": lambda progress, decision: "keep",
    "must_apply": lambda progress, decision: False,
    "record_committed": lambda progress, decision: progress,
    "trusts_parameters": lambda decision, slot: True,
    "state_source": lambda owner, mirror, decision: owner,
    "waiting_for": lambda members, records, dead: (),
    "holds_nothing": lambda progress, layout, digest: False,
    "has_left": lambda progress, named: False,
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_rules_explored_are_those_of_the_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks a function of `transaction` itself: the model must find out."""
    monkeypatch.setattr(transaction, name, BROKEN[name])
    needs_returner = name == "holds_nothing"
    model = StepModel(3, 1, crashes=2 if needs_returner else 1, alarms=1 - needs_returner, returns=1)
    if name == "has_left":
        model = StepModel(3, 2, drain=True)
    outcome = explore(model)
    assert outcome.violation is not None


@pytest.mark.parametrize(
    ("ranks", "steps", "crashes", "alarms", "returns"),
    [(3, 2, 2, 1, 0), (3, 2, 1, 1, 0), (4, 2, 1, 0, 0), (3, 2, 2, 0, 1), (3, 3, 2, 0, 0), (4, 1, 2, 0, 0)],
)
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_larger_explorations(ranks: int, steps: int, crashes: int, alarms: int, returns: int) -> None:
    outcome = explore(StepModel(ranks, steps, crashes, alarms, returns))
    assert outcome.violation is None, outcome.trace
    assert outcome.complete and outcome.ends > 0
    assert (outcome.checkpoints > 0) == (crashes > 1)


def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "1", "--crashes", "0", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["states"] > 100 and outcome["violation"] is None and outcome["complete"]


def test_the_command_prints_a_counterexample(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "1", "--drop", "reuse-before-apply"]) == 1
    printed = capsys.readouterr().out
    assert "crashes in" in printed and "violation: slot" in printed


def test_the_command_says_that_it_gave_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--max-states", "50"]) == 1
    assert "not everything" in capsys.readouterr().out


@pytest.mark.parametrize("option", [("--ranks", "1"), ("--ranks", "7"), ("--steps", "0"), ("--alarms", "-1")])
def test_the_command_refuses_bad_input(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(option)
    assert stop.value.code == 2
    assert option[1] in capsys.readouterr().err
