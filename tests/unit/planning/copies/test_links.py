"""Copies go by links: sums of gradients stay inside scale-up domains, but for the few that join these."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.copies.layer import Change, LayerCopies
from nep.planning.copies.place import Copies, SlotLimits, place_copies, whole_tokens
from nep.planning.copies.warm import adapt_copies, plan_copies, repair_copies
from nep.planning.loads import ExpertLoads
from tests.unit.planning.copies.expert_copies import levels


def nodes(num_nodes: int, slots_per_node: int, places: int, *, far: float = 0.001, apart: bool = False) -> SlotLimits:
    """Nodes that are fault domains and scale-up domains."""
    limits = SlotLimits.uniform(num_nodes * slots_per_node, places, slots_per_node)
    return replace(limits, scale_up=limits.domains, far=far, apart=apart)


def heavy_tailed(seed: int, layers: int, experts: int) -> ExpertLoads:
    return ExpertLoads(mean=np.random.default_rng(seed).pareto(2.0, (layers, experts)) + 0.2)


def domains_of(copies: Copies, limits: SlotLimits) -> np.ndarray:
    """``[layers, experts]``: in how many scale-up domains each expert has copies."""
    links = np.array(limits.links)
    return np.sum([copies[:, :, links == link].any(axis=2) for link in sorted(set(limits.links))], axis=0)


def far_price(layer: Copies, limits: SlotLimits) -> float:
    """Copy by copy: each sends to every copy in another domain what that one owns."""
    price = 0.0
    for hosts in (np.flatnonzero(row) for row in layer):
        for one in hosts:
            price += sum(limits.far / len(hosts) for other in hosts if limits.links[one] != limits.links[other])
    return price


SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, st.integers(2, 4), st.integers(2, 4), st.integers(3, 6))
def test_just_enough_copies_join_all_slots_with_one_bridge_for_each_further_domain(
    seed: int, num_nodes: int, slots_per_node: int, places: int
) -> None:
    slots = num_nodes * slots_per_node
    experts = (places - 1) * slots + 1
    limits = nodes(num_nodes, slots_per_node, places)
    # Loads so alike that nobody needs a third copy.
    loads = ExpertLoads(mean=np.random.default_rng(seed).uniform(1.0, 1.2, (3, experts)))
    copies = place_copies(loads, limits, num_copies=experts + slots - 1)
    assert (copies.sum(axis=2) <= 2).all()
    assert ((domains_of(copies, limits) > 1).sum(axis=1) == num_nodes - 1).all()
    for layer in copies:
        reached = {0}
        for _ in range(slots):
            shared = layer[:, sorted(reached)].any(axis=1)
            reached |= set(np.flatnonzero(layer[shared].any(axis=0)).tolist())
        assert len(reached) == slots


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bridges_of_many_layers_are_on_all_slots(seed: int) -> None:
    limits = nodes(4, 8, 9)
    copies = place_copies(heavy_tailed(seed, 64, 256), limits)
    across = domains_of(copies, limits) > 1
    assert 64 * 2 < across.sum() < 64 * 4  # three, but where too few experts have copies
    on_slot = (copies * across[:, :, None]).sum(axis=(0, 1))
    assert on_slot.max() <= 1.5 * on_slot.mean()


@given(SEEDS, st.integers(1, 12))
def test_bridges_are_the_hottest_experts_so_that_many_tokens_can_move(seed: int, experts: int) -> None:
    limits = nodes(2, 4, 4)
    loads = heavy_tailed(seed, 2, 16 + experts)
    copies = place_copies(loads, limits)
    share = loads.mean / copies.sum(axis=2)
    for layer in range(2):
        across = np.flatnonzero(domains_of(copies, limits)[layer] > 1)
        shared = np.flatnonzero(copies[layer].sum(axis=1) > 1)
        assert share[layer, across].max() >= share[layer, shared].max() - 1e-9


def test_two_fault_domains_only_where_it_is_asked_for_or_costs_nothing() -> None:
    loads = heavy_tailed(0, 4, 16)
    near, apart = nodes(2, 4, 6), nodes(2, 4, 6, apart=True)
    assert near.needed_copies(16) == apart.needed_copies(16) == 2
    assert (domains_of(place_copies(loads, apart), apart) == 2).all()
    copies = place_copies(loads, near)
    assert (copies.sum(axis=2) >= 2).all()  # on two slots of a node
    assert (domains_of(copies, near) == 2).mean() < 0.3
    # A rack of two nodes: a second node costs nothing.
    rack = replace(near, scale_up=(0,) * 8)
    assert (domains_of(place_copies(loads, rack), replace(rack, scale_up=rack.domains)) == 2).all()
    # Two racks of two nodes each.
    racks = SlotLimits.uniform(8, 6, slots_per_domain=2)
    racks = replace(racks, scale_up=tuple(slot // 4 for slot in range(8)), far=0.001)
    copies = place_copies(loads, racks)
    assert (domains_of(copies, replace(racks, scale_up=racks.domains)) >= 2).all()
    assert (domains_of(copies, racks) == 2).mean() < 0.3


@given(SEEDS, st.data())
def test_sums_are_priced_copy_by_copy(seed: int, data: st.DataObject) -> None:
    limits = nodes(3, 2, 6, far=0.02)
    generator = np.random.default_rng(seed)
    copies = (generator.random((9, 6)) < 0.4).astype(np.int8)
    copies[np.arange(9), np.arange(9) % 6] = 1
    loads = ExpertLoads(mean=generator.random((1, 9)) + 0.1)
    layer = LayerCopies(copies, whole_tokens(loads)[0].tolist(), limits, copies)
    expert, slot = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 5))
    if copies[expert, slot] and copies[expert].sum() == 1:
        return
    after = copies.copy()
    after[expert, slot] ^= 1
    change = [Change(expert, slot, 1 if after[expert, slot] else -1)]
    difference = far_price(after, limits) - far_price(copies, limits)
    assert layer.sums(change) == pytest.approx(difference, abs=1e-12)
    assert -layer.sums(change) <= layer.largest_relief
    free = LayerCopies(copies, layer.tokens, replace(limits, far=0.0), copies)
    changed = layer.judge(change).score - free.judge(change).score
    assert changed == pytest.approx(far_price(after, limits), abs=1e-12)


@given(SEEDS, st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.2]))
def test_the_dearer_the_network_the_fewer_sums_over_it(seed: int, far: float) -> None:
    loads = heavy_tailed(seed, 2, 8)
    limits = nodes(2, 4, 3, far=far)
    copies = plan_copies(loads, limits)
    assert (copies.sum(axis=(1, 2)) == limits.num_places(8)).all()
    levels_ = levels(copies, loads, limits)
    placed = place_copies(loads, limits)
    unbridged = place_copies(loads, limits, bridged=False)
    if far > 0.003:
        for index in range(2):
            mine = levels_[index] + far_price(copies[index], limits)
            for other in (placed, unbridged):
                theirs = levels(other, loads, limits)[index] + far_price(other[index], limits)
                # By the score, which smooths the level and counts three thousandths for slots that are not joined.
                assert mine <= theirs + 0.15
    if far >= 0.2:
        assert sum(far_price(layer, limits) for layer in copies) <= sum(far_price(layer, limits) for layer in placed)


def test_warm_start_and_repair_add_near_copies() -> None:
    limits = nodes(2, 4, 5, far=0.02)
    loads = heavy_tailed(5, 4, 32)
    before = place_copies(loads, limits)
    across = domains_of(before, limits) > 1
    after = repair_copies(before, loads, limits, [2])
    assert (after.sum(axis=2) >= 1).all()
    grown = (domains_of(after, limits) > 1) & ~across
    assert grown.sum() <= 2
    drifted = adapt_copies(before, heavy_tailed(6, 4, 32), limits)
    assert ((domains_of(drifted, limits) > 1) & ~across).sum() <= ((drifted > before).any(axis=2)).sum() // 2


def test_domains_and_prices_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scale_up \[0\] must have one entry per slot.*far \(-1\)"):
        replace(SlotLimits.uniform(2, 1), scale_up=(0,), far=-1)
    with pytest.raises(ValueError, match=r"far \(nan\)"):
        replace(SlotLimits.uniform(2, 1), far=float("nan"))
