"""Time-outs: an inner wait always speaks before the one around it."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.distributed.timeouts import SupervisorTimeouts, Timeouts


@given(base_s=st.floats(1e-3, 86_400.0))
def test_all_are_in_order_for_every_base(base_s: float) -> None:
    found = Timeouts(base_s=base_s)
    assert found.problems() == []
    assert found.wait_s == base_s
    # The store must not give up on a rendezvous before the slot does.
    assert found.rebuild_s <= found.store_s
    # A slot that hangs is answered within the base time-out and two seconds, whatever comes after takes some 0.3 s.
    assert max(found.wait_s, found.rebuild_s) + found.hung_s <= 2 * base_s


@pytest.mark.parametrize("base_s", [0.01, 30.0])
def test_what_is_out_of_order_is_named(base_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timeouts, "agree_s", property(lambda self: 2 * self.base_s))
    (problem,) = Timeouts(base_s=base_s).problems()
    assert problem.startswith(f"first_step_s ({3 * base_s:g} s) must be less than agree_s ({2 * base_s:g} s)")


def test_a_supervisor_that_waits_longer_than_the_launcher_is_named() -> None:
    (problem,) = dataclasses.replace(SupervisorTimeouts.from_base(1.0), grace_s=31.0).problems()
    assert problem.startswith("grace_s (31 s) must be less than the launcher's (30 s)")


@pytest.mark.parametrize("base_s", [0.0, -1.0, math.nan])
def test_the_base_must_be_positive(base_s: float) -> None:
    with pytest.raises(ValueError, match=r"--timeout-base-s"):
        Timeouts(base_s=base_s)
