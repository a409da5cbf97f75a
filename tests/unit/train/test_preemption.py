"""A slot that is to leave says so without waiting for the control store."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from nep.fault_tolerance.control_store import exit_key
from nep.fault_tolerance.requests import Request, Requests, drained, kept_away
from nep.testing.memory_board import MemoryBoard
from nep.train import preemption
from nep.train.preemption import Preemption


class Slot:
    """A trainer that has got a notice.

    Args:
        board: the store.
        known: requests before.
    """

    def __init__(self, board: MemoryBoard, slot: int = 2, known: tuple[Request, ...] = ()):
        self.lines: list[str] = []
        self.back, self.board = 0, board
        self.signals: Any = SimpleNamespace(noticed=True)
        requests = Requests()
        for one in known:
            requests.post(board, one)  # type: ignore[arg-type]
        self.run: Any = SimpleNamespace(
            slot=slot,
            job=SimpleNamespace(incarnation=3),
            requests=requests,
            considered=0,
            state=SimpleNamespace(plan=SimpleNamespace(slots=(0, 1, 2))),
            connections=SimpleNamespace(take=lambda: board, give_back=self._returned),
        )
        self.notice = Preemption(self.signals, None, self.run, True, self.lines.append)

    def _returned(self, connection: MemoryBoard) -> None:
        self.back += 1

    def tell(self, wait_s: float = 10.0) -> None:
        """One boundary, and the thread that it has started."""
        self.notice.tell()
        if self.notice._asking is not None:
            self.notice._asking.join(wait_s)


def test_the_slot_is_drained_once() -> None:
    slot = Slot(MemoryBoard())
    for _ in range(3):
        slot.tell()
    (asked,) = slot.run.requests.known
    assert (asked.kind, asked.slot, asked.incarnation) == ("drain", 2, 3), "only this trainer: the node may come back"
    assert kept_away([asked]) == {}
    assert slot.lines == ["preemption notice: this slot leaves after the next step"] and slot.back == 1


def test_who_is_drained_already_does_not_ask_again() -> None:
    slot = Slot(MemoryBoard(), known=(Request(kind="drain", slot=2),))
    slot.tell()
    assert len(slot.run.requests.known) == 1


def test_sick_hardware_stays_away_whichever_trainer_comes() -> None:
    slot = Slot(MemoryBoard())
    slot.signals.noticed = False
    slot.notice._health = SimpleNamespace(complaint="ECC errors")  # type: ignore[assignment]
    slot.tell()
    assert kept_away(slot.run.requests.known) == {2: "its health check"}


def test_without_a_notice_nothing_is_asked() -> None:
    slot = Slot(MemoryBoard())
    slot.signals.noticed = False
    slot.tell()
    assert slot.notice._asking is None and not slot.notice.ends_job()


def everybody_leaves(*more: Request) -> Slot:
    """Slots 0 and 1 are drained, slot 2 gets the notice: with that all that train shall leave."""
    return Slot(MemoryBoard(), known=(*(Request(kind="drain", slot=slot) for slot in (0, 1)), *more))


def test_a_job_that_all_leave_ends_only_if_nobody_waits() -> None:
    alone = everybody_leaves()
    assert not alone.notice.ends_job(), "slot 2 stays so far"
    alone.tell()
    assert alone.notice.ends_job()
    spare = Request(kind="join", slot=3, incarnation=1)
    slot = everybody_leaves(spare)
    slot.tell()
    assert not slot.notice.ends_job()
    slot.board.set(exit_key(3, 1), "{}")
    slot.tell()
    assert slot.notice.ends_job(), "the spare is dead"
    leaves_too = everybody_leaves(spare, Request(kind="drain", slot=3))
    leaves_too.tell()
    assert leaves_too.notice.ends_job()


def test_a_frozen_store_does_not_hold_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_PATIENCE_S", 0.05)
    thaws = threading.Event()
    slot = Slot(MemoryBoard(before_set=lambda key: thaws.wait(30)))  # type: ignore[arg-type, return-value]
    start = time.monotonic()
    slot.notice.tell()
    asking = slot.notice._asking
    assert asking is not None and slot.lines == []
    time.sleep(0.1)
    for _ in range(3):  # boundaries go by
        slot.notice.tell()
    assert time.monotonic() - start < 5 and slot.notice._asking is asking, "one thread waits, no step does"
    assert len(slot.lines) == 1 and "the control store has not answered for" in slot.lines[0]
    thaws.set()
    asking.join(10)
    assert drained(slot.run.requests.known) == {2} and slot.lines[1].endswith("leaves after the next step")


def test_a_store_that_fails_is_asked_again_at_the_next_boundary() -> None:
    def fail(key: str) -> None:
        failed.append(key)
        if len(failed) < 3:
            raise RuntimeError("reset")

    failed: list[str] = []
    slot = Slot(MemoryBoard(fail))
    for _ in range(3):
        slot.tell()
    assert drained(slot.run.requests.known) == {2} and slot.back == 3
    assert [line.partition(" (")[0] for line in slot.lines] == [
        "preemption notice: the control store has not answered",
        "preemption notice: this slot leaves after the next step",
    ], "said once"
