"""Agreeing on the next generation: slots are threads, the store is a real TCPStore."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from nep.distributed.timeouts import Timeouts
from nep.fault_tolerance.control_store import (
    ControlStore,
    decision_key,
    end_key,
    exit_key,
    fence_key,
    record_key,
)
from nep.fault_tolerance.membership import JobEnded, LeftOut, agree, dead_members
from nep.fault_tolerance.records import Decision, Progress
from nep.fault_tolerance.transaction import decide

GENERATION = 4
MEMBERS = (0, 1, 2)
TIMEOUTS = Timeouts(base_s=20.0)
Decide = Callable[[Mapping[int, Progress], set[int]], Decision]


def progress(slot: int, tx: int = 7) -> Progress:
    return Progress(slot=slot, tx=tx, applied=tx, result=bytes([tx]), layout=2, layout_digest="d", params_version=tx)


def decision(records: Mapping[int, Progress], dead: set[int]) -> Decision:
    return decide(
        GENERATION, MEMBERS, records, dead, lost=lambda digest, live: [], plan=lambda digest, live: f"for {live}"
    )


class World:
    """Slots as threads.

    Args:
        connections: one for each slot, and one for the test itself; all below a prefix of its own.
    """

    def __init__(self, store: ControlStore, connections: Mapping[int, ControlStore]):
        self.store = store
        self.connections = connections
        self.pool = ThreadPoolExecutor(max_workers=8)

    def agree(
        self,
        slot: int,
        decide: Decide = decision,
        *,
        own: Progress | None = None,
        timeouts: Timeouts = TIMEOUTS,
        before: Callable[[], object] = lambda: None,
        silent_s: float | None = None,
    ) -> Future[Decision]:
        def act() -> Decision:
            before()
            mine, connection = own or progress(slot), self.connections[slot]
            return agree(connection, GENERATION, MEMBERS, mine, timeouts, decide, silent_s=silent_s)

        return self.pool.submit(act)

    def die(self, slot: int) -> None:
        """As the supervisor reports it."""
        self.store.set_json(exit_key(slot), {"slot": slot})


@pytest.fixture(scope="module")
def opened() -> list[ControlStore]:
    """Connections for all tests of this file: opening one takes seconds where the resolver does not answer."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    store = ControlStore(server, "")
    return [store, *(store.clone() for _ in MEMBERS)]


@pytest.fixture
def world(opened: list[ControlStore], request: pytest.FixtureRequest) -> Iterator[World]:
    store, *connections = (connection.at_prefix(f"{request.node.name}/") for connection in opened)
    world = World(store, dict(enumerate(connections)))
    yield world
    world.pool.shutdown()


def outcome(future: Future[Decision]) -> Decision | type[Exception]:
    try:
        return future.result(timeout=20)
    except LeftOut as left:
        return type(left)


def test_all_get_one_decision_and_only_the_lowest_makes_it(world: World) -> None:
    makers: list[int] = []

    def noted(slot: int) -> Decide:
        def make(records: Mapping[int, Progress], dead: set[int]) -> Decision:
            makers.append(slot)
            return decision(records, dead)

        return make

    futures = [world.agree(slot, noted(slot), own=progress(slot, 7 + (slot == 1))) for slot in MEMBERS]
    decisions = [future.result(timeout=20) for future in futures]
    assert decisions[0] == decisions[1] == decisions[2]
    assert decisions[0].members == MEMBERS
    assert (decisions[0].committed, decisions[0].result) == (8, bytes([8])), "the maximum over the records"
    assert decisions[0].params_versions == {0: 7, 1: 8, 2: 7}
    assert set(makers) == {0}, "the others wait for their turn"


@pytest.mark.parametrize("first", [0, 1])
def test_proposers_who_know_of_different_deaths_obey_one_decision(world: World, first: int) -> None:
    """Slot 2 posts and dies; slot 0 decides before it hears of that, slot 1 after. Whoever writes first wins."""
    makes = {slot: threading.Event() for slot in (0, 1)}
    known: dict[int, set[int]] = {}
    world.store.set(record_key(GENERATION, 2), progress(2).to_json())

    def proposer(slot: int) -> Decide:
        def make(records: Mapping[int, Progress], dead: set[int]) -> Decision:
            known[slot] = set(dead)
            makes[slot].set()
            assert makes[1 - slot].wait(10), "both must have made their own"
            if slot != first:
                assert world.connections[slot].wait(decision_key(GENERATION), 10.0)
            return decision(records, dead)

        return make

    def after_the_death() -> None:
        assert makes[0].wait(10)
        world.die(2)

    world.store.set(record_key(GENERATION, 1), progress(1).to_json())  # slot 0 need not wait for it
    futures = [world.agree(0, proposer(0)), world.agree(1, proposer(1), before=after_the_death)]
    made = [future.result(timeout=20) for future in futures]
    assert known == {0: set(), 1: {2}}
    assert made[0] == made[1]
    assert made[0].members == (MEMBERS if first == 0 else (0, 1))
    assert Decision.from_json(world.store.get(decision_key(GENERATION)) or "") == made[0]
    # Were it alive after all (its supervisor was wrong), it would obey the same decision.
    assert outcome(world.agree(2)) == (made[0] if first == 0 else LeftOut)


def test_a_poster_that_dies_is_left_out_and_its_record_ignored(world: World) -> None:
    world.store.set(record_key(GENERATION, 2), progress(2, tx=8).to_json())
    world.die(2)

    def from_the_living(records: Mapping[int, Progress], dead: set[int]) -> Decision:
        assert (set(records), dead) == ({0, 1}, {2})
        return decision(records, dead)

    made = [future.result(timeout=20) for future in [world.agree(slot, from_the_living) for slot in (0, 1)]]
    assert made[0] == made[1]
    assert (made[0].members, made[0].committed) == ((0, 1), 7)
    assert "[2]" in made[0].reason


def test_the_next_one_decides_if_the_first_in_turn_does_not(world: World) -> None:
    """Slot 0 has posted, and nobody knows yet that it is dead."""
    world.store.set(record_key(GENERATION, 0), progress(0).to_json())
    made = [future.result(timeout=20) for future in [world.agree(1), world.agree(2)]]
    assert made[0] == made[1] and made[0].members == MEMBERS


def test_nobody_decides_before_everybody_has_posted_or_is_dead(world: World) -> None:
    futures = [world.agree(0), world.agree(2)]
    time.sleep(0.4)
    assert not any(future.done() for future in futures) and not world.store.exists(decision_key(GENERATION))
    world.die(1)
    assert {future.result(timeout=20).members for future in futures} == {(0, 2)}


def test_who_says_nothing_is_fenced_and_left_out_once_it_is_dead(world: World) -> None:
    def supervisor() -> None:
        connection = world.connections[1]
        assert connection.wait(fence_key(1), 10.0)
        assert connection.get(fence_key(1)) == "1"
        time.sleep(0.2)
        assert not connection.exists(decision_key(GENERATION)), "a fence alone proves nothing"
        connection.set_json(exit_key(1), {"slot": 1, "fenced": True})

    acknowledged = world.pool.submit(supervisor)
    start = time.monotonic()
    together = threading.Barrier(2)  # or the first would fence the second, too
    futures = [world.agree(slot, timeouts=Timeouts(base_s=1.0), before=together.wait) for slot in (0, 2)]
    assert {future.result(timeout=20).members for future in futures} == {(0, 2)}
    assert time.monotonic() - start >= 1.0, "it gets the time of one wait to answer"
    acknowledged.result(timeout=20)
    assert not world.store.exists(fence_key(0)) and not world.store.exists(fence_key(2))


def test_a_slot_that_was_waited_for_in_vain_is_fenced_sooner(world: World) -> None:
    def supervisor() -> None:
        connection = world.connections[1]
        assert connection.wait(fence_key(1), 10.0)
        connection.set_json(exit_key(1), {"slot": 1, "fenced": True})

    acknowledged = world.pool.submit(supervisor)
    start = time.monotonic()
    together = threading.Barrier(2)
    futures = [world.agree(slot, silent_s=0.1, before=together.wait) for slot in (0, 2)]
    assert {future.result(timeout=20).members for future in futures} == {(0, 2)}
    assert 0.1 <= time.monotonic() - start < TIMEOUTS.wait_s
    acknowledged.result(timeout=20)


def test_a_fence_that_nobody_obeys_is_an_error_that_names_the_slot(world: World) -> None:
    with pytest.raises(RuntimeError, match=r"slots \[1, 2\] neither answered nor ended within 0.8 s.*--timeout-base-s"):
        world.agree(0, timeouts=Timeouts(base_s=0.2)).result(timeout=20)
    assert world.store.exists([fence_key(1), fence_key(2)])
    assert not world.store.exists(decision_key(GENERATION))


def test_a_decision_that_is_there_already_is_obeyed(world: World) -> None:
    records = {slot: progress(slot) for slot in (0, 1)}
    world.store.set(decision_key(GENERATION), decision(records, {2}).to_json())

    def never(records: Mapping[int, Progress], dead: set[int]) -> Decision:
        raise AssertionError("it is decided")

    assert world.agree(1, never).result(timeout=20).members == (0, 1)
    with pytest.raises(LeftOut, match=r"slot 2 is not in generation 4: slots \[2\] are dead"):
        world.agree(2, never).result(timeout=20)


def test_who_comes_into_recovery_when_the_job_has_ended_leaves_too(world: World) -> None:
    """Slot 2 dies after it has finished: slot 0 sees the fault, slot 1 sees that all have finished and leaves."""
    world.die(2)
    waiting = world.agree(0)
    time.sleep(0.1)
    assert not waiting.done()
    world.store.set(end_key(), "0")
    with pytest.raises(JobEnded) as caught:
        waiting.result(timeout=20)
    assert caught.value.exit_code == 0
    assert not world.store.exists(fence_key(1))


def test_a_decision_counts_more_than_the_end(world: World) -> None:
    """The end with code 3 is written by whoever reads "checkpoint" first; the others shall say why, too."""
    world.store.set(decision_key(GENERATION), decision({0: progress(0)}, {1, 2}).to_json())
    world.store.set(end_key(), "3")
    assert world.agree(0).result(timeout=20).members == (0,)


def test_dead_members_are_those_whose_exit_was_reported(world: World) -> None:
    world.die(2)
    world.die(5)
    assert dead_members(world.store, MEMBERS) == {2}
