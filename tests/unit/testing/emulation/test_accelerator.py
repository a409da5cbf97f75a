"""The time line: kernels one after the other, messages behind them, waits that cost only what is not hidden."""

from __future__ import annotations

import pytest

from nep.testing.emulation.accelerator import Accelerator, WallClock


def _accelerator(speed: float = 1.0) -> Accelerator:
    return Accelerator(0, WallClock(0.0), lambda slot, step, now_s: speed)


def test_kernels_run_one_after_the_other_while_the_host_goes_on() -> None:
    one = _accelerator(speed=0.5)
    one.compute("a", 1.0)
    one.compute("b", 2.0)
    assert (one.host, one.idle_from) == (0.0, 6.0)
    assert one.accounts.busy == {"a": 2.0, "b": 4.0}


def test_the_speed_is_asked_when_a_kernel_starts() -> None:
    one = Accelerator(3, WallClock(0.0), lambda slot, step, now_s: 1.0 if now_s < 1 and step == 0 else 0.1)
    one.compute("a", 1.0)
    one.compute("a", 1.0)
    assert one.idle_from == pytest.approx(1 + 10)


def test_a_message_follows_the_kernels_and_a_link_carries_one_at_a_time() -> None:
    one = _accelerator()
    one.compute("a", 5.0)
    first = one.carry({"network": 3.0})
    second = one.carry({"network": 3.0, "scale_up": 1.0})
    assert (first.start, first.end) == (5.0, 8.0)
    assert second.ends == {"network": 11.0, "scale_up": 6.0}
    one.compute("a", 4.0)  # meanwhile
    one.wait("sync", first, first.end)
    assert one.accounts.stalled["sync"] == 0.0  # hidden: the kernel runs until 9
    one.wait("sync", second, second.end)
    assert one.accounts.stalled["sync"] == pytest.approx(2.0)
    assert one.accounts.busy["sync"] == pytest.approx(6.0)
    assert one.host == 11.0


def test_nothing_to_carry_ends_where_the_kernels_do() -> None:
    one = _accelerator()
    one.compute("a", 2.0)
    assert one.carry({}).end == 2.0


def test_accounts_tell_what_was_added() -> None:
    one = _accelerator()
    one.compute("a", 1.0)
    before = one.accounts.copy()
    one.compute("a", 2.0)
    one.compute("b", 3.0)
    assert one.accounts.minus(before).busy == {"a": 2.0, "b": 3.0}


def test_the_wall_clock_keeps_its_pace() -> None:
    clock = WallClock(10.0)
    assert 4.5 < clock.left_s(0.5) <= 5.0
    assert clock.now() < 0.05
    assert WallClock(0.0).left_s(1e9) == 0.0
