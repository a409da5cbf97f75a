"""Leases: a supervisor that cannot be seen counts as dead when its lease has expired twice, and not before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nep.fault_tolerance.control_store import exit_key, lease_key, supervisor_key
from nep.fault_tolerance.leases import LeaseWatch
from nep.fault_tolerance.unsupervised import report_unsupervised, whereabouts
from nep.testing.memory_board import MemoryBoard

LEASE_S = 10.0


class Scene:
    """A store, a clock and who watches."""

    def __init__(self) -> None:
        self.store: Any = MemoryBoard()
        self.now = 100.0
        self.watch = LeaseWatch(self.store, LEASE_S, lambda: self.now)
        self.renewals = 0

    def renew(self, *slots: int) -> None:
        self.renewals += 1
        for slot in slots:
            self.store.set(lease_key(slot), f"1:{self.renewals}")

    def after(self, seconds: float) -> set[int]:
        self.now += seconds
        return self.watch.expired([1, 2])


def test_one_that_is_silent_for_two_terms_has_expired() -> None:
    scene = Scene()
    scene.renew(1, 2)
    found = []
    for _ in range(25):
        scene.renew(1)
        found.append(scene.after(1.0))
    assert set().union(*found[:20]) == set()
    assert found[20:] == [{2}] * 5
    scene.renew(2)
    assert scene.after(1.0) == set(), "whoever is heard of again lives"


def test_a_pause_of_the_observer_is_one_term_however_long() -> None:
    scene = Scene()
    scene.renew(1, 2)
    assert scene.after(0.0) == set()
    assert scene.after(100 * LEASE_S) == set(), "it was stopped, and the others may have been with it"
    scene.renew(1, 2)
    assert scene.after(LEASE_S / 5) == set()
    assert scene.after(2 * LEASE_S) == set()
    assert scene.after(LEASE_S) == {1, 2}


def test_a_slot_without_any_lease_is_not_judged() -> None:
    scene = Scene()
    assert [scene.after(LEASE_S) for _ in range(5)] == [set()] * 5


@pytest.mark.parametrize("host", ["another machine", None])
def test_a_supervisor_elsewhere_is_reported_dead_once_its_lease_has_expired(host: str | None) -> None:
    """On another host its process cannot be seen; on this one a living process may be frozen with its trainer."""
    scene, incarnations = Scene(), {1: 4}
    place = whereabouts() | ({"boot": host} if host else {})
    scene.store.set(supervisor_key(1), json.dumps(place))
    scene.renew(1)
    for seconds in (0.0, LEASE_S, LEASE_S - 1):
        scene.now += seconds
        report_unsupervised(scene.store, [1], incarnations, scene.watch)
        assert not scene.store.exists(exit_key(1, 4))
    scene.now += 1
    report_unsupervised(scene.store, [1], incarnations, scene.watch)
    record = json.loads(scene.store.get(exit_key(1, 4)))
    assert (record["by"], record["incarnation"]) == ("lease", 4)
