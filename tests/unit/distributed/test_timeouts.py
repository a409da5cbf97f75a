"""Time-outs: an inner wait always speaks before the one around it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.distributed.timeouts import Timeouts


@given(base_s=st.floats(1e-3, 1e5))
def test_the_larger_ones_contain_the_smaller_ones(base_s: float) -> None:
    found = Timeouts(base_s=base_s)
    assert found.wait_s == base_s
    # A slot that says nothing is fenced after one wait, and its supervisor has time to obey within the agreement.
    assert found.wait_s < found.agree_s
    # A parked operation ends by itself, but not while somebody may still wait for it.
    assert max(found.wait_s, found.first_step_s, found.agree_s, found.rebuild_s) < found.group_s
    # Whoever comes up late is waited for longer than the groups that it is late for.
    assert found.rebuild_s + found.first_step_s < found.start_s
    # The store must not give up on a rendezvous before the slot does.
    assert found.rebuild_s <= found.store_s


@pytest.mark.parametrize("base_s", [0.0, -1.0, math.nan])
def test_the_base_must_be_positive(base_s: float) -> None:
    with pytest.raises(ValueError, match=r"--timeout-base-s"):
        Timeouts(base_s=base_s)
