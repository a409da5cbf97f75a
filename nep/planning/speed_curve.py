"""How fast a device computes under a power limit: a monotone, concave curve, fitted or published.

Concave, because above its efficient clock a chip pays for each further megahertz with more voltage; monotone, because
a higher limit never slows it down. A planner of watts needs nothing else: the same watts buy more on a slot with
a lower limit. Curves are of compute-bound training; a kernel that waits for memory or links gains less.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

# Slopes may exceed the one before by this share: knots that lie on one line are written down in decimals.
_SLACK = 1e-6


@dataclass(frozen=True)
class SpeedCurve:
    """Speed by power limit, linear between its knots and flat above the last.

    Below the first knot nothing is known and nothing is said: a planner stays above.

    Attributes:
        knots: (limit in W, speed), ascending; speeds in any one unit, for only ratios are used.
        source: where they are from.
    """

    knots: tuple[tuple[float, float], ...]
    source: str

    def __post_init__(self) -> None:
        errors = _problems(self.knots)
        if not self.source:
            errors.append("source ('') must say where the knots are from")
        if errors:
            raise ValueError("speed curve: " + "; ".join(errors))

    @property
    def lowest_w(self) -> int:
        """Lowest whole limit that the curve knows."""
        return math.ceil(self.knots[0][0])

    @property
    def highest_w(self) -> int:
        """From here on more watts bring nothing, as far as the curve knows."""
        return math.ceil(self.knots[-1][0])

    def speed(self, limit_w: float) -> float:
        """Speed under a limit.

        Raises:
            ValueError: the limit is below what the curve knows.
        """
        watts = self._watts
        if not limit_w >= watts[0]:
            raise ValueError(
                f"limit_w ({limit_w:g}) must be at least {watts[0]:g} W, where the curve begins; measure lower ones "
                "and fit again"
            )
        right = bisect.bisect_right(watts, limit_w)
        if right == len(watts):
            return self.knots[-1][1]
        (low_w, low), (high_w, high) = self.knots[right - 1], self.knots[right]
        return low + (high - low) * ((limit_w - low_w) / (high_w - low_w))

    def watts(self, speed: float) -> float | None:
        """Lowest limit with at least this speed; None if no limit has it. The first knot's watts for less than its
        speed."""
        if speed > self.knots[-1][1]:
            return None
        right = bisect.bisect_left(self._speeds, speed)
        if right == 0:
            return self.knots[0][0]
        (low_w, low), (high_w, high) = self.knots[right - 1], self.knots[right]
        return low_w + (high_w - low_w) * ((speed - low) / (high - low))

    @cached_property
    def _watts(self) -> list[float]:
        return [knot[0] for knot in self.knots]

    @cached_property
    def _speeds(self) -> list[float]:
        return [knot[1] for knot in self.knots]

    def scaled(self, *, from_w: float, to_w: float, source: str) -> SpeedCurve:
        """The same shape for a device whose limit of `to_w` is what `from_w` is to this one."""
        factor = to_w / from_w
        return SpeedCurve(tuple((watts * factor, speed) for watts, speed in self.knots), source)

    @classmethod
    def fit(cls, samples: Iterable[tuple[float, float]], *, source: str) -> SpeedCurve:
        """The monotone concave curve nearest to measurements, in squares.

        A concave rising function with knots at the samples' limits x_k is b + sum_k c_k min(x, x_k) with c_k >= 0, so
        the nearest one is a nonnegative least-squares problem (Lawson and Hanson).

        Args:
            samples: (limit in W, speed), in any order; several of one limit are averaged by their number.
            source: of the samples.

        Raises:
            ValueError: fewer than two limits, or numbers that are no measurement.
        """
        import numpy as np
        from scipy.optimize import nnls  # type: ignore[import-untyped]

        pairs = sorted((float(watts), float(speed)) for watts, speed in samples)
        bad = [pair for pair in pairs if not (_positive(pair[0]) and _positive(pair[1]))]
        if bad:
            raise ValueError(f"samples {bad} must be positive watts and speeds; leave out what was not measured")
        limits = sorted({watts for watts, _ in pairs})
        if len(limits) < 2:
            raise ValueError(f"samples of limits {limits} must be of at least two limits; measure another one")
        watts_s = np.array([watts for watts, _ in pairs])
        speed_s = np.array([speed for _, speed in pairs])
        lowest = limits[0]
        # Column 0 is the speed at the lowest limit, column k what each watt between there and limit k adds.
        basis_sk = np.concatenate(
            [
                np.ones((len(pairs), 1)),
                np.minimum(watts_s[:, None], np.array(limits[1:])[None, :]) - lowest,
            ],
            axis=1,
        )
        coefficients, _ = nnls(basis_sk, speed_s)
        knots = []
        for limit in limits:
            row = np.concatenate([[1.0], np.minimum(limit, np.array(limits[1:])) - lowest])
            knots.append((limit, float(row @ coefficients)))
        # A flat end says no more than its first knot; a curve that never rises has one knot too few.
        while len(knots) > 2 and knots[-1][1] <= knots[-2][1] * (1 + 1e-9):
            knots.pop()
        if not knots[0][1] > 0 or not knots[1][1] > knots[0][1] * (1 + 1e-9):
            raise ValueError(
                f"samples {pairs} do not rise with the limit; the device was not limited by power, measure lower limits"
            )
        return cls(tuple(knots), source)


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _problems(knots: tuple[tuple[float, float], ...]) -> list[str]:
    if len(knots) < 2:
        return [f"knots {knots} must be at least two"]
    if not all(_positive(watts) and _positive(speed) for watts, speed in knots):
        return [f"knots {knots} must be positive and finite"]
    errors = []
    if any(after[0] <= before[0] or after[1] <= before[1] for before, after in pairwise(knots)):
        errors.append(f"knots {knots} must rise in watts and speed; fit them from measurements with SpeedCurve.fit")
    else:
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(knots)]
        if any(after > before * (1 + _SLACK) for before, after in pairwise(slopes)):
            errors.append(f"knots {knots} must be concave; fit them from measurements with SpeedCurve.fit")
    return errors


_ZEUS = "BERT-base on SQuAD, batch 32, trace of github.com/ml-energy/zeus (commit 75a8b93)"
_BORROWED = "shape of V100 ({zeus}), its 250 W taken for the default of {default:g} W; not measured on this device"

V100 = SpeedCurve(
    ((100, 0.484), (125, 0.634), (150, 0.780), (175, 0.894), (200, 0.940), (225, 0.976), (250, 1.0)),
    f"measured: {_ZEUS}",
)
A40 = SpeedCurve(
    ((150, 0.573), (175, 0.786), (200, 0.885), (225, 0.940), (250, 0.973), (275, 0.996), (300, 1.0)),
    f"measured: {_ZEUS}",
)
RTX6000 = SpeedCurve(
    ((100, 0.368), (125, 0.625), (150, 0.772), (175, 0.859), (200, 0.922), (225, 0.963), (250, 0.995), (260, 1.0)),
    f"measured: {_ZEUS}",
)


def _borrowed(default_w: float) -> SpeedCurve:
    return V100.scaled(from_w=250, to_w=default_w, source=_BORROWED.format(zeus=_ZEUS, default=default_w))


def boosted(default_w: float, max_w: float) -> SpeedCurve:
    """A device whose default limit lies well below what it could use, as with a set point that leaves headroom.

    Above the default: performance per watt falls by 2.8 % at 1.1 times the power and by 6.5 % at 1.2 times (NTP, arXiv
    2504.06095), and on by the same second difference, which is extrapolated: 11.1 % at 1.3 times, 16.6 % at 1.4 times.
    Below: V100's curve from the point on where its slope is as steep, 175 W.

    Args:
        default_w: its default limit.
        max_w: its highest one.

    Raises:
        ValueError: the default is above the maximum.
    """
    if not 0 < default_w <= max_w:
        raise ValueError(f"default_w ({default_w:g}) must be above 0 and at most max_w ({max_w:g})")
    reference = V100.speed(175)
    below = [(watts / 175, speed / reference) for watts, speed in V100.knots if watts < 175]
    shape = SpeedCurve(
        (*below, (1.0, 1.0), *((ratio, ratio * (1 - loss)) for ratio, loss in _LOSS_PER_WATT)), "relative to default"
    )
    most = max_w / default_w
    ratios = [ratio for ratio, _ in shape.knots if ratio < most]
    if ratios[-1] < most <= shape.knots[-1][0]:
        ratios.append(most)
    return SpeedCurve(
        tuple((ratio * default_w, shape.speed(ratio)) for ratio in ratios),
        f"NTP (arXiv 2504.06095) at 1.1 and 1.2 times the default, extrapolated above; below shape of V100 ({_ZEUS}) "
        f"from 175 W; not measured on this device (default {default_w:g} W)",
    )


_LOSS_PER_WATT = ((1.1, 0.028), (1.2, 0.065), (1.3, 0.111), (1.4, 0.166))

CURVES: Mapping[str, SpeedCurve] = MappingProxyType(
    {
        "v100": V100,
        "a40": A40,
        "rtx6000": RTX6000,
        "a100-80gb-sxm": _borrowed(400),
        "h100-sxm": _borrowed(700),
        "h200-sxm": _borrowed(700),
        "b200-sxm": boosted(700, 1000),
        "gb200-nvl72": _borrowed(1200),
    }
)
"""Curves by name; those of accelerators that `nep.planning.cost.profiles` knows are named as there."""

DEFAULT_W: Mapping[str, int] = MappingProxyType(
    {
        "v100": 250,
        "a40": 300,
        "rtx6000": 260,
        "a100-80gb-sxm": 400,
        "h100-sxm": 700,
        "h200-sxm": 700,
        "b200-sxm": 700,
        "gb200-nvl72": 1200,
    }
)
"""Default limits of the devices of `CURVES`."""

# The longer name first: a GB200 is no B200.
_IN_PRODUCT_NAMES = (
    ("gb200", "gb200-nvl72"),
    ("b200", "b200-sxm"),
    ("h200", "h200-sxm"),
    ("h100", "h100-sxm"),
    ("a100", "a100-80gb-sxm"),
    ("v100", "v100"),
    ("a40", "a40"),
    ("rtx 6000", "rtx6000"),
)


def curve_of(name: str) -> SpeedCurve:
    """The curve of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in CURVES:
        raise ValueError(
            f"curve ({name!r}) is not a published one; choose one of {', '.join(CURVES)} or give a file with measured "
            "limits and speeds"
        )
    return CURVES[name]


def curve_for_product(product: str) -> str | None:
    """Name of the curve for a board, by the name that its driver gives it (`NVIDIA H100 80GB HBM3`); None if there is
    none."""
    lowered = product.lower()
    return next((name for part, name in _IN_PRODUCT_NAMES if part in lowered), None)


def curve_for_limits(name: str, *, default_w: int, max_w: int) -> SpeedCurve:
    """A published curve for a board with limits of its own.

    The shape is scaled to the board's default limit. Where the board goes further than the curve's device, whose
    default is its highest limit, the curve is one that goes on (`boosted`).

    Raises:
        ValueError: there is no such curve.
    """
    curve = curve_of(name)
    factor = default_w / DEFAULT_W[name]
    if max_w > max(curve.highest_w * factor, default_w):
        return boosted(default_w, max_w)
    if factor == 1:
        return curve
    return curve.scaled(from_w=DEFAULT_W[name], to_w=default_w, source=f"{curve.source}; scaled to {default_w} W")
