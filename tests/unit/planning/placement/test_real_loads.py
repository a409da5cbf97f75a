"""Loads of real routers; skipped where the data is not at hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from nep.planning.cost.placement_cost import PlacementCost
from nep.planning.loads import ExpertLoads
from nep.planning.placement.objective import figures
from nep.planning.placement.place import place
from nep.planning.placement.repair import repair
from nep.planning.placement.warm import warm

SLOTS = 32


@pytest.fixture(scope="module")
def deepseek(data_dir: Path) -> list[ExpertLoads]:
    """Twelve workloads of DeepSeek-V3, 58 layers of 256 experts."""
    files = sorted((data_dir / "deepseek_v3_sglang_ep_statistics").glob("*.json"))
    assert len(files) == 12
    tables = [np.array(json.loads(path.read_text())["logical_count"])[3:] for path in files]
    return [ExpertLoads.from_counts(table[None]) for table in tables]


@pytest.fixture(scope="module")
def mixtral(data_dir: Path) -> ExpertLoads:
    """Mixtral-8x7B on five text domains, three layers each."""
    with np.load(data_dir / "olmoe_routing" / "mixtral_counts.npz") as arrays:
        return ExpertLoads(mean=np.concatenate([arrays[name].reshape(-1, 8) for name in sorted(arrays.files)]))


def cost_of(size: int, row_s: float, piece_s: float = 0.0) -> PlacementCost:
    """Prices in seconds per token: rows as a share of the arithmetic, pieces as a share of an even slot's."""
    tokens = 8 * 4096 * SLOTS
    return PlacementCost(token_s=1, row_s=row_s, piece_s=piece_s * tokens / SLOTS, units_per_expert=size, tokens=tokens)


def pool(size: int, share: float) -> np.ndarray:
    return np.full(SLOTS, int(58 * 256 * size / SLOTS * share))


def test_blocks_of_128_neurons(deepseek):
    # Rows at two thirds of the arithmetic, a piece at 0.3 % of a slot's: all slots in one rack of fast links,
    # four sequences of 4,096 tokens each.
    prefill = deepseek[4]
    cost = cost_of(16, 0.67, 0.0032)
    placed = place(prefill, speeds=np.ones(SLOTS), cost=cost, memory_units=pool(16, 1.06))
    found = figures(placed.units, prefill, np.ones(SLOTS))
    assert found.balance >= 0.985
    assert found.busiest_rows <= 1.1
    assert found.memory <= 1.06
    assert placed.total_s <= placed.bound.total_s / 0.99


def test_single_neurons_without_more_memory(deepseek):
    placed = place(deepseek[4], speeds=np.ones(SLOTS), cost=cost_of(2048, 0.0), memory_units=pool(2048, 1.0))
    found = figures(placed.units, deepseek[4], np.ones(SLOTS))
    assert found.balance >= 0.999
    assert found.memory == 1


@pytest.mark.parametrize("size", [16, 2048])
def test_unequal_speeds(deepseek, size):
    speeds = np.array([0.7, 0.7, *[0.85] * 4, *[1.0] * 26])
    for row_s, share in ((0.0, 1.0), (0.0, 1.06), (0.25, 1.06), (0.67, 1.06)):
        placed = place(deepseek[4], speeds=speeds, cost=cost_of(size, row_s), memory_units=pool(size, share))
        assert placed.total_s <= placed.bound.total_s / 0.99
        if row_s == 0:
            assert figures(placed.units, deepseek[4], speeds).balance >= 0.98


@pytest.mark.parametrize("slots", [7, 8, 15, 16])
def test_mixtral_on_any_number_of_slots(mixtral, slots):
    for share in (1.0, 1.06):
        memory = np.full(slots, int(np.ceil(15 * 8 * 112 / slots * share)))
        placed = place(mixtral, speeds=np.ones(slots), cost=cost_of(112, 0.0), memory_units=memory)
        assert figures(placed.units, mixtral, np.ones(slots)).balance >= 0.995


def test_one_of_32_dies(deepseek):
    cost, memory = cost_of(16, 0.25), pool(16, 1.1)
    total = 58 * 256 * 16
    before = place(deepseek[4], speeds=np.ones(SLOTS), cost=cost, memory_units=memory)
    keywords = {"speeds": np.ones(SLOTS), "cost": cost, "memory_units": memory}
    least = repair(before.units, [5], deepseek[4], **keywords)
    more = repair(before.units, [5], deepseek[4], **keywords, extra_units=total // 100)
    lost = before.units[:, :, 5].sum()
    assert least.moved_units == lost
    assert lost <= more.moved_units <= lost + total // 100
    assert more.total_s < least.total_s
    assert more.total_s <= 1.07 * more.bound.total_s


def test_one_per_cent_of_the_units_follows_the_drift(deepseek):
    cost, memory = cost_of(16, 0.02), pool(16, 1.06)
    total = 58 * 256 * 16
    units = place(deepseek[4], speeds=np.ones(SLOTS), cost=cost, memory_units=memory).units
    balances = []
    for loads in deepseek[5:]:
        keywords = {"speeds": np.ones(SLOTS), "cost": cost, "memory_units": memory}
        change = warm(units, loads, **keywords, budget_units=total // 100)
        assert change.moved_units <= total // 100
        units = change.units
        balances.append(figures(units, loads, np.ones(SLOTS)).balance)
    assert np.mean(balances) >= 0.94
