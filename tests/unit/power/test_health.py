"""Signs of sick boards."""

import pytest

from nep.power.device import PowerError, PowerReading
from nep.power.health import XIDS, health_signals, lost_signal, xid_signal


def kinds(now: PowerReading, before: PowerReading | None = None) -> list[tuple[str, str]]:
    return [(signal.kind, signal.severity) for signal in health_signals(now, before)]


def test_a_board_at_its_power_limit_is_well() -> None:
    reading = PowerReading(limit_w=700, temperature_c=70, slowdown_c=87, throttles=frozenset({"power_limit"}))
    assert health_signals(reading) == ()
    assert health_signals(PowerReading(limit_w=700)) == ()


def test_heat_and_supply_make_a_slot_slow() -> None:
    assert kinds(PowerReading(limit_w=700, temperature_c=87, slowdown_c=87)) == [("temperature", "slow")]
    assert kinds(PowerReading(limit_w=700, throttles=frozenset({"hardware_thermal", "hardware_slowdown"}))) == [
        ("throttle", "slow")
    ]
    assert kinds(PowerReading(limit_w=700, throttles=frozenset({"hardware_slowdown"}))) == [("throttle", "slow")]
    assert kinds(PowerReading(limit_w=700, throttles=frozenset({"software_thermal", "power_brake"}))) == [
        ("throttle", "slow"),
        ("throttle", "slow"),
    ]
    (brake,) = health_signals(PowerReading(limit_w=700, throttles=frozenset({"power_brake", "hardware_slowdown"})))
    assert "power brake" in brake.text


def test_errors_count_from_the_reading_before() -> None:
    before = PowerReading(limit_w=700, ecc_corrected=5, ecc_uncorrected=1)
    assert kinds(before) == []
    now = PowerReading(limit_w=700, ecc_corrected=9, ecc_uncorrected=1)
    assert [signal.value for signal in health_signals(now, before)] == [4]
    # The driver was loaded anew: counters begin at 0.
    reset = PowerReading(limit_w=700, ecc_corrected=2, ecc_uncorrected=0)
    assert [signal.value for signal in health_signals(reset, now)] == [2]
    assert kinds(PowerReading(limit_w=700), now) == []


def test_the_worst_comes_first() -> None:
    before = PowerReading(limit_w=700, ecc_corrected=0, ecc_uncorrected=0)
    now = PowerReading(
        limit_w=700,
        ecc_corrected=1,
        ecc_uncorrected=1,
        xids=(13, 63, 79),
        throttles=frozenset({"hardware_thermal"}),
    )
    assert [severity for _, severity in kinds(now, before)] == ["fatal", "fatal", "suspect", "slow", "note", "note"]


@pytest.mark.parametrize("xid", XIDS)
def test_known_errors_say_what_to_do(xid: int) -> None:
    signal = xid_signal(xid)
    assert signal.value == xid and signal.text.startswith(f"XID {xid}: ") and "; " in signal.text


def test_unknown_errors_are_suspect() -> None:
    assert xid_signal(171).severity == "suspect" and "xid-errors" in xid_signal(171).text
    assert lost_signal(PowerError("GPU 0: gone; reset it", "lost")).text == "GPU 0: gone; reset it"
