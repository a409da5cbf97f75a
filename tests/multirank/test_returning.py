"""A slot that has nothing gets what routing remembers, and a difference between the others is noticed."""

from __future__ import annotations

import pytest
import torch

from nep.fault_tolerance.returning import share_bytes, share_routing
from nep.fault_tolerance.transaction import ProtocolViolation
from nep.moe.routing_state import RoutingState
from nep.planning.shapes import parameter_lines, preset
from nep.testing.threads import ThreadSlot, run_slots

LINES = parameter_lines(preset("debug-fine"))
COUNTS = torch.arange(32).view(2, 16)


def state_of(steps: int) -> RoutingState:
    state = RoutingState.initial(LINES, torch.float32)
    for _ in range(steps):
        state.commit(COUNTS, 0.001)
    return state


def test_returners_get_the_state_of_the_others() -> None:
    def body(me: ThreadSlot) -> RoutingState:
        state = state_of(0 if me.slot in (0, 2) else 5)
        share_routing(state, me.groups.vote, me.waiter, returners=(0, 2))
        return state

    states = run_slots([[0, 1, 2, 3]], body)
    assert {state.to_bytes() for state in states.values()} == {state_of(5).to_bytes()}


def test_a_slot_that_differs_is_named() -> None:
    def body(me: ThreadSlot) -> str:
        with pytest.raises(ProtocolViolation) as caught:
            share_routing(state_of(4 if me.slot == 2 else 5), me.groups.vote, me.waiter, returners=(0,))
        return str(caught.value)

    said = run_slots([[0, 1, 2]], body)
    assert set(said.values()) == {"slots [2] hold another routing state than slot 1"}


@pytest.mark.parametrize("returners", [(1,), (0, 2)])
def test_bytes_go_to_returners_only(returners: tuple[int, ...]) -> None:
    def body(me: ThreadSlot) -> bytes | None:
        return share_bytes(lambda: f"from {me.slot}".encode(), me.groups.transfer, me.waiter, returners)

    told = run_slots([[0, 1, 2, 3]], body)
    teller = min(set(range(4)) - set(returners))
    assert told == {slot: f"from {teller}".encode() if slot in returners else None for slot in range(4)}


def test_nothing_to_tell() -> None:
    told = run_slots([[0, 1]], lambda me: share_bytes(bytes, me.groups.transfer, me.waiter, (1,)))
    assert told == {0: None, 1: b""}
