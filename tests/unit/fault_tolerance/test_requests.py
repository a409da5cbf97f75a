"""Requests: numbers without gaps, and what follows from the first so many of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from nep.fault_tolerance.control_store import ControlStore, request_key
from nep.fault_tolerance.requests import (
    Request,
    Requests,
    drained,
    incarnation_of,
    kept_away,
    leaving,
    returners,
    spares_first,
    standing,
    taken_in,
)


def asked(*words: str) -> list[Request]:
    """`drain 2`, `undrain 2`, or `join 2 3`: slot 2, its third trainer."""
    found = []
    for word in words:
        kind, slot, *incarnation = word.split()
        found.append(Request(kind=kind, slot=int(slot), incarnation=int(incarnation[0]) if incarnation else 0))  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def store() -> ControlStore:
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    return ControlStore(server, "")


def test_many_who_ask_at_once_each_get_a_number(store: ControlStore) -> None:
    store = store.at_prefix("many/")
    connections = [store.clone() for _ in range(4)]

    def ask(connection: ControlStore) -> list[int]:
        requests = Requests()
        return [requests.post(connection, Request(kind="drain", slot=1, time=0.0)) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        numbers = [number for found in pool.map(ask, connections) for number in found]
    assert sorted(numbers) == list(range(1, 21)), "equal requests have numbers of their own"
    reader = Requests()
    assert reader.read(store) == 20 and reader.read(store) == 20
    assert not store.exists(request_key(21))


def test_what_is_read_is_what_was_written(store: ControlStore) -> None:
    store, request = store.at_prefix("same/"), Request(kind="join", slot=3, incarnation=2)
    assert Requests().post(store, request) == 1
    reader = Requests()
    reader.read(store)
    assert reader.known == [request]


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="request of schema 2"):
        Request.from_json('{"schema": 2}')
    with pytest.raises(ValueError, match="'dance'"):
        Request(kind="dance", slot=1)  # type: ignore[arg-type]


def test_the_last_word_counts() -> None:
    assert drained(asked("drain 1", "drain 2", "undrain 1")) == {2}
    assert drained(asked("drain 1", "undrain 1", "drain 1")) == {1}
    assert drained(asked("undrain 1", "join 1 2")) == frozenset()


@pytest.mark.parametrize(
    ("slots", "gone"),
    [((0, 1, 2), (1, 2)), ((1, 2), (2,)), ((1,), ()), ((0, 3), ()), ((2, 3), (2,))],
)
def test_one_slot_stays_whatever_is_asked(slots: tuple[int, ...], gone: tuple[int, ...]) -> None:
    assert leaving(asked("drain 1", "drain 2"), slots) == gone


def test_who_waits_and_was_not_answered_yet() -> None:
    requests = asked("join 1 2", "join 2 2", "drain 3", "join 2 3", "join 3 2")
    assert returners(requests, 0) == {1: 2, 2: 3}, "the newest trainer of each, and nobody who is drained"
    assert returners(requests, 2) == {2: 3}
    assert returners(requests[:3], 1) == {2: 2}
    assert returners(requests, 9) == {}


def test_the_first_trainer_is_meant_where_nothing_is_said() -> None:
    assert (incarnation_of({2: 3}, 2), incarnation_of({2: 3}, 1)) == (3, 1)


def test_a_drain_of_one_trainer_ends_with_the_next() -> None:
    """A node that is about to go drains its trainers; an operator's word stands above that."""
    assert drained(asked("drain 1 2", "join 1 2")) == {1}
    assert drained(asked("drain 1 2", "join 1 3")) == frozenset()
    assert drained(asked("drain 1 2", "undrain 1")) == frozenset()
    assert drained(asked("drain 1", "drain 1 2", "join 1 3")) == {1}
    assert drained(asked("drain 1 2", "drain 1", "join 1 3")) == {1}


def test_who_stays_away_is_named_with_who_wanted_it() -> None:
    sick = Request(kind="drain", slot=4, why="its health check")
    known = [*asked("drain 1 2", "drain 2", "drain 3", "undrain 3", "join 2 2"), sick]
    assert kept_away(known) == {2: "an operator", 4: "its health check"}


def test_those_that_wait_come_before_all_leave_and_are_tried_once() -> None:
    requests = asked("join 2 1", "drain 0", "drain 1")
    assert spares_first(requests, (0, 1), 0) and spares_first(requests, (0, 1), 2)
    assert not spares_first(requests, (0, 1), 3), "a decision has had its chance: whoever waits is dead"
    assert spares_first([*requests, *asked("undrain 1", "drain 1")], (0, 1), 3)
    assert not spares_first(requests[:2], (0, 1), 0), "one of them stays"
    assert not spares_first(requests, (0, 1, 2), 0), "they are there"
    assert not spares_first(requests[1:], (0, 1), 0), "nobody waits"
    assert not spares_first([*requests, *asked("drain 2")], (0, 1), 0), "nor do they stay"


def test_as_many_come_as_are_missing_in_the_order_in_which_they_asked() -> None:
    requests = asked("join 4 1", "join 2 2", "join 3 2", "drain 3", "join 5 1", "join 4 2")
    waiting = standing(requests)
    assert list(waiting.items()) == [(2, 2), (5, 1), (4, 2)], "a spare that died and came back is the last again"
    assert taken_in(waiting, (0, 1), 4) == {2: 2, 5: 1}
    assert taken_in(waiting, (0, 1, 2), 4) == {5: 1}
    assert taken_in(waiting, (0, 1, 2, 3), 4) == {}
    assert taken_in(waiting, (0,), 9) == waiting
