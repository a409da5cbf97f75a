"""Setting limits of several boards: order, refusals, and putting them back."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nep.power.controller import PowerController
from nep.power.device import PowerError
from nep.power.simulated import SimulatedDevice
from nep.power.simulated_file import create_file, open_file, simulated_boards
from nep.power.source import DeviceSource


def boards(count: int = 3) -> dict[int, SimulatedDevice]:
    return dict(enumerate(simulated_boards(count)))


def limits(devices: dict[int, SimulatedDevice]) -> list[float]:
    return [device.limit_w() for device in devices.values()]


class Watched(SimulatedDevice):
    """Writes down the sum of all limits after each change."""

    seen: Callable[[], None]

    def set_limit_w(self, limit_w: float) -> None:
        super().set_limit_w(limit_w)
        self.seen()


def test_limits_are_set_and_put_back() -> None:
    devices = boards()
    devices[1].chip.limit_w = 650  # somebody's choice before the job
    with PowerController(devices) as controller:
        result = controller.set_limits({0: 800, 1: 600, 2: 700})
        assert result.complete and result.set_w == {0: 800, 1: 600, 2: 700}
        assert limits(devices) == [800, 600, 700]
        controller.set_limits({1: 620})
        assert limits(devices) == [800, 620, 700]
        assert controller.original_w == {0: 700, 1: 650}
    assert limits(devices) == [700, 650, 700]
    controller.restore()
    assert limits(devices) == [700, 650, 700]


def test_an_exception_puts_limits_back() -> None:
    devices = boards()

    def fail() -> None:
        with PowerController(devices) as controller:
            controller.set_limits({0: 800})
            assert limits(devices) == [800, 700, 700]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert limits(devices) == [700, 700, 700]


def test_what_goes_down_goes_first_and_comes_back_last() -> None:
    sums: list[float] = []
    devices = {slot: Watched(index=slot, chip=device.chip, clock=device.clock) for slot, device in boards(4).items()}
    for device in devices.values():
        device.seen = lambda: sums.append(sum(limits(devices)))
    with PowerController(devices) as controller:
        assert controller.set_limits({0: 900, 1: 500, 2: 900, 3: 500}).complete
        assert controller.set_limits({0: 500, 1: 900}).complete
    assert len(sums) == 4 + 2 + 4
    # Never more than the four defaults together, not even between two boards.
    assert max(sums) == 2800 and limits(devices) == [700] * 4


def test_if_one_cannot_be_lowered_none_is_raised() -> None:
    devices = boards()
    devices[2].permitted = False
    with PowerController(devices) as controller:
        result = controller.set_limits({0: 900, 1: 600, 2: 500})
        assert result.set_w == {1: 600}
        assert [(refusal.slot, refusal.kind) for refusal in result.refused] == [(2, "permission"), (0, "world")]
        assert "not raised to 900 W, since slots [2] could not be lowered first" in result.refused[1].text
        assert result.commands == ("sudo nvidia-smi -i 2 -pl 500", "sudo nvidia-smi -i 0 -pl 900")
    assert limits(devices) == [700, 700, 700]


def test_a_lost_board_stops_raising_but_not_lowering() -> None:
    devices = boards()
    devices[0].lost = True
    with PowerController(devices) as controller:
        result = controller.set_limits({0: 500, 1: 600, 2: 900})
        assert result.set_w == {1: 600}
        assert [refusal.kind for refusal in result.refused] == ["lost", "world"]
        devices[1].lost = True
        with pytest.raises(PowerError, match=r"not all restored: GPU 1 .* fallen off the bus"):
            controller.restore()


def test_without_permission_there_is_advice_and_no_process(tmp_path: Path) -> None:
    path = tmp_path / "boards.json"
    create_file(path, [{"permitted": False}, {"permitted": False}])
    controller = PowerController(
        dict(enumerate(open_file(path))), source=DeviceSource(kind="simulated", path=str(path))
    )
    assert controller.commands({0: 600, 1: 800}) == ("sudo nvidia-smi -i 0 -pl 600", "sudo nvidia-smi -i 1 -pl 800")
    result = controller.set_limits({0: 600, 1: 800})
    assert not result.set_w and not result.complete
    assert {refusal.kind for refusal in result.refused} == {"permission", "world"}
    assert set(result.commands) == set(controller.commands({0: 600, 1: 800}))
    # There is nothing to restore, so nobody waits for it.
    assert controller.guard_pid is None and controller.original_w == {}
    controller.restore()


def test_a_limit_of_somebody_else_stays() -> None:
    devices = boards()
    controller = PowerController(devices)
    controller.set_limits({0: 800, 1: 800})
    devices[1].set_limit_w(550)
    with pytest.raises(PowerError, match="its limit is 550 W, which somebody else has set; left as it is"):
        controller.restore()
    assert limits(devices) == [700, 550, 700]


def test_input_that_cannot_be_changes_nothing() -> None:
    devices = boards()
    controller = PowerController(devices)
    with pytest.raises(ValueError, match=r"slots \[7\] are not of this controller; it has \[0, 1, 2\]"):
        controller.set_limits({0: 800, 7: 800})
    with pytest.raises(ValueError, match=r"limit_w of GPU 2 .* \(1001\) must be whole watts from 200 to 1000"):
        controller.set_limits({0: 800, 2: 1001})
    with pytest.raises(ValueError, match="must be whole watts"):
        controller.set_limits({0: 800.5})  # type: ignore[dict-item]
    assert limits(devices) == [700, 700, 700]
    assert controller.ranges_w()[0].headroom == pytest.approx(10 / 7)
