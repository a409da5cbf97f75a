"""The pace of slots: the slow one is found, skewed work slows nobody."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from nep.planning.pace import PaceChange, PaceConfig, PaceMeter, fit_prices

Floats = NDArray[np.float64]
PRICES = np.array([0.03, 1e-9, 1.4e-9])


def skewed_work(random: np.random.Generator, num_slots: int, drift: float) -> Floats:
    """Rounds, dense and expert work; experts' by a skewed share that wanders."""
    share = random.dirichlet(np.full(num_slots, 4.0)) * (1 - drift) + random.dirichlet(np.full(num_slots, 4.0)) * drift
    return np.stack([np.full(num_slots, 4.0), np.full(num_slots, 2e8), 8e8 * share * num_slots / 2], axis=1)


def run(
    seed: int, *, num_slots: int = 8, slow: dict[int, tuple[int, float]] | None = None, noise: float = 0.03,
    steps: int = 60, config: PaceConfig | None = None,
) -> tuple[PaceMeter, list[PaceChange]]:  # fmt: skip
    """Steps in which the work of slots is skewed and wanders; `slow`: slot -> (first slow step, factor)."""
    random = np.random.default_rng(seed)
    base = random.dirichlet(np.full(num_slots, 2.0))
    meter, changes = PaceMeter(config), []
    for step in range(1, steps + 1):
        share = 0.9 * base + 0.1 * random.dirichlet(np.full(num_slots, 2.0))
        base = 0.98 * base + 0.02 * random.dirichlet(np.full(num_slots, 2.0))
        work = np.stack([np.full(num_slots, 4.0), np.full(num_slots, 2e8), 8e8 * share * num_slots / 2], axis=1)
        seconds = work @ PRICES * np.exp(random.normal(0, noise, num_slots))
        for slot, (first, factor) in (slow or {}).items():
            seconds[slot] *= factor if step >= first else 1.0
        changes += meter.observe(dict(enumerate(seconds.tolist())), dict(enumerate(work.tolist())))
    return meter, changes


@pytest.mark.parametrize("seed", range(6))
def test_the_slot_that_becomes_slower_is_found_within_5_steps_and_no_other(seed: int) -> None:
    noise = (0.01, 0.03, 0.05)[seed % 3]
    meter, changes = run(seed, slow={seed % 8: (30, 1.3)}, noise=noise)
    assert [change.slot for change in changes] == [seed % 8]
    assert 30 <= changes[0].step <= 34
    assert meter.flagged.keys() == {seed % 8}
    assert meter.speeds_ppm()[seed % 8] == pytest.approx(1e6 / 1.3, rel=0.05)


@pytest.mark.parametrize("seed", range(6))
def test_skewed_routing_alone_flags_nobody(seed: int) -> None:
    meter, changes = run(seed, steps=100, noise=(0.01, 0.03, 0.05)[seed % 3])
    assert not changes and not meter.flagged
    assert all(speed == pytest.approx(1e6, rel=0.06) for speed in meter.speeds_ppm().values())


def test_the_same_skew_taken_for_equal_work_would_flag_somebody() -> None:
    """Otherwise the test above would prove nothing."""
    random, meter, found = np.random.default_rng(0), PaceMeter(), []
    share = random.dirichlet(np.full(8, 2.0))
    for _ in range(20):
        work = np.stack([np.full(8, 4.0), np.full(8, 2e8), 8e8 * share * 4], axis=1)
        seconds = work @ PRICES
        found += meter.observe(dict(enumerate(seconds.tolist())), dict.fromkeys(range(8), (0.0, 1.0, 0.0)))
    assert found


@pytest.mark.parametrize(("num_slots", "slow"), [(2, {1: 1.3}), (4, {0: 1.3, 2: 1.6}), (3, {1: 2.0}), (16, {5: 1.3})])
def test_any_number_of_slots_up_to_half_of_them_slow(num_slots: int, slow: dict[int, float]) -> None:
    _, changes = run(1, num_slots=num_slots, slow={slot: (20, factor) for slot, factor in slow.items()})
    assert {change.slot for change in changes} == slow.keys()
    assert all(20 <= change.step <= 25 for change in changes)


def test_a_slot_that_is_slow_from_the_beginning_and_one_that_recovers() -> None:
    meter, changes = run(3, slow={2: (1, 1.5), 4: (20, 1.5)}, noise=0.02)
    assert [change.slot for change in changes] == [2, 4] and changes[0].step <= 6
    random = np.random.default_rng(0)
    for _ in range(8):
        work = skewed_work(random, 8, 0.1)
        seconds = work @ PRICES
        seconds[2] *= 1.5
        changes += meter.observe(dict(enumerate(seconds.tolist())), dict(enumerate(work.tolist())))
    assert [change.slot for change in changes] == [2, 4, 4] and changes[-1].after == pytest.approx(1.0, abs=0.1)
    assert meter.flagged.keys() == {2}


def test_a_hiccup_and_what_slows_all_slots_alike_are_no_change_of_pace() -> None:
    random, meter = np.random.default_rng(5), PaceMeter()
    for step in range(40):
        work = skewed_work(random, 8, 0.1)
        seconds = work @ PRICES * np.exp(random.normal(0, 0.02, 8)) * (2.0 if step > 20 else 1.0)
        if step in (10, 30):
            seconds[3] *= 5
        assert not meter.observe(dict(enumerate(seconds.tolist())), dict(enumerate(work.tolist())))


def test_loud_measurements_raise_the_threshold() -> None:
    _, changes = run(7, noise=0.25, steps=150)
    assert not changes
    _, changes = run(7, noise=0.25, steps=80, slow={1: (40, 3.0)})
    assert [change.slot for change in changes] == [1] and changes[0].step <= 46


def test_prices_are_found_where_work_differs() -> None:
    random = np.random.default_rng(0)
    works = np.stack([random.uniform(1, 8, 200), random.uniform(1e8, 4e8, 200), random.uniform(1e8, 9e8, 200)], axis=1)
    assert fit_prices(works, works @ PRICES) == pytest.approx(PRICES, rel=0.1)
    # All slots alike tell nothing: every kind costs the same.
    same = np.tile([0.0, 1e8, 3e8], (50, 1))
    assert fit_prices(same, np.full(50, 0.4))[1:] == pytest.approx([1e-9, 1e-9], rel=0.01)


def test_who_leaves_is_forgotten_and_a_change_of_plan_keeps_speeds() -> None:
    meter, _ = run(1, slow={2: (10, 1.5)}, steps=30)
    speeds = meter.speeds_ppm()
    meter.restart()
    assert meter.speeds_ppm() == speeds and meter.flagged.keys() == {2}
    work = dict.fromkeys((0, 1, 3), (4.0, 2e8, 4e8))
    for _ in range(2):
        meter.observe(dict.fromkeys(work, 1.0), work)
    assert set(meter.speeds_ppm()) == {0, 1, 3} and not meter.flagged


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_impossible_measurements_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"slots \[1\] must be finite"):
        PaceMeter().observe({0: 1.0, 1: bad}, {0: (1.0, 1.0), 1: (1.0, 1.0)})
    with pytest.raises(ValueError, match="same slots"):
        PaceMeter().observe({0: 1.0}, {1: (1.0, 1.0)})
    with pytest.raises(ValueError, match="threshold"):
        PaceConfig(threshold=0.0)
