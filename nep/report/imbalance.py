"""Load imbalance over time, with and without a rebalancer, as a plot."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 360, 62, 16, 34, 46
_COLORS = ("#b3261e", "#1b5e9c", "#2e7d32", "#7b5ea7")
_TICKS = 5


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of the plot.

    Attributes:
        name: for the legend.
        values: one per step; NaN where it is not known.
    """

    name: str
    values: Floats


def expert_imbalance(counts: Floats) -> Floats:
    """The busiest expert's tokens over the mean, mean over layers: what the router alone does, [steps]."""
    means = np.maximum(counts.mean(axis=2), 1e-30)
    return np.asarray((counts.max(axis=2) / means).mean(axis=1))


def smoothed(values: Floats, window: int) -> Floats:
    """Mean of each step and those before it, so many in all."""
    if window < 1:
        raise ValueError(f"window ({window}) must be at least 1 step")
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    there = counts[ends] - counts[starts]
    return np.where(there > 0, (sums[ends] - sums[starts]) / np.maximum(there, 1), np.nan)


def plot_svg(series: Sequence[Series], *, title: str, y_label: str) -> str:
    """A plot as SVG, without any library.

    Args:
        series: lines; they may differ in length.
        title: above it.
        y_label: of the upright axis.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not series or not all(np.isfinite(one.values).any() for one in series):
        raise ValueError("a plot needs one line or more, each with a step or more")
    steps = max(len(one.values) for one in series)
    low = min([1.0, *(float(np.nanmin(one.values)) for one in series)])
    high = max(float(np.nanmax(one.values)) for one in series)
    high = low + max(high - low, 0.1) * 1.08

    def x_of(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - 1) / max(steps - 1, 1)

    def y_of(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-weight="bold">{html.escape(title)}</text>',
    ]
    for index in range(_TICKS + 1):
        value = low + (high - low) * index / _TICKS
        y = y_of(value)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        step = 1 + (steps - 1) * index / _TICKS
        parts.append(
            f'<text x="{x_of(step):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{round(step)}</text>'
        )
    parts.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">step</text>')
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{html.escape(y_label)}'
        "</text>"
    )
    for index, one in enumerate(series):
        color = _COLORS[index % len(_COLORS)]
        points = " ".join(
            f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in enumerate(one.values.tolist(), 1) if value == value
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        x = _WIDTH - _RIGHT - 250
        y = _TOP + 14 + 18 * index
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 28}" y="{y}">{html.escape(one.name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
