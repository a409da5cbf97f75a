"""Plots load imbalance over time with and without the rebalancer, from two files that `--loads-out` wrote.

Example:
    torchrun --standalone --nproc-per-node 4 scripts/train.py --steps 400 --loads-out static.npz
    torchrun --standalone --nproc-per-node 4 scripts/train.py --steps 400 --loads-out moved.npz --rebalance-every 25
    python scripts/plot_imbalance.py static.npz moved.npz --out docs/images/imbalance.svg
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from nep.report.imbalance import Series, expert_imbalance, plot_svg, smoothed


@dataclass(frozen=True, kw_only=True)
class Options:
    """Plot what waiting for the busiest slot costs, step by step."""

    without: Annotated[Path, tyro.conf.Positional]
    """Loads of a run without the rebalancer."""
    with_it: Annotated[Path, tyro.conf.Positional]
    """Loads of a run with it."""
    out: Path = Path("imbalance.svg")
    """Where to write the plot."""
    window: int = 10
    """Steps to average over."""
    title: str = "Load of the busiest slot over the mean"
    """Above the plot."""
    json: bool = False
    """Print the means as one object."""


def main(options: Options) -> int:
    """Write the plot, and say what it shows."""
    series = []
    try:
        for name, path in (("static layout", options.without), ("with the rebalancer", options.with_it)):
            with np.load(path, allow_pickle=False) as file:
                if "slot_imbalance" not in file.files:
                    raise ValueError(f"{path} has no slot_imbalance; write it with --loads-out of this release")
                series.append(Series(name=name, values=file["slot_imbalance"]))
                experts = Series(name="busiest expert (router)", values=expert_imbalance(file["counts"].astype(float)))
        smooth = [Series(name=one.name, values=smoothed(one.values, options.window)) for one in (*series, experts)]
        options.out.write_text(plot_svg(smooth, title=options.title, y_label="busiest / mean"))
    except (OSError, ValueError) as error:
        print(f"plot_imbalance: {error}", file=sys.stderr)
        return 2
    second_half = {one.name: float(np.nanmean(one.values[len(one.values) // 2 :])) for one in (*series, experts)}
    for name, value in second_half.items():
        print(f"{name}: {value:.3f} (mean of the second half)")
    if options.json:
        print(json.dumps({"schema": 1, "out": str(options.out), "second_half": second_half}))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
