"""The plot of load imbalance, and the figures behind it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nep.planning.cluster import Cluster
from nep.planning.cost.work import WorkOfSlots
from nep.planning.planner import plan_from_scratch
from nep.planning.shapes import parameter_lines, preset
from nep.report.imbalance import Series, expert_imbalance, plot_svg, smoothed
from scripts.plot_imbalance import Options, main

LINES = parameter_lines(preset("debug"))
PLAN = plan_from_scratch(Cluster.uniform(4, 4), LINES, num_replicas=1, global_batch_size=8)


def work(**changes: object) -> WorkOfSlots:
    plan = replace(PLAN, **changes)  # type: ignore[arg-type]
    return WorkOfSlots(plan, LINES, tokens_per_sequence=16, micro_batch_size=2)


def test_imbalance_of_slots_and_experts() -> None:
    even = np.full((2, 8), 10.0)
    hot = even.copy()
    hot[0, 0] = 50.0  # slot 0 holds experts 0 and 1
    assert work().imbalance(even) == pytest.approx(1.0)
    assert work().imbalance(hot) == pytest.approx((60 / (120 / 4) + 1) / 2)
    slow = work(speeds_ppm=(1_000_000, 500_000, 1_000_000, 1_000_000))
    assert slow.imbalance(even) == pytest.approx(2 / (4 / 3.5))
    assert expert_imbalance(np.stack([even, hot])) == pytest.approx([1.0, (50 / 15 + 1) / 2])
    by_slot = work().of(hot)
    assert by_slot[0][2] == pytest.approx(by_slot[1][2] * 80 / 40) and by_slot[0][1] == by_slot[1][1]


def test_smoothing_leaves_out_what_is_not_known() -> None:
    values = np.array([np.nan, 2.0, 4.0, np.nan, 6.0])
    assert smoothed(values, 2)[1:].tolist() == [2.0, 3.0, 4.0, 6.0]
    assert np.isnan(smoothed(values, 2)[0])
    with pytest.raises(ValueError, match="window"):
        smoothed(values, 0)


def test_two_loads_files_become_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = np.random.default_rng(0).poisson(20, size=(30, 2, 8))
    for name, level in (("static", 1.8), ("moved", 1.1)):
        np.savez(tmp_path / f"{name}.npz", counts=counts, slot_imbalance=np.full(30, level), model=np.array("debug"))
    out = tmp_path / "plot.svg"
    assert main(Options(without=tmp_path / "static.npz", with_it=tmp_path / "moved.npz", out=out)) == 0
    lines = [one for one in ElementTree.parse(out).iter() if one.tag.endswith("polyline")]
    assert len(lines) == 3 and all(len(one.attrib["points"].split()) == 30 for one in lines)
    heights = [float(one.attrib["points"].split()[-1].split(",")[1]) for one in lines]
    assert heights[0] < heights[1], "more imbalance is drawn higher"
    assert "static layout: 1.800" in capsys.readouterr().out
    np.savez(tmp_path / "old.npz", counts=counts)
    assert main(Options(without=tmp_path / "old.npz", with_it=tmp_path / "moved.npz", out=out)) == 2
    assert "no slot_imbalance" in capsys.readouterr().err
    with pytest.raises(ValueError, match="one line or more"):
        plot_svg([Series(name="nothing", values=np.array([]))], title="", y_label="")
