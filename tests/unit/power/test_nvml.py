"""Boards through NVML, with a fake of its package: what is read, what is set, and what each error says."""

import sys

import pytest

from nep.power.device import PowerError, PowerRange, usable_range
from nep.power.health import health_signals, lost_signal
from nep.power.nvml import open_nvml
from nep.power.nvml_errors import CODES, GONE, explained
from tests.unit.power.fake_pynvml import ERRORS, FakeBoard, FakePynvml


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakePynvml:
    module = FakePynvml([FakeBoard("GPU-aa"), FakeBoard("GPU-bb", limit_mw=650_000)])
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_reading(fake: FakePynvml) -> None:
    board = fake.boards[0]
    board.xids = [79]  # happened before anybody listened: the first reading already tells
    (first, second) = open_nvml()
    assert first.name == "GPU 0 (NVIDIA H100 80GB HBM3)" and first.model == "NVIDIA H100 80GB HBM3"
    assert first.range_w() == PowerRange(min_w=200, max_w=700, default_w=700)
    assert second.limit_w() == 650
    reading = first.read()
    assert (reading.limit_w, reading.draw_w, reading.temperature_c, reading.slowdown_c) == (700, 612.345, 61, 87)
    assert (reading.clock_mhz, reading.max_clock_mhz) == (1755, 1980)
    assert reading.throttles == {"power_limit"}
    assert (reading.ecc_corrected, reading.ecc_uncorrected, reading.xids) == (3, 0, (79,))
    board.xids, board.ecc = [48, 13], (4, 2)
    again = first.read()
    assert again.xids == (48, 13)
    signals = health_signals(again, reading)
    assert [(signal.kind, signal.severity, signal.value) for signal in signals] == [
        ("xid", "fatal", 48),
        ("ecc_uncorrected", "fatal", 2),
        ("xid", "note", 13),
        ("ecc_corrected", "note", 1),
    ]
    assert first.read().xids == ()


def test_setting(fake: FakePynvml) -> None:
    (first,) = open_nvml([0])
    first.set_limit_w(500)
    assert fake.boards[0].limit_mw == 500_000 and fake.boards[1].limit_mw == 650_000
    first.set_limit_w(612.5)
    assert fake.boards[0].limit_mw == 612_500 and first.limit_w() == 612.5
    assert first.command(612.5) == "sudo nvidia-smi -i 0 -pl 612.5"
    with pytest.raises(PowerError, match="setting its power limit to 900 W failed: the value is not one"):
        first.set_limit_w(900)


def test_permission_denied_says_the_command(fake: FakePynvml) -> None:
    fake.boards[1].fails["nvmlDeviceSetPowerManagementLimit"] = ERRORS["NO_PERMISSION"]
    _, second = open_nvml()
    with pytest.raises(PowerError, match=r"permission denied.*: sudo nvidia-smi -i 1 -pl 500$") as caught:
        second.set_limit_w(500)
    assert caught.value.kind == "permission"
    assert second.read().limit_w == 650  # reading needs none


def test_a_limit_that_does_not_stay_is_an_error(fake: FakePynvml) -> None:
    fake.boards[0].ignores_limit = True
    with pytest.raises(PowerError, match="is 700 W after setting 500 W; something else sets it too") as caught:
        open_nvml([0])[0].set_limit_w(500)
    assert caught.value.kind == "busy"


def test_mig_is_refused_and_boards_without_it_are_not(fake: FakePynvml) -> None:
    first, second = open_nvml()
    fake.boards[0].mig, fake.boards[1].mig = 1, None
    with pytest.raises(PowerError, match="MIG is on, and the power limit is of the whole board") as caught:
        first.set_limit_w(500)
    assert caught.value.kind == "unsupported" and fake.boards[0].limit_mw == 700_000
    second.set_limit_w(500)
    assert fake.boards[1].limit_mw == 500_000


def test_a_board_that_measures_little_is_read_all_the_same(fake: FakePynvml) -> None:
    board = fake.boards[0]
    board.fails = {
        "nvmlDeviceGetPowerUsage": ERRORS["NOT_SUPPORTED"],
        "nvmlDeviceGetTemperatureThreshold": ERRORS["DEPRECATED"],
        "nvmlDeviceGetTotalEccErrors": ERRORS["NOT_SUPPORTED"],
        "nvmlDeviceGetCurrentClocksEventReasons": ERRORS["FUNCTION_NOT_FOUND"],
        "nvmlDeviceGetSupportedEventTypes": ERRORS["NOT_SUPPORTED"],
        "nvmlDeviceGetClockInfo": ERRORS["NO_DATA"],
    }
    reading = open_nvml([0])[0].read()
    assert reading.draw_w is reading.slowdown_c is reading.ecc_corrected is reading.clock_mhz is None
    assert reading.throttles == frozenset() and reading.xids == () and reading.temperature_c == 61
    assert health_signals(reading) == ()


def test_a_fixed_limit_is_unsupported(fake: FakePynvml) -> None:
    fake.boards[0].fails["nvmlDeviceGetPowerManagementLimitConstraints"] = ERRORS["NOT_SUPPORTED"]
    with pytest.raises(PowerError, match=r"the board does not support it; .* plan without this lever") as caught:
        open_nvml([0])[0].range_w()
    assert caught.value.kind == "unsupported"


@pytest.mark.parametrize("code", sorted(GONE))
@pytest.mark.parametrize("function", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetPowerManagementLimit"])
def test_a_lost_board_is_lost_in_every_reading(fake: FakePynvml, function: str, code: int) -> None:
    (first,) = open_nvml([0])
    first.read()
    fake.boards[0].fails[function] = code
    with pytest.raises(PowerError) as caught:
        first.read()
    assert caught.value.kind == "lost"
    assert lost_signal(caught.value).severity == "fatal"


def test_a_board_that_is_lost_while_listening(fake: FakePynvml) -> None:
    (first,) = open_nvml([0])
    first.read()
    fake.boards[0].fails["nvmlEventSetWait_v2"] = ERRORS["GPU_IS_LOST"]
    with pytest.raises(PowerError, match="has fallen off the bus"):
        first.read()
    fake.boards[1].fails["nvmlDeviceRegisterEvents"] = ERRORS["GPU_IS_LOST"]
    (second,) = open_nvml([1])
    with pytest.raises(PowerError, match="has fallen off the bus"):
        second.read()
    assert fake.event_sets[-1].free


def test_listening_that_is_not_allowed_leaves_the_rest(fake: FakePynvml) -> None:
    fake.boards[0].fails["nvmlDeviceRegisterEvents"] = ERRORS["NO_PERMISSION"]
    (first,) = open_nvml([0])
    assert first.read().xids == first.read().xids == ()
    assert fake.calls.count("nvmlDeviceRegisterEvents") == 1 and fake.event_sets[0].free


def test_a_limit_from_outside_is_lower(fake: FakePynvml) -> None:
    fake.boards[0].outside_mw = 500_000
    first, second = open_nvml()
    reading = first.read()
    assert (reading.limit_w, reading.enforced_w) == (700, 500)
    (signal,) = health_signals(reading)
    assert signal.severity == "slow" and "keeps to 500 W, below its limit of 700 W" in signal.text
    # Raising would bring nothing, so nothing is planned above it.
    assert usable_range(first.range_w(), reading) == PowerRange(min_w=200, default_w=500, max_w=500)
    # A limit that somebody has chosen is what a plan starts from.
    assert usable_range(second.range_w(), second.read()) == PowerRange(min_w=200, default_w=650, max_w=700)


def test_throttle_reasons_have_names(fake: FakePynvml) -> None:
    (first,) = open_nvml([0])
    fake.boards[0].reasons = 0x4 | 0x40 | 0x8 | 0x80 | 0x10 | 0x100 | 0x1000
    assert first.read().throttles == {
        "power_limit",
        "hardware_thermal",
        "hardware_slowdown",
        "power_brake",
        "sync_boost",
        "clocks_setting",
        "other",
    }
    # Drivers before 535 call the same function differently.
    fake.nvmlDeviceGetCurrentClocksThrottleReasons = fake.nvmlDeviceGetCurrentClocksEventReasons
    del fake.nvmlDeviceGetCurrentClocksEventReasons
    fake.boards[0].reasons = 0x1
    assert first.read().throttles == {"idle"}


def test_boards_by_uuid_and_old_names_in_bytes(fake: FakePynvml) -> None:
    fake.boards[1].name = b"NVIDIA A100"
    (one,) = open_nvml(["GPU-bb"])
    (same,) = open_nvml(["bb"])
    assert one.name == same.name == "GPU 1 (NVIDIA A100)"
    with pytest.raises(PowerError, match="there is no such device; see nvidia-smi -L"):
        open_nvml(["cc"])
    with pytest.raises(PowerError, match="GPU 7: finding it failed"):
        open_nvml([7])


def test_the_library_is_given_back(fake: FakePynvml) -> None:
    devices = open_nvml()
    assert fake.users == 2
    devices[0].read()
    for device in devices:
        device.close()
    assert fake.users == 0 and all(events.free for events in fake.event_sets)


def test_limits_are_rounded_into_the_boards_range(fake: FakePynvml) -> None:
    fake.boards[0].range_mw, fake.boards[0].default_mw = (199_500, 699_900), 699_900
    assert open_nvml([0])[0].range_w() == PowerRange(min_w=200, max_w=699, default_w=699)


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_has_its_own_sentence_and_remedy(name: str) -> None:
    error = explained(ERRORS[name], "reading its power limit", "GPU 3", command="sudo it")
    assert ERRORS[name] in CODES
    assert str(error).startswith("GPU 3: reading its power limit failed: ")
    what, _, remedy = str(error).partition("failed: ")[2].partition("; ")
    assert len(what) > 10 and len(remedy) > 8
    assert (error.kind == "lost") == (ERRORS[name] in GONE)
    assert str(error).endswith(": sudo it") == (name == "NO_PERMISSION")


def test_an_error_of_a_later_nvml_is_not_swallowed() -> None:
    assert "NVML error 77; run nvidia-smi" in str(explained(77, "reading", "GPU 0"))


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("LIBRARY_NOT_FOUND", "libnvidia-ml.so.1 is not there; install NVIDIA's driver, or use --simulate"),
        ("DRIVER_NOT_LOADED", "NVIDIA's driver is not loaded"),
        ("LIB_RM_VERSION_MISMATCH", "driver and library are of different versions; reboot"),
    ],
)
def test_a_machine_without_nvml(monkeypatch: pytest.MonkeyPatch, code: str, sentence: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakePynvml([], start_fails=ERRORS[code]))
    with pytest.raises(PowerError, match=sentence) as caught:
        open_nvml()
    assert caught.value.kind == "missing"


def test_no_package_or_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(PowerError, match=r"pip install 'nep\[power\]'"):
        open_nvml()
    other = FakePynvml([])
    del other.nvmlDeviceSetPowerManagementLimit
    monkeypatch.setitem(sys.modules, "pynvml", other)
    with pytest.raises(PowerError, match=r"is another package; pip install 'nep\[power\]'"):
        open_nvml()


def test_an_old_package_lacks_functions(fake: FakePynvml) -> None:
    del fake.nvmlDeviceGetPowerManagementDefaultLimit
    with pytest.raises(PowerError, match="has no nvmlDeviceGetPowerManagementDefaultLimit; pip install -U"):
        open_nvml([0])[0].range_w()
