"""Speed-power curves: fits of measurements, and what every curve promises."""

import contextlib
import csv
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cost.profiles import PROFILES
from nep.planning.speed_curve import A40, CURVES, V100, SpeedCurve, boosted, curve_of

SAMPLES = st.lists(
    st.tuples(st.integers(100, 1000), st.floats(0.05, 50, allow_nan=False)), min_size=2, max_size=12
).filter(lambda pairs: len({watts for watts, _ in pairs}) > 1)


def _check_shape(curve: SpeedCurve) -> None:
    watts = range(curve.lowest_w, curve.highest_w + 50, 9)
    speeds = [curve.speed(limit) for limit in watts]
    rises = [after - before for before, after in pairwise(speeds)]
    assert min(rises) >= 0
    assert all(after <= before + 1e-9 * speeds[-1] for before, after in pairwise(rises))


@pytest.mark.parametrize("name", CURVES)
def test_published_curves_rise_and_are_concave(name: str) -> None:
    _check_shape(curve_of(name))


@given(SAMPLES)
def test_a_fit_rises_and_is_concave_whatever_was_measured(samples: list[tuple[int, float]]) -> None:
    limits = sorted({watts for watts, _ in samples})
    means = [statistics.fmean(speed for watts, speed in samples if watts == limit) for limit in limits]
    if all(after <= before for before, after in pairwise(means)):
        with pytest.raises(ValueError, match="do not rise"):
            SpeedCurve.fit(samples, source="test")
    else:
        with contextlib.suppress(ValueError):  # the nearest rising curve may still be a flat one
            _check_shape(SpeedCurve.fit(samples, source="test"))


@given(st.floats(0.01, 1), st.lists(st.floats(1e-4, 1e-2), min_size=2, max_size=8))
def test_a_fit_of_points_on_a_curve_is_that_curve(first: float, slopes: list[float]) -> None:
    knots = [(100.0, first)]
    for slope in sorted(slopes, reverse=True):
        knots.append((knots[-1][0] + 25, knots[-1][1] + 25 * slope))
    curve = SpeedCurve.fit(knots, source="test")
    for watts, speed in knots:
        assert curve.speed(watts) == pytest.approx(speed, rel=1e-9)


def test_a_fit_is_nearer_than_other_concave_curves() -> None:
    # The samples dip at 200 W: the nearest concave curve shares the error out; moving any knot makes it larger.
    samples = [(100, 0.5), (150, 0.8), (200, 0.78), (250, 0.95), (300, 1.0)]
    curve = SpeedCurve.fit(samples, source="test")

    def error(knots: tuple[tuple[float, float], ...]) -> float:
        other = SpeedCurve(knots, "test")
        return sum((other.speed(watts) - speed) ** 2 for watts, speed in samples)

    best = error(curve.knots)
    tried = 0
    for index in range(len(curve.knots)):
        for step in (-1e-3, 1e-3):
            moved = list(curve.knots)
            moved[index] = (moved[index][0], moved[index][1] + step)
            try:
                assert error(tuple(moved)) > best
                tried += 1
            except ValueError:
                continue  # no longer concave
    assert tried


def test_watts_is_the_inverse_of_speed() -> None:
    for curve in CURVES.values():
        for limit in range(curve.lowest_w, curve.highest_w + 1, 7):
            assert curve.watts(curve.speed(limit)) == pytest.approx(limit)
        assert curve.watts(curve.speed(curve.highest_w) * 1.001) is None
        assert curve.watts(1e-6) == curve.knots[0][0]


def test_boost_has_the_published_loss_per_watt() -> None:
    curve = boosted(700, 1000)
    for ratio, loss in ((1.1, 0.028), (1.2, 0.065)):
        assert curve.speed(700 * ratio) / curve.speed(700) / ratio == pytest.approx(1 - loss)
    # A board that ends before the published points keeps the curve up to its end.
    assert boosted(700, 910).speed(910) == pytest.approx(curve.speed(910))
    assert boosted(700, 700).speed(700) == pytest.approx(1.0)


def test_profiles_have_curves_that_reach_their_default_limit() -> None:
    for name, profile in PROFILES.items():
        curve = curve_of(name)
        assert curve.lowest_w < profile.default_power_w <= curve.highest_w


def test_bad_curves_are_refused() -> None:
    for knots, why in (
        (((100.0, 1.0),), "at least two"),
        (((100.0, 1.0), (200.0, 0.9)), "must rise"),
        (((200.0, 1.0), (100.0, 1.1)), "must rise"),
        (((100.0, 0.1), (200.0, 0.2), (300.0, 1.0)), "concave"),
        (((100.0, -0.1), (200.0, 0.2)), "positive"),
    ):
        with pytest.raises(ValueError, match=why):
            SpeedCurve(knots, "test")
    with pytest.raises(ValueError, match="at least 100 W, where the curve begins"):
        V100.speed(99)
    with pytest.raises(ValueError, match="at least two limits"):
        SpeedCurve.fit([(100, 1.0), (100, 1.1)], source="test")
    with pytest.raises(ValueError, match="positive watts and speeds"):
        SpeedCurve.fit([(100, 1.0), (200, 0.0)], source="test")
    with pytest.raises(ValueError, match="do not rise"):
        SpeedCurve.fit([(100, 1.0), (200, 0.5)], source="test")
    with pytest.raises(ValueError, match="not a published one; choose one of v100"):
        curve_of("tpu")


@pytest.mark.parametrize(("device", "curve"), [("v100", V100), ("a40", A40)])
def test_real_measurements(data_dir: Path, device: str, curve: SpeedCurve) -> None:
    """BERT training of Zeus at every batch size: fits are within 3 % of the points, presets are these points."""
    rows = list(csv.DictReader((data_dir / "zeus_power" / f"summary_power_{device}.csv").open()))
    bert = [row for row in rows if row["dataset"] == "squad"]
    sizes = {row["batch_size"] for row in bert}
    assert len(sizes) >= 6
    for size in sizes:
        points = sorted(
            (float(row["power_limit"]), 1 / float(row["time_per_epoch"])) for row in bert if row["batch_size"] == size
        )
        points = [point for point in points if point[0] >= curve.lowest_w]
        fit = SpeedCurve.fit(points, source="zeus")
        for watts, speed in points:
            assert fit.speed(watts) == pytest.approx(speed, rel=0.03)
        if size == "32":
            for watts, speed in points:
                assert curve.speed(watts) == pytest.approx(speed / points[-1][1], abs=6e-4)
