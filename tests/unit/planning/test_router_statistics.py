"""What the router did, as statistics, and where its biases aim when slots are not equally fast."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nep.planning.cluster import Cluster
from nep.planning.plan import Plan
from nep.planning.planner import plan_from_scratch
from nep.planning.router_bias import expert_weights
from nep.planning.router_statistics import RouterStatistics
from nep.planning.shapes import parameter_lines, preset


def test_mean_and_variance_are_those_of_all_steps_and_the_average_follows_the_last_ones() -> None:
    random = np.random.default_rng(0)
    counts = random.poisson(100, size=(50, 3, 8)).astype(np.float64)
    counts[25:, :, 0] += 300
    statistics = RouterStatistics(half_life_steps=4)
    for step in counts:
        statistics.update(step)
    assert statistics.mean == pytest.approx(counts.mean(axis=0))
    assert statistics.variance == pytest.approx(counts.var(axis=0, ddof=1))
    weights = 0.5 ** (np.arange(50)[::-1] / 4)
    expected = np.tensordot(weights / weights.sum(), counts, axes=1)
    assert statistics.ema == pytest.approx(expected)
    assert statistics.ema_variance == pytest.approx(
        np.tensordot(weights / weights.sum(), (counts - expected) ** 2, axes=1)
    )
    loads = statistics.loads()
    assert loads.num_steps == 50 and loads.mean == pytest.approx(expected)
    assert "2." in str(statistics.imbalance()) and min(statistics.imbalance().by_layer) > 2.5


def test_one_step_has_no_variance_and_none_no_average() -> None:
    statistics = RouterStatistics()
    with pytest.raises(ValueError, match="0 steps"):
        statistics.loads()
    statistics.update([[3, 1]])
    assert not statistics.variance.any() and not statistics.ema_variance.any()
    assert statistics.ema.tolist() == [[3.0, 1.0]] and statistics.imbalance().by_layer == (1.5,)
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        statistics.update([[1, 2, 3]])
    with pytest.raises(ValueError, match="half_life"):
        RouterStatistics(0.0)


def bias_plan(**speeds: int) -> Plan:
    shape = preset("debug")
    plan = plan_from_scratch(Cluster.uniform(4, 4), parameter_lines(shape), num_replicas=1, global_batch_size=8)
    return replace(plan, speeds_ppm=tuple(speeds.get(f"s{slot}", 1_000_000) for slot in range(4)))


def test_biases_aim_at_the_speed_of_an_experts_slots() -> None:
    lines = parameter_lines(preset("debug"))
    even = expert_weights(bias_plan(), lines)
    assert all(len(set(layer)) == 1 for layer in even) and len(even) == preset("debug").num_moe_layers
    slow = expert_weights(bias_plan(s1=500_000), lines)
    for before, after in zip(even, slow, strict=True):
        halved = [expert for expert, weight in enumerate(after) if 2 * weight == before[expert]]
        assert halved == [2, 3], "those of slot 1"
        assert all(after[expert] == before[expert] for expert in range(8) if expert not in halved)
