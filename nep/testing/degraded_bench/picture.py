"""Draws shares by number of failed slots, as an SVG of lines. No plotting package: a few lines and words."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from nep.testing.degraded_bench.failures import WHERE
from nep.testing.emulation.setting import LABEL

Shares = Mapping[str, Mapping[str, Any]]
"""Policy -> number of failed slots -> what `Share.to_json` says."""

_WIDTH, _HEIGHT = 300, 200
_LEFT, _TOP, _BOTTOM, _GAP = 44, 44, 36, 36
_LEAST = 0.3
_COLORS = ("#999999", "#c77", "#b22222", "#e08214", "#80b1d3", "#2166ac", "#1a9850", "#762a83", "#111111")


def picture(failed: Mapping[str, Mapping[str, Shares]]) -> str:
    """Samples per second over those of the healthy job, one panel for each job; failures in one replica.

    Args:
        failed: job -> where -> shares; at least one job.
    """
    shares = {job: by_where[WHERE[0]] for job, by_where in failed.items()}
    panels = [_panel(job, own, _LEFT + index * (_WIDTH + _GAP)) for index, (job, own) in enumerate(shares.items())]
    policies = list(next(iter(shares.values())))
    x = _LEFT + len(shares) * (_WIDTH + _GAP) - _GAP + 16
    legend = [
        f'<g transform="translate({x},{_TOP + 10 + 20 * index})"><path d="M0 0h18" stroke="{_color(index)}" '
        f'stroke-width="2"/><text x="24" y="4">{escape(policy)}</text></g>'
        for index, policy in enumerate(["as many as live slots", *policies])
    ]
    width, height = x + 190, _TOP + _HEIGHT + _BOTTOM
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="sans-serif" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{_LEFT}" y="16" font-size="13">Share of the healthy pace by failed slots of one replica of 8, '
            f"{LABEL}</text>",
            *panels,
            *legend,
            "</svg>\n",
        ]
    )


def _color(index: int) -> str:
    """The first is for the ideal."""
    return "#000000" if index == 0 else _COLORS[(index - 1) % len(_COLORS)]


def _panel(job: str, policies: Shares, left: float) -> str:
    shares = {
        name: {int(count): float(one["share_of_healthy"]) for count, one in counts.items()}
        for name, counts in policies.items()
    }
    most = max(max(counts) for counts in shares.values())

    def place(count: int, share: float) -> str:
        x = left + _WIDTH * count / most
        y = _TOP + _HEIGHT * (1 - (max(share, _LEAST) - _LEAST) / (1.02 - _LEAST))
        return f"{x:.1f} {y:.1f}"

    rows = [f'<text x="{left}" y="{_TOP - 10}">{escape(job)}</text>']
    for tenth in range(round(_LEAST * 10), 11):
        x, y = place(0, tenth / 10).split()
        rows.append(f'<path d="M{x} {y}h{_WIDTH}" stroke="#e5e5e5"/>')
        rows.append(f'<text x="{left - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{tenth / 10:.1f}</text>')
    for count in range(most + 1):
        x = place(count, _LEAST).split()[0]
        rows.append(f'<text x="{x}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{count}</text>')
    live = {
        int(count): one["share_of_healthy"] / one["share_of_ideal"]
        for count, one in max(policies.values(), key=len).items()
        if one["share_of_ideal"]
    }
    lines = [live, *shares.values()]
    for index, line in enumerate(lines):
        path = "L".join(place(count, share) for count, share in sorted(line.items()))
        dash = ' stroke-dasharray="4 3"' if index == 0 else ""
        rows.append(f'<path d="M{path}" fill="none" stroke="{_color(index)}" stroke-width="2"{dash}/>')
    return "\n".join(rows)
