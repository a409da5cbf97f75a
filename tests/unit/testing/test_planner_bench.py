"""The comparison of planners: its numbers are those of a slow count, and others' planners are read right."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from nep.planning.cost.profiles import PROFILES
from nep.planning.cost.workload import Workload
from nep.planning.shapes import preset
from nep.report.readers.model_file import model_from_config
from nep.testing.planner_bench.cases import Case, deepseek_v3, olmoe, real_cases, synthetic_cases, synthetic_windows
from nep.testing.planner_bench.measures import Measured, known_loads, measure
from nep.testing.planner_bench.planners import Placed, Planner, eplb_planners, our_planners
from tests.unit.report.readers.configs import DEEPSEEK_V3, OLMOE_1B_7B

HARDWARE = PROFILES["h100-sxm"]
WORKLOAD = Workload(global_batch_size=8, micro_batch_size=1, seq_len=512)
WINDOWS = synthetic_windows(2, 8, seed=3, skew=0.8, drift=0.5)[:3]
CASE = Case(
    name="small",
    shape=preset("debug"),
    windows=WINDOWS,
    speeds=(1.0, 1.0, 1.0, 0.5),
    slots_per_node=2,
    physical=12,
    source="made up",
)

# As EPLB's `rebalance_experts`: copies of the first experts, dealt in order, so that some slots have one twice.
EPLB = """
import torch

def rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus):
    layers, experts = weight.shape
    physical = torch.arange(num_replicas).sort().values * experts // num_replicas
    return physical.repeat(layers, 1), None, None
"""


def run(planner: Planner, case: Case = CASE, workload: Workload = WORKLOAD) -> Measured:
    return measure(planner, case, workload=workload, hardware=HARDWARE, repeats=1)


def balance(units: np.ndarray, counts: np.ndarray, speeds: tuple[float, ...], copies: bool) -> float:
    """Slot by slot and expert by expert."""
    values = []
    for layer in range(units.shape[0]):
        load = [0.0] * len(speeds)
        for expert in range(units.shape[1]):
            whole = units[layer, expert].sum()
            for slot in range(len(speeds)):
                load[slot] += counts[layer, expert] * units[layer, expert, slot] / whole
        level = sum(load) / sum(speeds)
        values.append(level / max(one / speed for one, speed in zip(load, speeds, strict=True)))
    return sum(values) / len(values)


@pytest.mark.parametrize("copies", [False, True])
def test_balance_and_movement_are_those_of_a_slow_count(copies: bool) -> None:
    """Placements that change from window to window, cut at random or with copies."""
    generator = np.random.default_rng(0)
    shape = (len(WINDOWS) - 1, 2, 8, 4)
    if copies:
        units = generator.integers(0, 3, shape)
        units[..., 0] += units.sum(axis=-1) == 0
        size = 1
    else:
        size = 4
        units = generator.multinomial(size, [0.25] * 4, shape[:-1])
    plans = [Placed(units=one, size=size, has_copies=copies) for one in units]
    calls = iter([*plans, plans[0], plans[0], plans[1]])  # once more for a death, twice for the processor time
    measured = run(Planner(name="given", plan=lambda loads, before: next(calls)))
    planned = [balance(units[index], WINDOWS[index], CASE.speeds, copies) for index in range(2)]
    following = [balance(units[index], WINDOWS[index + 1], CASE.speeds, copies) for index in range(2)]
    assert measured.planned == pytest.approx(np.mean(planned))
    assert measured.next == pytest.approx(np.mean(following))
    moved = np.maximum(units[1] - units[0], 0).sum() / size
    expert_bytes = 3 * 256 * 128 * WORKLOAD.parameter_bytes
    assert measured.moved_bytes == pytest.approx(moved * expert_bytes)
    assert measured.moved_share == pytest.approx(moved * size / units[1].sum())
    assert measured.duplicates == pytest.approx(np.maximum(units - size, 0).sum() / size / 2)
    used = units.sum(axis=(1, 2))
    assert measured.memory == pytest.approx((used.max(axis=1) / used.mean(axis=1)).mean())


def test_quotas_never_do_worse_than_equal_shares() -> None:
    for planner in our_planners(CASE, WORKLOAD, HARDWARE):
        measured = run(planner)
        if "copies" in planner.name:
            assert measured.next_quotas >= measured.next - 1e-3
            assert measured.planned_quotas >= measured.planned - 1e-3
            assert measured.quotas_ms is not None
        else:
            assert measured.next_quotas == measured.next
            assert measured.planned_quotas_step_s == measured.planned_step_s
            assert measured.quotas_ms is None


def test_what_is_known_after_some_windows_is_the_last_and_how_much_shares_varied() -> None:
    loads = known_loads(WINDOWS[:2])
    assert (loads.mean == WINDOWS[1]).all() and loads.num_steps == 2
    shares = WINDOWS / WINDOWS.sum(axis=2, keepdims=True)
    total = WINDOWS[1].sum(axis=1)[:, None]
    assert loads.variance == pytest.approx(((shares[0] - shares[1]) * total) ** 2 / 2)
    assert known_loads(WINDOWS[:1]).variance is None


def test_ours_beat_no_balancing_on_what_they_planned_for() -> None:
    large = dataclasses.replace(CASE, shape=dataclasses.replace(preset("mixtral-8x7b"), num_layers=2))
    # Enough tokens for the sums of copies' gradients to be small beside them.
    batch = Workload(global_batch_size=64, micro_batch_size=4, seq_len=4096)
    measured = {planner.name: run(planner, large, batch) for planner in our_planners(large, batch, HARDWARE)}
    none = measured.pop("none")
    assert none.moved_bytes == 0 and none.duplicates == 0 and none.memory_total == 1
    for name in ("nep whole", "nep cuts", "nep copies"):
        assert measured[name].planned_step_s <= none.planned_step_s * (1 + 1e-9), name
        assert measured[name].duplicates == 0
    assert measured["nep copies"].memory_total == pytest.approx(12 / 8)
    assert measured["nep cuts, warm"].moved_share <= measured["nep cuts"].moved_share


def test_after_a_death_repair_moves_what_was_lost() -> None:
    case = dataclasses.replace(CASE, speeds=(1.0,) * 4, physical=16)
    measured = {planner.name: run(planner, case) for planner in our_planners(case, WORKLOAD, HARDWARE)}
    assert measured["none"].death_lost_share == pytest.approx(1 / 4)
    cuts, copies = measured["nep cuts"], measured["nep copies"]
    assert cuts.death_moved_share == pytest.approx(cuts.death_lost_share)
    assert copies.death_lost_share < 1 / 4
    assert copies.death_moved_share >= copies.death_lost_share
    assert measured["none"].death_moved_share > cuts.death_moved_share
    for one in (cuts, copies):
        assert 0 < one.death_balance <= 1 and one.death_step_s > 0
    # Twelve copies less three leave nine for eight experts; nine less three do not.
    tight = run(our_planners(dataclasses.replace(case, physical=8), WORKLOAD, HARDWARE)[5], case)
    assert tight.death_moved_share is None


def test_all_numbers_are_plain(tmp_path: Path) -> None:
    (tmp_path / "eplb.py").write_text(EPLB)
    for planner in [*our_planners(CASE, WORKLOAD, HARDWARE), *eplb_planners(CASE, tmp_path)]:
        if planner.why_not:
            continue
        values = run(planner).to_json()
        assert all(value is None or (isinstance(value, float) and math.isfinite(value)) for value in values.values())
        assert {key for key in values if key.endswith("_step_s")} >= {"planned_step_s", "next_step_s"}


def test_others_are_read_from_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "eplb.py").write_text(EPLB)
    for path in (tmp_path, tmp_path / "eplb.py"):
        everywhere, _ = eplb_planners(CASE, path)
        assert everywhere.name == "EPLB global" and not everywhere.why_not
        # twelve copies of eight experts in order: 0 0 1 | 2 2 3 | 4 4 5 | 6 6 7
        measured = run(everywhere)
        assert measured.duplicates == 2 * 4
        assert measured.memory == 1
    with pytest.raises(ValueError, match=r"eplb \(.*\) must be a checkout"):
        eplb_planners(CASE, tmp_path / "none")


@pytest.mark.parametrize(
    ("changes", "which", "message"),
    [
        ({"speeds": (1.0,) * 5}, 0, "12 copies are no multiple of 5 slots"),
        ({"speeds": (1.0,) * 3, "slots_per_node": 2}, 1, "3 slots are no multiple of 2 nodes"),
        ({"slots_per_node": 4}, 1, "one node"),
        ({"speeds": (1.0,) * 6}, 1, "8 groups cannot be shared out over 3 nodes"),
    ],
)
def test_what_others_cannot_plan_is_said(changes: dict[str, object], which: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "eplb.py").write_text(EPLB)
    planner = eplb_planners(dataclasses.replace(CASE, **changes), tmp_path)[which]
    assert message in planner.why_not


def test_synthetic_cases_are_the_same_every_time_and_of_every_kind() -> None:
    first, second = list(synthetic_cases()), list(synthetic_cases())
    assert len({case.name for case in first}) == len(first)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.windows, other.windows)
        assert one.windows.shape[1:] == (one.shape.num_moe_layers, one.shape.num_experts)
        assert one.physical >= one.shape.num_experts
    assert any(min(case.speeds) < 1 for case in first)
    assert any(case.shape.num_experts % case.num_slots for case in first)
    hot = next(case for case in first if "hot" in case.name)
    assert (hot.windows[:, :, 0] > 2 * hot.windows.sum(axis=2) / hot.num_slots).all()


def test_sizes_are_those_of_the_published_configs() -> None:
    assert dataclasses.replace(deepseek_v3(), name="x") == dataclasses.replace(
        model_from_config(DEEPSEEK_V3).shape, name="x"
    )
    published, ours = model_from_config(OLMOE_1B_7B).shape, olmoe(16)
    assert ours.num_parameters == published.num_parameters


def test_real_cases(data_dir: Path, tmp_path: Path) -> None:
    cases = {case.name: case for case in real_cases(data_dir)}
    assert cases["deepseek-v3/32-slots"].windows.shape == (8, 58, 256)
    assert cases["mixtral/7-slots"].windows.shape == (5, 3, 8)
    with pytest.raises(ValueError, match="has neither"):
        list(real_cases(tmp_path))
