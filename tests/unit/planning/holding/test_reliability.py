"""Recovery probabilities against asking every choice of deaths whether the plan loses something."""

from collections.abc import Iterator
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cluster import Cluster, Slot
from nep.planning.holding import reliability
from nep.planning.holding.reliability import DeathGraph, count_independent_sets, death_graph, recovery_probability
from nep.planning.layout import Layout
from nep.planning.plan import Lane, Plan
from nep.planning.planner import lost_intervals, plan_after_failure, plan_from_scratch, plan_mirrors
from tests.unit.planning.strategies import debug_like_lines, layouts, line_list

LINES = debug_like_lines(num_layers=1, num_experts=4, units_per_expert=8, vocab_size=48)


def _start(num_slots: int, per_node: int) -> tuple[Plan, Cluster]:
    cluster = Cluster.uniform(num_slots, per_node)
    return plan_from_scratch(cluster, LINES, num_replicas=1, global_batch_size=24), cluster


def _choices(plan: Plan, cluster: Cluster, by: str, size: int) -> Iterator[set[int]]:
    """The slots left after each choice of deaths."""
    nodes = {slot.index: slot.node for slot in cluster.slots}
    units = [{slot} for slot in plan.slots]
    if by == "node":
        units = [
            {slot for slot in plan.slots if nodes[slot] == node} for node in sorted({nodes[s] for s in plan.slots})
        ]
    for dead in combinations(units, size):
        yield set(plan.slots).difference(*dead)


@st.composite
def _plans(draw: st.DrawFn) -> tuple[Plan, Cluster, dict[str, int]]:
    """Any owners, any mirrors, on any nodes."""
    num_units = {"b": draw(st.integers(1, 8)), "a": 4}
    slots = tuple(range(draw(st.integers(1, 7))))
    cluster = Cluster(tuple(Slot(slot, draw(st.integers(0, 3))) for slot in slots))
    owners = draw(layouts(num_units, slots, "partition"))
    mirrors = draw(layouts(num_units, slots, draw(st.sampled_from(("partition", "any")))))
    # A unit has one mirror at most.
    seen: set[tuple[str, int]] = set()
    cuts: dict[str, dict[int, list[tuple[int, int]]]] = {}
    for axis, by_slot in mirrors.cuts.items():
        for slot, intervals in by_slot.items():
            for unit in (unit for lo, hi in intervals for unit in range(lo, hi)):
                if (axis, unit) not in seen:
                    seen.add((axis, unit))
                    cuts.setdefault(axis, {}).setdefault(slot, []).append((unit, unit + 1))
    plan = Plan(
        number=1,
        slots=slots,
        replicas=(slots,),
        lanes=tuple(Lane(0, (slot,), 1) for slot in slots),
        holders=owners,
        owners=owners,
        mirrors=Layout({axis: {slot: tuple(units) for slot, units in cut.items()} for axis, cut in cuts.items()}),
        redundancy="device",
        speeds_ppm=(1,) * len(slots),
    )
    return plan, cluster, num_units


@given(_plans(), st.sampled_from(("slot", "node")), st.data())
def test_the_share_of_choices_that_lose_nothing(
    case: tuple[Plan, Cluster, dict[str, int]], by: str, data: st.DataObject
) -> None:
    plan, cluster, num_units = case
    lines = line_list(num_units)
    population = len(plan.slots) if by == "slot" else len({slot.node for slot in cluster.slots})
    size = data.draw(st.integers(0, population))
    left = list(_choices(plan, cluster, by, size))
    harmless = sum(not lost_intervals(plan, live, lines) for live in left)
    found = recovery_probability(plan, size, cluster=cluster, by=by)  # type: ignore[arg-type]
    assert found.method == "exact" and found.population == population
    assert found.probability == pytest.approx(harmless / len(left), abs=1e-12)


@st.composite
def _graphs(draw: st.DrawFn) -> DeathGraph:
    vertices = tuple(range(draw(st.integers(1, 10))))
    everything = list(combinations(vertices, 2))
    pairs = draw(st.sets(st.sampled_from(everything))) if everything else set()
    fatal = draw(st.frozensets(st.sampled_from(vertices), max_size=3))
    return DeathGraph(
        vertices=vertices,
        fatal=fatal,
        pairs=tuple(sorted(pair for pair in pairs if not fatal & set(pair))),
    )


@given(_graphs(), st.integers(0, 10))
def test_independent_sets_one_by_one(graph: DeathGraph, size: int) -> None:
    sets = [
        chosen
        for chosen in combinations(graph.vertices, size)
        if not graph.fatal & set(chosen) and not any(a in chosen and b in chosen for a, b in graph.pairs)
    ]
    assert count_independent_sets(graph, size) == len(sets)


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("closed", [False, True])
def test_paths_and_rings(length: int, closed: bool) -> None:
    pairs = [(slot, slot + 1) for slot in range(length - 1)]
    if closed and length > 2:
        pairs.append((0, length - 1))
    graph = DeathGraph(vertices=tuple(range(length)), fatal=frozenset(), pairs=tuple(sorted(pairs)))
    for size in range(length + 1):
        sets = [
            one for one in combinations(graph.vertices, size) if not any(a in one and b in one for a, b in graph.pairs)
        ]
        assert count_independent_sets(graph, size) == len(sets)


@pytest.mark.parametrize("num_slots", [8, 64])
def test_mutual_pairs_have_a_closed_form(num_slots: int) -> None:
    """Choose k of the n/2 pairs and one end of each."""
    plan, cluster = _start(num_slots, 1)
    for size in (0, 1, 2, 3, num_slots // 2, num_slots // 2 + 1, num_slots):
        expected = comb(num_slots // 2, size) * 2**size
        found = recovery_probability(plan, size, cluster=cluster)
        assert found.probability == pytest.approx(expected / comb(num_slots, size))
        assert (found.method, found.standard_error, found.num_samples) == ("exact", 0, 0)


def test_two_deaths_of_64_slots() -> None:
    """1/63 for pairs; a ring of all slots, each mirrored on the next, would lose with twice as many."""
    plan, cluster = _start(64, 8)
    assert recovery_probability(plan, 2, cluster=cluster).probability == pytest.approx(1 - 1 / 63)
    assert recovery_probability(plan, 2, cluster=cluster, by="node").probability == pytest.approx(1 - 4 / 28)
    assert recovery_probability(plan, 1, cluster=cluster, by="node").probability == 1
    ring = DeathGraph(
        vertices=tuple(range(64)),
        fatal=frozenset(),
        pairs=(*((slot, slot + 1) for slot in range(63)), (0, 63)),
    )
    assert 1 - count_independent_sets(ring, 2) / comb(64, 2) == pytest.approx(2 / 63)


def test_until_mirrors_are_complete_the_widow_must_not_die() -> None:
    plan, cluster = _start(8, 1)
    cluster = cluster.fail([3])
    after = plan_after_failure(plan, cluster, LINES)
    assert len(death_graph(after, cluster).fatal) == 1
    assert recovery_probability(after, 1, cluster=cluster).probability == pytest.approx(6 / 7)
    completed = plan_mirrors(after, cluster, LINES)
    assert death_graph(completed, cluster).fatal == frozenset()
    assert recovery_probability(completed, 1, cluster=cluster).probability == 1
    assert recovery_probability(completed, 2, cluster=cluster).probability == pytest.approx(1 - 5 / 21)


def test_without_mirrors_nobody_may_die() -> None:
    cluster = Cluster.uniform(4, 2)
    plan = plan_from_scratch(cluster, LINES, num_replicas=1, global_batch_size=4, redundancy="none")
    assert recovery_probability(plan, 0, cluster=cluster).probability == 1
    assert recovery_probability(plan, 1, cluster=cluster).probability == 0


def test_a_star_as_an_unequal_node_leaves_it_is_counted_exactly() -> None:
    lines = debug_like_lines(num_layers=3, num_experts=8, units_per_expert=16, vocab_size=64)
    cluster = Cluster.uniform(16, 8)
    plan = plan_from_scratch(cluster, lines, num_replicas=2, global_batch_size=16)
    cluster = cluster.fail([12])
    plan = plan_mirrors(plan_after_failure(plan, cluster, lines), cluster, lines)
    graph = death_graph(plan, cluster)
    assert max(sum(slot in pair for pair in graph.pairs) for slot in plan.slots) > 2
    for size in (2, 3):
        left = list(_choices(plan, cluster, "slot", size))
        harmless = sum(not lost_intervals(plan, live, lines) for live in left)
        assert recovery_probability(plan, size, cluster=cluster).probability == pytest.approx(harmless / len(left))


def _tangled(num_slots: int = 10) -> tuple[Plan, Cluster]:
    """Each slot is mirrored on the three after it, but of slot 7's units one has no mirror."""
    slots = tuple(range(num_slots))
    owners = {slot: ((3 * slot, 3 * slot + 3),) for slot in slots}
    mirrors: dict[int, list[tuple[int, int]]] = {slot: [] for slot in slots}
    for slot in slots:
        for step in (1, 2, 3):
            unit = 3 * slot + step - 1
            if unit != 22:
                mirrors[(slot + step) % num_slots].append((unit, unit + 1))
    plan = Plan(
        number=1,
        slots=slots,
        replicas=(slots,),
        lanes=tuple(Lane(0, (slot,), 1) for slot in slots),
        holders=Layout({"a": owners}),
        owners=Layout({"a": owners}),
        mirrors=Layout({"a": {slot: tuple(units) for slot, units in mirrors.items()}}),
        redundancy="device",
        speeds_ppm=(1,) * num_slots,
    )
    return plan, Cluster.uniform(num_slots, 1)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 10])
def test_what_is_too_tangled_is_sampled_and_says_so(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, cluster = _tangled()
    exact = recovery_probability(plan, size, cluster=cluster)
    assert exact.method == "exact"
    monkeypatch.setattr(reliability, "MAX_WORK", 0)
    sampled = recovery_probability(plan, size, cluster=cluster, seed=5)
    assert (sampled.method, sampled.num_samples) == ("sampled", 20_000)
    assert sampled.probability == pytest.approx(exact.probability, abs=5 * sampled.standard_error)
    assert 0 < sampled.standard_error < 0.01
    assert recovery_probability(plan, size, cluster=cluster, seed=5) == sampled
    few = recovery_probability(plan, size, cluster=cluster, num_samples=100)
    assert few.standard_error > sampled.standard_error


def test_samples_depend_on_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliability, "MAX_WORK", 0)
    plan, cluster = _tangled()
    found = {recovery_probability(plan, 2, cluster=cluster, seed=seed).probability for seed in range(4)}
    assert len(found) > 1


def test_a_large_tangle_ends_in_samples_by_itself() -> None:
    found = recovery_probability(*_tangled(700)[:1], 3, cluster=Cluster.uniform(700, 1), num_samples=500)
    assert found.method == "sampled"
    assert 0.9 < found.probability < 1


def test_python_does_not_run_out_of_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliability, "MAX_WORK", 1 << 60)
    plan, cluster = _tangled(1200)
    assert recovery_probability(plan, 2, cluster=cluster, num_samples=10).method == "sampled"


def test_many_small_tangles_are_counted_exactly() -> None:
    """Of 300 groups of four, in which no two may die: choose k groups and one of each."""
    vertices = tuple(range(1200))
    pairs = tuple(pair for first in range(0, 1200, 4) for pair in combinations(range(first, first + 4), 2))
    graph = DeathGraph(vertices=vertices, fatal=frozenset(), pairs=pairs)
    assert count_independent_sets(graph, 3) == comb(300, 3) * 4**3


def test_thousands_of_slots_and_failures_are_counted_exactly() -> None:
    pairs = tuple((slot, slot + 1) for slot in range(0, 16_384, 2))
    graph = DeathGraph(vertices=tuple(range(16_384)), fatal=frozenset(), pairs=pairs)
    assert count_independent_sets(graph, 1024) == comb(8192, 1024) * 2**1024


def test_impossible_questions_are_refused() -> None:
    plan, cluster = _start(4, 2)
    with pytest.raises(ValueError, match=r"num_failures \(3\) must be from 0 to the plan's nodes \(2\)"):
        recovery_probability(plan, 3, cluster=cluster, by="node")
    with pytest.raises(ValueError, match=r"num_failures \(-1\).*num_samples \(0\)"):
        recovery_probability(plan, -1, cluster=cluster, num_samples=0)
    with pytest.raises(ValueError, match=r"slots \[2, 3\] of plan 1 are not of the cluster"):
        recovery_probability(plan, 1, cluster=Cluster.uniform(2, 2))
