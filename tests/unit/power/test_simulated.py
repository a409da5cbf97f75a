"""Boards of arithmetic: speed by limit, heat that comes late, and throttling."""

import math
from itertools import pairwise
from pathlib import Path

import pytest

from nep.planning.speed_curve import CURVES, boosted
from nep.power.device import PowerError, PowerRange
from nep.power.health import health_signals
from nep.power.simulated import BoardModel, Chip, SimulatedDevice
from nep.power.simulated_file import KNOWN_BOARDS, board_model, create_file, open_file, simulated_boards

LIMITS = PowerRange(min_w=200, default_w=700, max_w=910)


def board(**numbers: float) -> BoardModel:
    return BoardModel(name="test", curve=boosted(700, 910), range_w=LIMITS, **numbers)  # type: ignore[arg-type]


def test_speed_follows_the_limit() -> None:
    chip = Chip.cold(board())
    assert chip.speed == 1.0
    chip.limit_w = 910
    assert chip.speed == pytest.approx(1.1557)
    chip.limit_w = 500
    assert chip.speed == pytest.approx(0.634 / 0.894)
    assert Chip.cold(board(speed=0.8)).speed == pytest.approx(0.8)


def test_heat_comes_late_and_exactly_as_one_time_constant_says() -> None:
    chip = Chip.cold(board(tau_s=10, kelvin_per_w=0.05, ambient_c=30))
    begin = chip.temperature_c
    settled = 30 + 0.05 * 700
    for now in (1.0, 2.5, 10.0, 40.0):
        chip.advance(now)
        assert chip.temperature_c == pytest.approx(settled + (begin - settled) * math.exp(-now / 10))


def test_a_hot_board_loses_speed_and_settles_below_its_slowdown_temperature() -> None:
    hot = board(kelvin_per_w=0.07, tau_s=10)  # 910 W would make 93.7 °C
    chip = Chip.warm(hot)
    assert chip.speed == 1.0  # 79 °C at the default limit
    chip.limit_w = 910
    chip.now_s = 0.0
    speeds = []
    for now in range(1, 200):
        chip.advance(now)
        speeds.append(chip.speed)
    assert speeds[0] == pytest.approx(1.1557)  # full at first: heat lags behind
    assert speeds[-1] < speeds[0] and chip.temperature_c < hot.slowdown_c
    assert all(after <= before + 1e-12 for before, after in pairwise(speeds))
    # What it draws is what cooling carries off.
    assert hot.ambient_c + hot.kelvin_per_w * chip.draw_w == pytest.approx(chip.temperature_c, abs=0.01)
    device = SimulatedDevice(index=0, chip=chip, clock=None)
    assert device.read().throttles == {"software_thermal"}
    assert {signal.severity for signal in health_signals(device.read())} == {"slow"}


def test_time_that_begins_again_keeps_the_temperature() -> None:
    chip = Chip.cold(board())
    chip.advance(30.0)
    warm = chip.temperature_c
    chip.advance(0.0)
    assert chip.temperature_c == warm
    chip.advance(1.0)
    assert chip.temperature_c > warm


def test_an_idle_board_cools_down() -> None:
    chip = Chip.warm(board())
    chip.load = 0.0
    chip.advance(1000.0)
    assert chip.temperature_c == pytest.approx(30 + 0.045 * 75)
    assert chip.draw_w == 75


def test_a_device_by_the_clock() -> None:
    now = [100.0]
    device = SimulatedDevice(index=3, chip=Chip.cold(board()), clock=lambda: now[0])
    before = device.read()
    assert before.throttles == {"power_limit"} and before.draw_w == 700 and before.limit_w == 700
    now[0] += 60
    assert device.read().temperature_c > before.temperature_c
    device.set_limit_w(910)
    assert device.read().clock_mhz > before.clock_mhz and device.read().throttles == frozenset()
    with pytest.raises(PowerError, match="takes 200 to 910 W"):
        device.set_limit_w(911)
    device.xids.append(79)
    assert device.read().xids == (79,) and device.read().xids == ()


def test_trouble_can_be_played() -> None:
    device = SimulatedDevice(index=3, chip=Chip.cold(board()), permitted=False)
    with pytest.raises(PowerError, match=r"permission denied.*: sudo nvidia-smi -i 3 -pl 500$") as caught:
        device.set_limit_w(500)
    assert caught.value.kind == "permission"
    device.lost = True
    for act in (device.read, device.limit_w, device.range_w, lambda: device.set_limit_w(700)):
        with pytest.raises(PowerError, match="fallen off the bus"):
            act()


def test_boards_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tau_s \(0\)"):
        board(tau_s=0)
    with pytest.raises(ValueError, match=r"slowdown_c .30. minus band_c"):
        board(slowdown_c=30)
    with pytest.raises(ValueError, match=r"idle_w .200. must be below the lowest limit"):
        board(idle_w=200)
    with pytest.raises(ValueError, match=r"min_w .300. <= default_w .200."):
        PowerRange(min_w=300, default_w=200, max_w=400)


def test_every_published_curve_is_a_board() -> None:
    assert set(KNOWN_BOARDS) == set(CURVES)
    for name in KNOWN_BOARDS:
        assert Chip.warm(board_model(name)).speed == 1.0
    # More headroom than the curve knows: one that goes on.
    assert Chip.warm(board_model("h100-sxm", max_w=910)).board.speed_at(910) == pytest.approx(1.1557)
    assert board_model("h100-sxm", default_w=350, max_w=350).speed_at(350) == 1.0
    assert len(simulated_boards(3)) == 3
    with pytest.raises(ValueError, match="at least 1"):
        simulated_boards(0)


def test_boards_in_a_file_are_seen_by_everybody(tmp_path: Path) -> None:
    path = tmp_path / "boards.json"
    create_file(path, [{}, {"model": "h100-sxm", "permitted": False, "temperature_c": 40.0}])
    first, second = open_file(path)
    assert first.name == "GPU 0 (simulated b200-sxm)" and second.model == "h100-sxm"
    first.set_limit_w(800)
    assert open_file(path)[0].limit_w() == 800 and open_file(path, [0])[0].read().limit_w == 800
    with pytest.raises(PowerError, match="permission denied"):
        second.set_limit_w(500)
    assert 40.0 <= second.read().temperature_c < second.read().slowdown_c
    assert second.range_w() == PowerRange(min_w=200, default_w=700, max_w=700)
    assert second.command(500) == "sudo nvidia-smi -i 1 -pl 500"
    with pytest.raises(ValueError, match=r"boards \[2\] are not in .*, which has 0 to 1"):
        open_file(path, [0, 2])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object of kind"),
        ('{"kind": "simulated boards", "schema": 2, "boards": [{}]}', "schema .2."),
        ('{"kind": "simulated boards", "schema": 1, "boards": []}', "has no boards"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "boards.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=why):
        open_file(path)


def test_boards_of_files_are_checked(tmp_path: Path) -> None:
    for value, why in (
        ({"wats": 3}, "wats unknown"),
        ({"model": "tpu"}, "not a published one"),
        ({"load": 2}, "load .2.0. must be 0 to 1"),
        ({"tau_s": "x"}, "board 0 of"),
    ):
        with pytest.raises(ValueError, match=why):
            create_file(tmp_path / "boards.json", [value])
    with pytest.raises(ValueError, match="cannot be read"):
        open_file(tmp_path / "none.json")
