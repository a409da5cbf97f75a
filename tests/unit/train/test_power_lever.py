"""Watts as a lever of a running job: who sets what and when, and who is told if it cannot be."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nep.fault_tolerance.control_store import power_board_key, power_limit_key
from nep.planning.cluster import Cluster
from nep.planning.cost.hardware import HardwareProfile
from nep.planning.planner import plan_after_failure
from nep.power.device import PowerDevice
from nep.power.simulated import SimulatedDevice
from nep.power.simulated_file import simulated_boards
from nep.train.balance_config import BalanceConfig
from nep.train.power import SlotPower
from nep.train.power_config import Mode, PowerConfig
from nep.train.power_facts import BoardFacts, LimitTold, Offer
from tests.unit.train.test_rebalance import LINES, SLOTS, Job, Store

PROFILE = HardwareProfile(name="free links", flops_per_s={8: 1e9})


class SharedBoards(PowerConfig):
    """Boards of arithmetic that the test sees, too."""

    boards: tuple[SimulatedDevice, ...] = ()

    def open(self, board: int | str, local_index: int) -> PowerDevice:
        return self.boards[local_index]


def config_of(boards: tuple[SimulatedDevice, ...], mode: Mode = "apply", **others: Any) -> SharedBoards:
    config = SharedBoards(mode=mode, source="simulated", **others)
    object.__setattr__(config, "boards", boards)
    return config


def until(true: Callable[[], bool], act: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "in vain"
        act()
        time.sleep(0.002)


class Powers:
    """The slots of one node."""

    def __init__(self, boards: tuple[SimulatedDevice, ...], config: PowerConfig | None = None) -> None:
        self.store: Any = Store()
        self.said: list[str] = []
        self.slots = [
            SlotPower(config or config_of(boards), slot=slot, local_index=slot, board=slot, announce=self.said.append)
            for slot in range(len(boards))
        ]
        until(lambda: all(power_limit_key(slot) in self.store for slot in range(len(boards))), self.poll)

    def poll(self) -> None:
        for slot in self.slots:
            slot.poll(self.store)

    def order(self, name: str, limits_w: dict[int, int], before_w: dict[int, int]) -> None:
        for slot in self.slots:
            slot.order(name, limits_w, before_w, frozenset(range(len(self.slots))))

    def told(self, slot: int) -> LimitTold:
        return LimitTold.from_json(self.store[power_limit_key(slot)])

    def finish(self) -> None:
        for slot in self.slots:
            slot.finish()


def test_what_goes_up_waits_for_what_goes_down() -> None:
    boards = simulated_boards(2)
    powers = Powers(boards)
    powers.order("a", {0: 800, 1: 600}, {0: 700, 1: 700})
    for _ in range(3):
        powers.slots[0].poll(powers.store)
    assert boards[0].limit_w() == 700, "slot 1 has not said that its limit is down"
    until(lambda: powers.told(0).order == "a", powers.poll)
    assert [board.limit_w() for board in boards] == [800, 600] and powers.told(1).limit_w == 600
    powers.slots[0].release()
    until(lambda: powers.told(0).limit_w == 700, powers.poll)
    assert powers.told(0).order == ""
    powers.finish()
    assert [board.limit_w() for board in boards] == [700, 700] and not powers.said


def test_what_cannot_go_down_keeps_others_from_going_up() -> None:
    boards = simulated_boards(2)
    powers = Powers(boards)
    boards[1].permitted = False
    powers.order("a", {0: 800, 1: 600}, {0: 700, 1: 700})
    until(lambda: len(powers.said) == 2, powers.poll)
    assert "sudo nvidia-smi -i 1 -pl 600" in powers.said[0] and "training goes on" in powers.said[0]
    assert powers.said[1] == "power: not raised to 800 W, since slot 1 could not be lowered first"
    powers.finish()
    assert [board.limit_w() for board in boards] == [700, 700]


def test_a_refusal_is_known_to_the_next_plan_and_facts_are_of_before() -> None:
    boards = simulated_boards(4)
    boards[1].permitted = False
    powers = Powers(boards)
    powers.order("a", dict.fromkeys(range(3), 880), dict.fromkeys(range(3), 700))
    until(lambda: all(powers.told(slot).order == "a" for slot in range(3)), powers.poll)
    plan = plan_after_failure(Job(BalanceConfig()).plan, Cluster.uniform(4, 4).fail([3]), LINES)
    offer = Offer.make(powers.store, config_of(boards), Cluster.uniform(4, 4).fail([3]), plan, 4)
    assert offer.in_force_w == {0: 880, 1: 700, 2: 880, 3: 700}
    # The faster half is that of the raised ones; in units of before, they are faster and the other one is not slower.
    speeds = offer.speeds_at_first({0: 1_000_000, 1: 870_000, 2: 1_000_000})
    assert speeds[0] == speeds[2] == pytest.approx(1_150_000, rel=0.02) and speeds[1] == pytest.approx(1e6, rel=0.02)
    assert Offer.make(powers.store, config_of(boards), Cluster.uniform(4, 4), plan, 3).boards.keys() == {0, 1, 2}
    offer.boost(plan, speeds)
    assert offer.boost.latest is not None and offer.boost.latest.limits_w[1] == 700
    # A trainer that comes back finds its board raised by the one before, and does not take that for its own limit.
    again = SlotPower(config_of(boards), slot=0, local_index=0, board=0, announce=powers.said.append)
    until(lambda: powers.told(0).order == "", lambda: again.poll(powers.store))
    assert BoardFacts.from_json(powers.store[power_board_key(0)]).limit_w == 700 and powers.told(0).limit_w == 880
    again.finish()
    powers.finish()


def test_without_all_boards_there_is_no_lever() -> None:
    boards = simulated_boards(4)
    boards[2].lost = True
    powers = Powers.__new__(Powers)
    powers.store, powers.said = Store(), []
    powers.slots = [
        SlotPower(config_of(boards), slot=slot, local_index=slot, board=slot, announce=powers.said.append)
        for slot in range(3)
    ]
    until(lambda: all(power_board_key(slot) in powers.store for slot in range(3)), powers.poll)
    plan = Job(BalanceConfig()).plan
    with pytest.raises(ValueError, match=r"slot 2 \(.*fallen off the bus.*, slot 3 \(it has told of no board yet"):
        Offer.make(powers.store, config_of(boards), Cluster.uniform(4, 4), plan, 4)
    assert len(powers.said) == 1 and "without watts as a lever" in powers.said[0]
    powers.finish()


def make_job(boards: tuple[SimulatedDevice, ...], mode: Mode) -> Job:
    """Two replicas of two slots, of which slot 3 has just died."""
    job = Job(BalanceConfig(compensate="auto", hardware=PROFILE, power=config_of(boards, mode)), replicas=2)
    job.store.get = dict.get.__get__(job.store)  # type: ignore[method-assign]
    cluster = Cluster.uniform(SLOTS, SLOTS).fail([3])
    job.plan = plan_after_failure(job.plan, cluster, LINES)
    job.trainers, job.balances, job.generation, job.noise = job.trainers[:3], job.balances[:3], 2, 0.0
    for slot, trainer in enumerate(job.trainers):
        trainer.members, trainer.run_state.cluster = (0, 1, 2), cluster
        trainer.run_state.job = SimpleNamespace(
            num_slots=SLOTS, slot=slot, local_index=slot, connect=lambda: job.store
        )  # fmt: skip
    job.run(1)
    dead = SlotPower(config_of(boards), slot=3, local_index=3, board=3, announce=job.said.append)
    until(lambda: power_limit_key(3) in job.store, lambda: dead.poll(job.store))  # before it died
    for balance in job.balances:
        until(lambda balance=balance: balance.power._slot.facts is not None, balance.power.poll)  # type: ignore[misc]
    return job


def test_all_slots_set_the_limits_of_a_plan_and_give_them_up_for_one_that_comes_back() -> None:
    boards = simulated_boards(SLOTS)
    job = make_job(boards, "apply")
    job.run(6)
    (change,) = job.balances[2].adjustments
    assert change.what == "power" and change.limits_w[2] > change.before_w[2] == 700
    until(
        lambda: boards[2].limit_w() == change.limits_w[2], lambda: [one.power.poll() for one in job.balances] and None
    )
    assert sum(board.limit_w() for board in boards[:3]) <= SLOTS * 700 - 150
    assert job.trainers[1].run_state.cluster.speeds_ppm[2] > 1_000_000
    job.balances[0].power.welcome()
    assert job.trainers[0].run_state.cluster.speeds_ppm[2] == 1_000_000, "for the next plan"
    for trainer in job.trainers:
        trainer.members = (0, 1, 2, 3)
    job.generation = 3
    job.run(1)
    until(lambda: boards[2].limit_w() == 700)
    for balance in job.balances:
        balance.power.finish()


def test_advice_changes_nothing_and_names_the_commands() -> None:
    boards = simulated_boards(SLOTS)
    job = make_job(boards, "advise")
    job.run(8)
    (line,) = [line for line in job.said if "advice: " in line]
    assert "slot 2 700 -> " in line and "slot 2: sudo nvidia-smi -i 2 -pl " in line
    assert not any(change.limits_w for change in job.balances[0].adjustments)
    assert [board.limit_w() for board in boards] == [700] * SLOTS
    for balance in job.balances:
        balance.power.finish()


def test_every_problem_of_the_config_is_named(tmp_path: Path) -> None:
    config = PowerConfig(mode="apply", source=f"simulated:{tmp_path / 'none'}", budget_w=0, failed_draw_w=-1)
    problems = "; ".join(config.problems("off"))
    for text in ("--compensate auto", "power_budget_w (0)", "power_failed_draw_w (-1)", "cannot be read"):
        assert text in problems
    assert "must be nvml, simulated" in PowerConfig(source="nvlm").problems("auto")[0]
    assert not PowerConfig(mode="advise").problems("auto")
