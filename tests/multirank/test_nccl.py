"""NCCL's transport on a stand-in for a GPU: whole steps, and operations that only an abort can end."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from nep.distributed.collectives import all_gather_bytes
from nep.distributed.groups import ParkingLot
from nep.distributed.transports.nccl import CannotAbandon, NcclTransport
from nep.distributed.waiting import Fault
from nep.planning.cluster import Cluster
from nep.planning.planner import plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from nep.testing import parity
from nep.testing.fake_nccl import FakeNccl
from nep.testing.threads import ThreadSlot, run_slots
from tests.multirank.plans import lane_plan
from tests.multirank.steps import BATCH
from tests.multirank.training import assert_equals, make_training, reference_of, run_under

CPU = torch.device("cpu")


def transport(abandon_timeout_s: float = 10.0) -> NcclTransport:
    return NcclTransport(CPU, abandon_timeout_s=abandon_timeout_s, calls=FakeNccl())


@pytest.mark.parametrize("cut", ["two replicas", "unlike lanes"])
def test_a_training_equals_the_reference(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation of a step, coalesced and polled as NCCL's are."""
    shape = preset("debug")
    if cut == "two replicas":
        plan = plan_from_scratch(Cluster.uniform(3, 3), parameter_lines(shape), num_replicas=2, global_batch_size=BATCH)
    else:
        plan = lane_plan([[[0, 1], [2]]], shape, [4, 2])
    monkeypatch.setattr(parity, "run_slots", lambda *args, **named: run_slots(*args, **named, transport=transport))
    training = make_training(shape)
    assert_equals(run_under(training, plan).slots, reference_of(training))


@pytest.mark.parametrize("what", ["exchange", "all_gather"])
def test_an_operation_without_its_peer_ends_with_the_abort(what: str) -> None:
    given_up = threading.Event()

    def body(me: ThreadSlot) -> tuple[str, bool, int, float]:
        if me.slot == 1:
            time.sleep(0.1)  # never takes part
            me.fault.set()
            given_up.wait(30.0)  # its connections stay open: their end would be an error of the data path
            return "", False, 0, 0.0
        buffer = torch.zeros(4)
        if what == "exchange":
            pending = me.groups.transfer.exchange({}, {1: buffer})
        else:
            pending = me.groups.transfer.all_gather(torch.zeros(8), buffer)
        with pytest.raises(Fault) as caught:
            me.waiter.wait(pending, "the one that does not come")
        given_up.set()
        early = pending.ended()
        start = time.monotonic()
        lot = ParkingLot(me.rendezvous.transport)
        lot.park(me.groups, me.waiter.parked)
        assert pending.ended()
        while lot.reap() and time.monotonic() - start < 5:
            time.sleep(0.005)
        return caught.value.kind, early, lot.reap(), time.monotonic() - start

    kind, early, left, seconds = run_slots([[0, 1]], body, group_timeout_s=10.0, transport=transport)[0]
    assert (kind, early, left) == ("flag", False, 0)
    assert seconds < 5.0, "not the group's time-out ended it"


def test_without_the_abort_the_device_would_not_end() -> None:
    """The stand-in is as stubborn as a kernel."""

    given_up = threading.Event()

    def body(me: ThreadSlot) -> str:
        if me.slot == 1:
            given_up.wait(30.0)
            return ""
        me.groups.transfer.exchange({}, {1: torch.zeros(4)})
        with pytest.raises(CannotAbandon) as caught:
            me.rendezvous.transport.abandon([me.groups.vote.channel])  # type: ignore[list-item]
        given_up.set()
        return str(caught.value)

    results = run_slots([[0, 1]], body, group_timeout_s=1.0, transport=lambda: transport(0.2))
    assert "has not ended its kernels" in results[0]


def test_values_on_hosts_go_through_the_device_and_come_back() -> None:
    def body(me: ThreadSlot) -> list[bytes]:
        return all_gather_bytes(me.groups.vote, bytes([me.slot]) * 3, me.waiter, "a test")

    results = run_slots([[0, 2], [5]], body, transport=transport)
    assert all(blobs == [b"\0\0\0", b"\2\2\2", b"\5\5\5"] for blobs in results.values())
