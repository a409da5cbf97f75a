from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.copies.place import Copies, SlotLimits, place_copies
from nep.planning.copies.warm import adapt_copies, count_moved, plan_copies, repair_copies
from nep.planning.loads import ExpertLoads
from tests.unit.planning.copies.expert_copies import deepseek_prefill, levels


def random_loads(seed: int, layers: int, experts: int) -> ExpertLoads:
    """Loads with a heavy tail."""
    return ExpertLoads(mean=np.random.default_rng(seed).pareto(1.5, (layers, experts)) + 0.05)


def check_fits(copies: Copies, limits: SlotLimits) -> None:
    assert set(np.unique(copies).tolist()) <= {0, 1}
    assert (copies.sum(axis=1) <= np.array(limits.places)).all()
    assert (copies.sum(axis=2) >= 1).all()


SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def uneven_limits(draw: st.DrawFn, experts: int) -> SlotLimits:
    """Slots of any memory, speed and domain, each with room for a copy, that can hold every expert."""
    slots = draw(st.integers(1, 8))
    least = -(-experts // slots)
    places = draw(st.lists(st.integers(least, experts + 1), min_size=slots, max_size=slots))
    speed = draw(st.sampled_from([st.just(1_000_000), st.integers(500_000, 1_000_000), st.integers(1, 10)]))
    return SlotLimits(
        places=tuple(places),
        speeds_ppm=tuple(draw(st.lists(speed, min_size=slots, max_size=slots))),
        domains=tuple(slot // draw(st.integers(1, 3)) for slot in range(slots)),
    )


@given(st.data(), SEEDS, st.integers(1, 12))
def test_a_plan_is_never_worse_than_the_placement_that_it_starts_from(
    data: st.DataObject, seed: int, experts: int
) -> None:
    limits = data.draw(uneven_limits(experts))
    loads = random_loads(seed, 2, experts)
    planned = plan_copies(loads, limits)
    check_fits(planned, limits)
    placed = place_copies(loads, limits)
    assert (levels(planned, loads, limits) <= levels(placed, loads, limits) + 1e-6).all()
    if limits.needed_copies(experts) == 1:
        # Not even than one copy of each expert, where more of them only stand in the way.
        alone = place_copies(loads, limits, num_copies=experts)
        assert (levels(planned, loads, limits) <= levels(alone, loads, limits) + 1e-3).all()


def test_a_plan_has_no_copies_that_stand_in_the_way() -> None:
    # Nine experts fit on six slots of two places so that none has more than 3; connected by copies some have more.
    loads = ExpertLoads(mean=np.array([[1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0]]))
    limits = SlotLimits.uniform(6, 2)
    alone = place_copies(loads, limits, num_copies=9)
    assert levels(place_copies(loads, limits), loads, limits) > levels(alone, loads, limits) + 0.1
    assert levels(plan_copies(loads, limits), loads, limits) <= levels(alone, loads, limits)


@given(st.data(), SEEDS, st.integers(1, 12), st.integers(0, 6))
def test_adapting_never_makes_it_worse_and_keeps_to_its_budget(
    data: st.DataObject, seed: int, experts: int, max_moved: int
) -> None:
    limits = data.draw(uneven_limits(experts))
    before = place_copies(random_loads(seed, 2, experts), limits)
    loads = random_loads(seed + 1, 2, experts)
    after = adapt_copies(before, loads, limits, max_moved=max_moved)
    check_fits(after, limits)
    assert count_moved(before, after) <= max_moved
    assert (levels(after, loads, limits) <= levels(before, loads, limits) + 1e-6).all()
    assert (after == adapt_copies(before, loads, limits, max_moved=max_moved)).all()


@given(st.data(), SEEDS, st.integers(1, 12))
def test_every_copy_that_is_sent_pays(data: st.DataObject, seed: int, experts: int) -> None:
    limits = data.draw(uneven_limits(experts))
    before = place_copies(random_loads(seed, 1, experts), limits)
    loads = random_loads(seed + 1, 1, experts)
    assert (adapt_copies(before, loads, limits, min_gain=1e9) == before).all()
    after = adapt_copies(before, loads, limits, min_gain=0.05)
    if count_moved(before, after):
        assert (levels(after, loads, limits) < levels(before, loads, limits)).all()


@given(st.data(), SEEDS, st.integers(1, 12))
def test_after_a_loss_what_was_lost_moves_and_no_more_than_allowed(
    data: st.DataObject, seed: int, experts: int
) -> None:
    limits = data.draw(uneven_limits(experts))
    lost = data.draw(st.sets(st.integers(0, limits.num_slots - 1)))
    loads = random_loads(seed, 2, experts)
    before = place_copies(loads, limits)
    left = limits.without(lost)
    if sum(min(places, experts) for places in left.places) < experts:
        with pytest.raises(ValueError, match="too few"):
            repair_copies(before, loads, limits, lost)
        return
    extra = data.draw(st.integers(0, 4))
    after = repair_copies(before, loads, limits, lost, max_extra=extra)
    check_fits(after, left)
    survivors = before.copy()
    survivors[:, :, sorted(lost)] = 0
    needed = min(left.needed_copies(experts), int(before.sum(axis=2).min()))
    missing = int(np.maximum(0, needed - survivors.sum(axis=2)).sum())
    moved = count_moved(survivors, after)
    assert (survivors.sum(axis=2) == 0).sum() <= moved <= missing + extra
    assert (after == repair_copies(before, loads, limits, lost, max_extra=extra)).all()


@given(SEEDS, st.integers(2, 4), st.integers(1, 3), st.integers(2, 6), st.integers(2, 14))
def test_changes_leave_copied_experts_in_two_domains(
    seed: int, domains: int, slots_per_domain: int, places: int, experts: int
) -> None:
    slots = domains * slots_per_domain
    experts = min(experts, places * (slots - 1))
    limits = SlotLimits.uniform(slots, places, slots_per_domain)
    before = place_copies(random_loads(seed, 2, experts), limits)
    loads = random_loads(seed + 1, 2, experts)
    assert _all_in_two_domains(before, slots_per_domain)
    assert _all_in_two_domains(adapt_copies(before, loads, limits), slots_per_domain)


def _all_in_two_domains(copies: Copies, slots_per_domain: int) -> bool:
    layers, experts, slots = copies.shape
    of_domain = copies.reshape(layers, experts, slots // slots_per_domain, slots_per_domain).any(axis=3)
    return bool((of_domain.sum(axis=2) >= np.minimum(2, copies.sum(axis=2))).all())


def test_nothing_moves_where_nothing_was_lost_or_gained() -> None:
    limits = SlotLimits.uniform(8, 5, slots_per_domain=2)
    loads = random_loads(1, 3, 32)
    copies = plan_copies(loads, limits)
    assert levels(copies, loads, limits).max() < 1.001
    assert (adapt_copies(copies, loads, limits) == copies).all()
    assert (repair_copies(copies, loads, limits, []) == copies).all()


def test_an_expert_that_became_hot_gets_a_second_copy() -> None:
    limits = SlotLimits.uniform(2, 3)
    # Experts 0 and 1 are on both slots, 2 on the first only and 3 on the second only.
    copies = np.array([[[1, 1], [1, 1], [1, 0], [0, 1]]], dtype=np.int8)
    after = adapt_copies(copies, ExpertLoads(mean=np.array([[1.0, 1.0, 20.0, 1.0]])), limits)
    assert after[0, 2].tolist() == [1, 1]
    assert count_moved(copies, after) == 1


def test_experts_are_exchanged_where_no_place_is_free() -> None:
    limits = SlotLimits.uniform(2, 2)
    copies = np.array([[[1, 0], [1, 0], [0, 1], [0, 1]]], dtype=np.int8)
    loads = ExpertLoads(mean=np.array([[10.0, 10.0, 1.0, 1.0]]))
    after = adapt_copies(copies, loads, limits)
    assert levels(after, loads, limits) == pytest.approx(1)
    assert count_moved(copies, after) == 2
    assert (adapt_copies(copies, loads, limits, max_moved=1) == copies).all()


def test_second_copies_are_replaced_where_memory_allows() -> None:
    limits = SlotLimits.uniform(6, 8, slots_per_domain=2)
    loads = random_loads(3, 2, 16)
    before = plan_copies(loads, limits)
    assert (before.sum(axis=2) >= 2).all()
    after = repair_copies(before, loads, limits, [0])
    assert (after.sum(axis=2) >= 2).all()
    domains = np.stack([after[:, :, domain * 2 : domain * 2 + 2].any(axis=2) for domain in range(3)])
    assert (domains.sum(axis=0) >= 2).all()


def test_copies_that_were_not_wanted_are_not_made_after_a_loss() -> None:
    limits = SlotLimits.uniform(6, 8)
    loads = random_loads(3, 2, 16)
    before = place_copies(loads, limits, num_copies=16)
    after = repair_copies(before, loads, limits, [2], min_gain=1e9)
    survivors = before.copy()
    survivors[:, :, 2] = 0
    assert count_moved(survivors, after) == before[:, :, 2].sum()


def test_placements_that_do_not_fit_are_refused() -> None:
    limits = SlotLimits.uniform(3, 2)
    loads = ExpertLoads.uniform(1, 4)
    copies = place_copies(loads, limits)
    with pytest.raises(ValueError, match=r"copies have shape \(1, 4, 2\).*\(1, 4, 3\)"):
        adapt_copies(copies[:, :, :2], loads, limits)
    with pytest.raises(ValueError, match=r"copies\[0\] has 2 copies on slot 1 with places for 0"):
        adapt_copies(copies, loads, limits.without([1]))
    with pytest.raises(ValueError, match=r"lost \[3\] must be of the 3 slots"):
        repair_copies(copies, loads, limits, [3])
    orphaned = copies.copy()
    orphaned[0, 2] = 0
    with pytest.raises(ValueError, match=r"copies\[0\] has no copy of expert 2; use repair_copies"):
        adapt_copies(orphaned, loads, limits)


def test_losing_one_of_32_slots_moves_little_more_than_was_lost(data_dir: Path) -> None:
    loads = ExpertLoads(mean=deepseek_prefill(data_dir)[1])
    limits = SlotLimits.uniform(32, 9, slots_per_domain=8)
    before = place_copies(loads, limits)
    after = repair_copies(before, loads, limits, [3])
    survivors = before.copy()
    survivors[:, :, 3] = 0
    lost = int((survivors.sum(axis=2) == 0).sum())
    assert lost <= count_moved(before, after) <= 1.25 * lost
    assert (1 / levels(after, loads, limits.without([3]))).mean() >= 0.978


def test_under_drift_few_copies_move_and_the_balance_stays(data_dir: Path) -> None:
    windows = [ExpertLoads(mean=counts) for counts in deepseek_prefill(data_dir)]
    limits = SlotLimits.uniform(32, 9, slots_per_domain=8)
    copies = place_copies(windows[0], limits)
    balance = []
    for planned, then in pairwise(windows[1:]):
        after = adapt_copies(copies, planned, limits, max_moved=copies.sum() // 100)
        assert count_moved(copies, after) <= copies.sum() / 100
        balance.append(float((1 / levels(after, then, limits)).mean()))
        copies = after
    assert min(balance) >= 0.92
    assert np.mean(balance) >= 0.97
