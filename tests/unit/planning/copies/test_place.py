import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from numpy.typing import NDArray

from nep.planning.copies.place import Copies, SlotLimits, count_copies, place_copies
from nep.planning.loads import ExpertLoads
from tests.unit.planning.copies.expert_copies import deepseek_prefill, levels

Ints = NDArray[np.int64]


@st.composite
def expert_loads(draw: DrawFn, num_experts: int) -> ExpertLoads:
    """Loads of one or two layers: alike, heavy-tailed, mostly zero, or all on one expert."""
    load = draw(st.sampled_from([st.integers(1, 3), st.integers(1, 10**6), st.sampled_from([0, 0, 1])]))
    layers = draw(st.integers(1, 2))
    mean = [draw(st.lists(load, min_size=num_experts, max_size=num_experts)) for _ in range(layers)]
    if draw(st.booleans()):
        mean[0] = [0] * num_experts
        mean[0][draw(st.integers(0, num_experts - 1))] = draw(st.sampled_from([0, 5]))
    return ExpertLoads(mean=np.array(mean, dtype=np.float64))


@st.composite
def slot_limits(draw: DrawFn, num_experts: int) -> SlotLimits:
    """Slots of any memory, speed and domain, some without a place, that can hold every expert."""
    slots = draw(st.integers(1, 9))
    places = draw(st.lists(st.integers(0, num_experts + 1), min_size=slots, max_size=slots))
    missing = num_experts - sum(min(place, num_experts) for place in places)
    for slot in range(slots):
        more = min(max(0, missing), max(0, num_experts - places[slot]))
        places[slot] += more
        missing -= more
    speed = draw(st.sampled_from([st.just(1_000_000), st.integers(700_000, 1_000_000), st.integers(1, 10)]))
    domains = draw(st.lists(st.integers(0, slots - 1), min_size=slots, max_size=slots))
    return SlotLimits(
        places=tuple(places),
        speeds_ppm=tuple(draw(st.lists(speed, min_size=slots, max_size=slots))),
        domains=tuple(domains),
    )


@st.composite
def questions(draw: DrawFn) -> tuple[ExpertLoads, SlotLimits]:
    """Loads, and slots for them."""
    experts = draw(st.integers(1, 14))
    return draw(expert_loads(experts)), draw(slot_limits(experts))


def num_domains(copies: Copies, domains: tuple[int, ...]) -> Ints:
    """``[layers, experts]``: in how many fault domains each expert has a copy."""
    of_domain = [copies[:, :, np.array(domains) == domain].any(axis=2) for domain in sorted(set(domains))]
    return np.sum(of_domain, axis=0)


def check_copies(copies: Copies, num_copies: int, limits: SlotLimits) -> None:
    assert copies.dtype == np.int8 and set(np.unique(copies).tolist()) <= {0, 1}
    assert (copies.sum(axis=1) <= np.array(limits.places)).all()
    assert (copies.sum(axis=2) >= 1).all()
    assert (copies.sum(axis=(1, 2)) == num_copies).all()


@given(questions())
def test_all_places_are_used_and_none_is_overfull(question: tuple[ExpertLoads, SlotLimits]) -> None:
    loads, limits = question
    copies = place_copies(loads, limits)
    check_copies(copies, limits.num_places(loads.num_experts), limits)
    if limits.needed_copies(loads.num_experts) == 2:
        assert (num_domains(copies, limits.domains) >= 2).all()


@given(questions(), st.data())
def test_fewer_copies_may_be_asked_for(question: tuple[ExpertLoads, SlotLimits], data: st.DataObject) -> None:
    loads, limits = question
    most = limits.num_places(loads.num_experts)
    number = data.draw(st.integers(loads.num_experts, most + 3))
    check_copies(place_copies(loads, limits, num_copies=number), min(number, most), limits)


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(1, 14))
def test_equal_domains_share_every_copied_expert(
    data: st.DataObject, num_domains_: int, slots_per_domain: int, places: int, experts: int
) -> None:
    slots = num_domains_ * slots_per_domain
    experts = min(experts, slots * places)
    loads = data.draw(expert_loads(experts))
    limits = SlotLimits.uniform(slots, places, slots_per_domain)
    copies = place_copies(loads, limits)
    copied = copies.sum(axis=2) > 1
    assert (num_domains(copies, limits.domains)[copied] >= min(2, num_domains_)).all()


@given(st.data(), st.integers(1, 11), st.integers(2, 8), st.integers(1, 20))
def test_slots_and_experts_are_connected_with_as_few_copies_as_it_takes(
    data: st.DataObject, slots: int, places: int, experts: int
) -> None:
    # Every slot has two places at least: with one, it is a dead end.
    limits = SlotLimits.uniform(slots, places)
    enough = experts + slots - 1
    assume(sum(min(place, experts) for place in limits.places) >= enough)
    copies = place_copies(data.draw(expert_loads(experts)), limits, num_copies=enough)
    for layer in copies:
        reached = {0}
        for _ in range(slots):
            shared = layer[:, sorted(reached)].any(axis=1)
            reached |= set(np.flatnonzero(layer[shared].any(axis=0)).tolist())
        assert len(reached) == slots


def count_one_by_one(tokens: list[int], slots: int, num_copies: int, fewest: int) -> list[int]:
    """Reference for `count_copies`: every further copy goes to the expert that needs it most."""
    copies = [fewest] * len(tokens)
    fair = sum(tokens) / slots

    def urgency(expert: int) -> tuple[int, float, int]:
        share = tokens[expert] / copies[expert]
        if copies[expert] == slots:
            return (0, 0.0, -expert)
        if share > fair:
            return (2, share, -expert)
        return (1, round(tokens[expert] ** 0.75) / copies[expert], -expert)

    while sum(copies) < num_copies:
        copies[max(range(len(tokens)), key=urgency)] += 1
    return copies


@given(st.data(), st.integers(1, 12), st.integers(1, 9))
def test_copies_are_counted_as_one_by_one(data: st.DataObject, experts: int, slots: int) -> None:
    # Loads whose powers are not so close that rounding decides.
    exponents = data.draw(st.lists(st.integers(0, 60), min_size=experts, max_size=experts, unique=True))
    tokens = [round(1000 * 1.3**exponent) for exponent in exponents]
    number = data.draw(st.integers(experts, experts * slots))
    limits = SlotLimits.uniform(slots, experts)
    fewest = limits.needed_copies(experts) if number >= 2 * experts else 1
    counted = count_copies(np.array([tokens]), limits, number)[0].tolist()
    assert counted == count_one_by_one(tokens, slots, number, fewest)


def test_copies_beyond_the_first_purpose_go_to_experts_that_vary() -> None:
    mean = np.full((1, 8), 100.0)
    variance = np.zeros((1, 8))
    variance[0, [2, 5, 6]] = 400.0
    limits = SlotLimits.uniform(8, 2)
    copies = place_copies(ExpertLoads(mean=mean, variance=variance, num_steps=9), limits, num_copies=11)
    assert np.flatnonzero(copies[0].sum(axis=1) == 2).tolist() == [2, 5, 6]
    same = place_copies(ExpertLoads(mean=mean, variance=np.zeros((1, 8)), num_steps=9), limits, num_copies=11)
    assert (same == place_copies(ExpertLoads(mean=mean), limits, num_copies=11)).all()


@given(questions(), st.floats(0, 1e300))
def test_any_variance_gives_a_placement(question: tuple[ExpertLoads, SlotLimits], variance: float) -> None:
    loads, limits = question
    loads = ExpertLoads(mean=loads.mean, variance=np.full(loads.mean.shape, variance), num_steps=2)
    check_copies(place_copies(loads, limits), limits.num_places(loads.num_experts), limits)


def test_an_expert_hotter_than_all_others_gets_a_copy_on_every_slot() -> None:
    mean = np.array([[1.0] * 15 + [1000.0]])
    copies = place_copies(ExpertLoads(mean=mean), SlotLimits.uniform(7, 4))
    assert copies[0, 15].tolist() == [1] * 7


def test_fewer_experts_than_slots_and_slots_with_one_place() -> None:
    limits = SlotLimits.uniform(8, 1)
    copies = place_copies(ExpertLoads(mean=np.array([[1.0, 3.0]])), limits)
    assert copies.sum(axis=2).tolist() == [[2, 6]]
    assert levels(copies, ExpertLoads(mean=np.array([[1.0, 3.0]])), limits) == pytest.approx(1)


def test_slots_without_a_place_stay_empty() -> None:
    limits = SlotLimits.uniform(4, 5).without([1, 3])
    assert limits.places == (5, 0, 5, 0)
    copies = place_copies(ExpertLoads.uniform(3, 7), limits)
    assert copies.sum(axis=1).tolist() == [[5, 0, 5, 0]] * 3


def test_an_exchange_brings_copies_into_a_second_domain() -> None:
    # Slot by slot, expert 1 or 0 finds the places of the other domain taken.
    limits = SlotLimits(places=(1, 1, 2, 1, 1), speeds_ppm=(1,) * 5, domains=(0, 0, 1, 1, 1))
    copies = place_copies(ExpertLoads(mean=np.array([[3.0, 4.0, 7.0]])), limits)
    assert (num_domains(copies, limits.domains) == np.minimum(2, copies.sum(axis=2))).all()


def test_equal_shares_are_balanced_where_experts_are_many() -> None:
    mean = np.random.default_rng(0).pareto(2.0, (20, 128)) + 0.1
    copies = place_copies(ExpertLoads(mean=mean), SlotLimits.uniform(16, 9, slots_per_domain=4))
    equal = (mean / copies.sum(axis=2))[:, None, :] @ copies
    assert (equal.mean(axis=2) / equal.max(axis=2)).mean() > 0.995


def test_a_very_slow_slot_gets_copies_that_others_have_too() -> None:
    speeds = (1_000_000,) * 7 + (10_000,)
    limits = SlotLimits(places=(4,) * 8, speeds_ppm=speeds, domains=tuple(range(8)))
    loads = ExpertLoads(mean=np.array([[float(load) for load in range(12, 36)]]))
    copies = place_copies(loads, limits)
    assert copies[0, :, 7].sum() == 4
    assert (copies[0].sum(axis=1)[copies[0, :, 7] > 0] > 1).all()
    assert levels(copies, loads, limits) < 1.02


def test_placements_are_the_same_on_every_machine() -> None:
    # Only a change of the algorithm may change this digest; machines and versions of numpy may not.
    mean = [[(expert * 7919 + layer * 104729) % 1009 + 1 for expert in range(61)] for layer in range(5)]
    speeds = tuple(700_000 + 23_041 * slot for slot in range(13))
    limits = SlotLimits(places=(7, 6) * 6 + (5,), speeds_ppm=speeds, domains=tuple(s // 3 for s in range(13)))
    copies = place_copies(ExpertLoads(mean=np.array(mean, dtype=np.float64)), limits)
    digest = hashlib.sha256(json.dumps(copies.tolist()).encode()).hexdigest()
    assert digest == "4c7828890209353df96742f8dfc59180f6ba2525de08396b7dd48f0d1f38d3a1"


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"places \[-1, 1\].*domains \[-1, 0\].*speeds_ppm \[0, 1\]"):
        SlotLimits(places=(-1, 1), speeds_ppm=(0, 1), domains=(-1, 0))
    with pytest.raises(ValueError, match=r"places \(2\), speeds_ppm \(1\) and domains \(1\)"):
        SlotLimits(places=(1, 1), speeds_ppm=(1,), domains=(0,))
    with pytest.raises(ValueError, match=r"there must be a slot"):
        SlotLimits(places=(), speeds_ppm=(), domains=())
    with pytest.raises(ValueError, match=r"places \[8, 1\] are too few for 10 experts \(sum 9\)"):
        place_copies(ExpertLoads.uniform(1, 10), SlotLimits(places=(8, 1), speeds_ppm=(1, 1), domains=(0, 1)))
    with pytest.raises(ValueError, match=r"num_copies \(2\) must be at least one of each of 3 experts"):
        place_copies(ExpertLoads.uniform(1, 3), SlotLimits.uniform(3, 3), num_copies=2)


def test_deepseek_loads_are_balanced_with_equal_shares_and_at_unequal_speeds(data_dir: Path) -> None:
    counts = deepseek_prefill(data_dir)[5]  # the most uneven
    loads = ExpertLoads(mean=counts)
    limits = SlotLimits.uniform(32, 9, slots_per_domain=8)
    copies = place_copies(loads, limits)
    equal = (counts / copies.sum(axis=2))[:, None, :] @ copies
    assert (equal.mean(axis=2) / equal.max(axis=2)).mean() >= 0.99
    assert (1 / levels(copies, loads, limits)).mean() >= 0.9999
    speeds = [1_000_000] * 32
    for slot, speed in {3: 700_000, 17: 700_000, 5: 850_000, 11: 850_000, 20: 850_000, 30: 850_000}.items():
        speeds[slot] = speed
    slow = SlotLimits(places=limits.places, speeds_ppm=tuple(speeds), domains=limits.domains)
    assert (1 / levels(place_copies(loads, slow), loads, slow)).mean() >= 0.999


def test_mixtral_on_seven_of_eight_slots_stays_balanced_in_the_next_domain_of_text(data_dir: Path) -> None:
    counts = json.loads((data_dir / "olmoe_routing" / "mixtral_counts.json").read_text())
    windows = [ExpertLoads(mean=np.array(counts[name])) for name in ("c4", "wikipedia", "book", "arxiv", "github")]
    limits = SlotLimits.uniform(8, 2, slots_per_domain=4).without([7])
    balance = []
    for planned, then in pairwise(windows):
        copies = place_copies(planned, limits)
        assert levels(copies, planned, limits).max() <= 1.001
        balance.append(float((1 / levels(copies, then, limits)).mean()))
    assert np.mean(balance) >= 0.99
