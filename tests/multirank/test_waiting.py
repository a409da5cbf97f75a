"""Giving up on operations: real gloo groups whose members do not come."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from nep.distributed.collectives import all_gather_bytes, sum_exact
from nep.distributed.groups import ParkingLot
from nep.distributed.waiting import Fault
from nep.testing.threads import ThreadSlot, run_slots


def test_values_come_in_rank_order_and_integers_add_exactly() -> None:
    big = 2**53

    def body(me: ThreadSlot) -> tuple[list[bytes], list[int]]:
        blobs = all_gather_bytes(me.groups.vote, bytes([me.slot]) * 3, me.waiter, "a test")
        return blobs, sum_exact(me.groups.vote, torch.tensor([big, me.slot]), me.waiter, "a test").tolist()

    results = run_slots([[0, 2], [5]], body)
    assert set(map(str, results.values())) == {str(([b"\0\0\0", b"\2\2\2", b"\5\5\5"], [3 * big, 7]))}


def test_sum_exact_refuses_floats() -> None:
    with pytest.raises(ValueError, match="integers"):
        run_slots([[0]], lambda me: sum_exact(me.groups.vote, torch.ones(1), me.waiter, "a test"))


@pytest.mark.parametrize("what", ["exchange", "all_gather"])
def test_a_wait_ends_with_the_fault_flag_and_parks_the_operation(what: str) -> None:
    given_up = threading.Event()

    def body(me: ThreadSlot) -> tuple[str, float, int, int]:
        if me.slot == 1:
            time.sleep(0.2)  # never takes part
            me.fault.set()
            given_up.wait(30.0)  # its connections stay open: their end would be an error of the data path
            return "", 0.0, 0, 0
        buffer = torch.empty(4)
        if what == "exchange":
            pending = me.groups.transfer.exchange({}, {1: buffer})
        else:
            pending = me.groups.transfer.all_gather(torch.empty(8), torch.empty(4))
        start = time.monotonic()
        with pytest.raises(Fault) as caught:
            me.waiter.wait(pending, "the one that does not come")
        given_up.set()
        lot = ParkingLot()
        lot.park(me.groups, me.waiter.parked)
        # The operation may still write, so it stays until the group's own time-out.
        early = lot.reap()
        time.sleep(3.5)
        return caught.value.kind, time.monotonic() - start - 3.5, early, lot.reap()

    kind, waited_s, early, late = run_slots([[0, 1]], body, group_timeout_s=3.0)[0]
    assert kind == "flag" and waited_s < 2.0
    assert (early, late) == (1, 0)


def test_a_wait_ends_at_its_deadline() -> None:
    given_up = threading.Event()

    def body(me: ThreadSlot) -> str:
        if me.slot == 1:
            given_up.wait(30.0)  # alive, but silent
            return ""
        with pytest.raises(Fault) as caught:
            me.waiter.wait(me.groups.transfer.exchange({}, {1: torch.empty(1)}), "nothing", 0.1)
        given_up.set()
        return caught.value.kind

    assert run_slots([[0, 1]], body, group_timeout_s=1.0)[0] == "deadline"


def test_an_exchange_without_peers_is_done() -> None:
    def body(me: ThreadSlot) -> bool:
        return me.groups.transfer.exchange({}, {}).done()

    assert all(run_slots([[0, 1]], body).values())
