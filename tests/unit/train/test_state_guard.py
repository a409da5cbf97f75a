"""What a trainer does about corruptions: each is told once, and one request is posted for the job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nep.fault_tolerance.corruption import Corruption
from nep.fault_tolerance.history import History
from nep.fault_tolerance.integrity import Integrity
from nep.fault_tolerance.requests import Request, Requests
from nep.testing.memory_board import MemoryBoard
from nep.train.state_guard import StateGuard


class Connections:
    """All slots use one store."""

    def __init__(self, store: MemoryBoard):
        self.store, self.lent = store, 0

    def take(self) -> MemoryBoard:
        self.lent += 1
        return self.store

    def give_back(self, store: MemoryBoard) -> None:
        assert store is self.store
        self.lent -= 1


class Slot:
    """A trainer with its guard."""

    def __init__(self, slot: int, store: MemoryBoard, found: list[Corruption], members: tuple[int, ...] = (0, 1, 2)):
        self.told: list[Corruption] = []
        run: Any = SimpleNamespace(
            slot=slot,
            integrity=Integrity(),
            history=History(corruptions=found),
            requests=Requests(),
            connections=Connections(store),
            current=SimpleNamespace(number=1, members=members),
            state=None,
        )
        self.run = run
        hooks = SimpleNamespace(on_corruption=lambda trainer, one: self.told.append(one))
        trainer: Any = SimpleNamespace(run_state=run, hooks=hooks, plan=SimpleNamespace(replica_of=lambda slot: 0))
        self.guard = StateGuard(trainer)

    def before_step(self, step: int) -> None:
        self.guard.before_step(step)
        if self.guard._asking is not None:
            self.guard._asking.join(10)
        self.run.requests.read(self.run.connections.store)


def corruption(step: int, slot: int | None, action: str = "drain") -> Corruption:
    return Corruption(step=step, slot=slot, part="owned", action=action, why="so")


def posted(store: MemoryBoard) -> list[Request]:
    requests = Requests()
    requests.read(store)  # type: ignore[arg-type]
    return requests.known


def test_one_request_for_the_job_and_never_again() -> None:
    store, found = MemoryBoard(), [corruption(4, 2), corruption(4, 2), corruption(4, 1, "resync"), corruption(4, None)]
    slots = [Slot(slot, store, found) for slot in (0, 1)]
    for step in (4, 5, 6):
        for slot in slots:
            slot.before_step(step)
    assert [(one.kind, one.slot) for one in posted(store)] == [("drain", 2)]
    assert all(slot.told == found for slot in slots)
    late = Slot(0, store, found)  # comes back later: no news, and the request is there
    late.before_step(9)
    assert late.told == [] and len(posted(store)) == 1


@pytest.mark.parametrize(("members", "number"), [((0, 1, 2), 0), ((1, 2), 1)])
def test_another_slot_asks_if_the_first_is_gone(members: tuple[int, ...], number: int) -> None:
    store = MemoryBoard()
    store.compare_and_set("corruption/4/2", "", "0")  # slot 0 meant to, and has not
    Slot(1, store, [corruption(4, 2)], members).before_step(5)
    assert len(posted(store)) == number


def test_who_has_left_is_not_asked() -> None:
    store = MemoryBoard()
    Slot(0, store, [corruption(4, 2)], members=(0, 1)).before_step(5)
    assert posted(store) == []


def test_a_store_that_fails_gets_its_connection_back_and_is_asked_again() -> None:
    def fail(key: str) -> None:
        failed.append(key)
        if len(failed) == 1:
            raise RuntimeError("reset")

    failed: list[str] = []
    slot = Slot(0, MemoryBoard(fail), [corruption(4, 2)])
    for step in (5, 6):
        slot.before_step(step)
        assert slot.run.connections.lent == 0
        assert len(posted(slot.run.connections.store)) == (step == 6)
