"""Mirrors as a layout: pairs, what moves after deaths, bytes, and what two deaths at once can lose."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cluster import Cluster, Slot
from nep.planning.holding.mirrors import mirror_shares, place_mirrors
from nep.planning.intervals import count_units, intersect
from nep.planning.layout import Layout, Line, LineKind, Lines, axes, axis_lines, axis_unit_numel
from nep.planning.plan import Lane, Plan
from nep.planning.planner import lost_intervals, plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.transfer import fetch
from nep.planning.validation import check_plan
from tests.unit.planning.strategies import AXES, SLOTS, debug_like_lines, layouts, line_list, slots_with, units_of

LINES = debug_like_lines(num_layers=2, num_experts=4, units_per_expert=8, vocab_size=48)


def _start(num_slots: int, per_node: int, num_replicas: int = 1, lines: Lines = LINES) -> tuple[Plan, Cluster]:
    cluster = Cluster.uniform(num_slots, per_node)
    return plan_from_scratch(cluster, lines, num_replicas=num_replicas, global_batch_size=24), cluster


def _remirrored(plan: Plan, cluster: Cluster, lines: Lines = LINES) -> Plan:
    return plan_mirrors(plan_after_failure(plan, cluster, lines), cluster, lines)


def _links(plan: Plan) -> dict[int, set[int]]:
    """Owner -> the slots that mirror some of its units, asked unit by unit."""
    links: dict[int, set[int]] = {}
    for (axis, owner), units in units_of(plan.owners).items():
        for unit in units:
            links.setdefault(owner, set()).update(slots_with(plan.mirrors, axis, unit))
    return links


def _pairs(plan: Plan) -> set[frozenset[int]]:
    return {frozenset((owner, mirror)) for owner, mirrors in _links(plan).items() for mirror in mirrors}


def _bytes(layout: Layout, plan: Plan, lines: Lines) -> dict[int, int]:
    unit_numel = axis_unit_numel(lines)
    total = dict.fromkeys(plan.slots, 0)
    for (axis, slot), units in units_of(layout).items():
        total[slot] += len(units) * unit_numel[axis]
    return total


def _state(plan: Plan, lines: Lines = LINES) -> dict[int, int]:
    owned, mirrored = _bytes(plan.owners, plan, lines), _bytes(plan.mirrors, plan, lines)
    return {slot: owned[slot] + mirrored[slot] for slot in plan.slots}


@given(st.data())
def test_shares_are_counted_unit_by_unit(data: st.DataObject) -> None:
    num_units, slots = data.draw(AXES), data.draw(SLOTS)
    owners = data.draw(layouts(num_units, slots, "partition"))
    mirrors = data.draw(layouts(num_units, slots))
    owners = owners.restrict(data.draw(st.sets(st.sampled_from(slots))))
    sizes = {axis: data.draw(st.integers(1, 5)) for axis in num_units}
    owned: dict[int, int] = {}
    mirrored: dict[tuple[int, int], int] = {}
    for (axis, owner), units in units_of(owners).items():
        owned[owner] = owned.get(owner, 0) + len(units) * sizes[axis]
        for unit in units:
            for mirror in slots_with(mirrors, axis, unit):
                mirrored[owner, mirror] = mirrored.get((owner, mirror), 0) + sizes[axis]
    shares = mirror_shares(owners, mirrors, sizes)
    assert (shares.owned, shares.mirrored) == (owned, mirrored)


@pytest.mark.parametrize(("num_slots", "per_node"), [(8, 1), (16, 4), (13, 1), (12, 4), (64, 8)])
def test_two_deaths_lose_something_only_if_they_are_a_pair(num_slots: int, per_node: int) -> None:
    """n/2 of the n(n-1)/2 pairs of slots, n/2 + 3/2 for an odd n, where scattered mirrors lose with nearly all."""
    plan, _ = _start(num_slots, per_node)
    fatal = [dead for dead in combinations(plan.slots, 2) if lost_intervals(plan, set(plan.slots) - set(dead), LINES)]
    assert {frozenset(dead) for dead in fatal} == _pairs(plan)
    assert len(fatal) == (num_slots + 3 * (num_slots % 2)) // 2
    assert all(len(mirrors) == 1 for mirrors in _links(plan).values())


def _scattered(plan: Plan) -> Plan:
    """Each unit's mirror on another slot than the unit before: what placement by free memory alone drifts to."""
    cuts: dict[str, dict[int, list[tuple[int, int]]]] = {}
    for (axis, owner), units in sorted(units_of(plan.owners).items()):
        others = [slot for slot in plan.slots if slot != owner]
        for index, unit in enumerate(sorted(units)):
            slot = others[(owner + index) % len(others)]
            cuts.setdefault(axis, {}).setdefault(slot, []).append((unit, unit + 1))
    mirrors = Layout({axis: {slot: tuple(units) for slot, units in cut.items()} for axis, cut in cuts.items()})
    return replace(plan, mirrors=mirrors)


def test_scattered_mirrors_lose_with_every_two_deaths_and_are_gathered() -> None:
    plan, cluster = _start(8, 1)
    scattered = _scattered(plan)
    check_plan(scattered, LINES)
    dead = list(combinations(plan.slots, 2))
    lost = [two for two in dead if lost_intervals(scattered, set(plan.slots) - set(two), LINES)]
    assert len(lost) == len(dead) == 28
    assert len(_pairs(plan_mirrors(scattered, cluster, LINES))) == 4


def test_two_nodes_lose_something_only_if_they_are_a_pair() -> None:
    plan, _ = _start(32, 4)
    nodes = [set(range(first, first + 4)) for first in range(0, 32, 4)]
    fatal = [two for two in combinations(nodes, 2) if lost_intervals(plan, set(plan.slots) - two[0] - two[1], LINES)]
    assert len(fatal) == 4


@given(st.data())
def test_after_any_failures_mirrors_are_complete_in_pairs_and_within_bounds(data: st.DataObject) -> None:
    lines = debug_like_lines(num_layers=1, num_experts=4, units_per_expert=6, vocab_size=40)
    num_slots, per_node = data.draw(st.integers(3, 13)), data.draw(st.integers(1, 4))
    plan, cluster = _start(num_slots, per_node, data.draw(st.integers(1, 3)), lines)
    unit = max(axis_unit_numel(lines).values())
    while len(plan.slots) > 2:
        dead = data.draw(st.sets(st.sampled_from(plan.slots), min_size=1, max_size=len(plan.slots) - 2), "died")
        cluster = cluster.fail(dead)
        plan = _remirrored(plan, cluster, lines)
        check_plan(plan, lines)
        assert plan.unprotected(lines) == []
        assert plan_mirrors(plan, cluster, lines) is plan
        domains = cluster.restrict(plan.slots).domains
        links = _links(plan)
        assert all(domains[owner] != domains[mirror] for owner, mirrors in links.items() for mirror in mirrors)
        state, owned = _state(plan, lines), _bytes(plan.owners, plan, lines)
        sizes = [list(domains.values()).count(domain) for domain in domains.values()]
        if 2 * max(sizes) <= len(plan.slots):
            assert all(len(mirrors) == 1 for mirrors in links.values())
            assert max(state.values()) <= 2 * max(owned.values())
        else:
            away = [slot for slot, size in zip(domains, sizes, strict=True) if size < max(sizes)]
            mean = sum(state[slot] for slot in away) / len(away)
            assert max(state.values()) <= max(2 * max(owned.values()), mean + 1) + unit
            crowded = len(plan.slots) - len(away)
            edges = sum(map(len, links.values()))
            assert edges <= len(plan.slots) + (crowded - len(away)) + len(away)


def test_what_heirs_take_over_follows_them_to_their_own_partners() -> None:
    plan, cluster = _start(8, 1)
    dead = 3
    after = plan_after_failure(plan, cluster.fail([dead]), LINES)
    assert len(_pairs(after)) > 4, "until then the dead slot's mirror serves all heirs"
    completed = plan_mirrors(after, cluster.fail([dead]), LINES)
    assert all(len(mirrors) == 1 for mirrors in _links(completed).values())
    assert len(_pairs(completed)) == 5


@pytest.mark.parametrize("dead", range(8))
def test_one_death_moves_three_shares_and_no_other_pair(dead: int) -> None:
    """The heirs' new units, what was mirrored on the dead slot, and the mirror of the pair that is opened."""
    plan, cluster = _start(8, 1)
    cluster = cluster.fail([dead])
    after = plan_after_failure(plan, cluster, LINES)
    completed = plan_mirrors(after, cluster, LINES)
    before, links = _links(plan), _links(completed)
    moved = [owner for owner in completed.slots if links[owner] != before[owner]]
    (widow,) = before[dead]
    assert len(moved) == 2 and widow in moved
    transfer = fetch([after.owners], completed.mirrors, list(axes(LINES)), after.mirrors)
    unit_numel = axis_unit_numel(LINES)
    numel = sum((piece.hi - piece.lo) * unit_numel[piece.axis] for piece in transfer)
    owned = _bytes(completed.owners, completed, LINES)
    assert numel <= sum(owned[owner] for owner in moved) + _bytes(plan.owners, plan, LINES)[dead]
    assert all(dead not in (piece.src, piece.dst) for piece in transfer)


def test_two_nodes_of_unequal_size_cut_the_one_left_over_in_few_pieces() -> None:
    lines = debug_like_lines(num_layers=3, num_experts=8, units_per_expert=16, vocab_size=64)
    plan, cluster = _start(16, 8, 2, lines)
    assert len(_pairs(plan)) == 8
    plan = _remirrored(plan, cluster.fail([12]), lines)
    links = _links(plan)
    alone = [owner for owner, mirrors in links.items() if len(mirrors) > 1]
    assert len(alone) == 1 and alone[0] < 8
    state = _state(plan, lines)
    second = [state[slot] for slot in plan.slots if slot >= 8]
    # Seven slots keep their own and eight others' state: the mean of that is the least the fullest can have.
    limit = max(2 * max(_bytes(plan.owners, plan, lines).values()), sum(second) / 7 + 1)
    assert max(second) <= limit + max(axis_unit_numel(lines).values())


def test_a_cut_owner_is_mirrored_alike_in_every_layer() -> None:
    """A bucket of sums is as slow as the slot that mirrors most of its layer."""
    lines = debug_like_lines(num_layers=4, num_experts=8, units_per_expert=64, vocab_size=64)
    plan, cluster = _start(16, 8, 2, lines)
    plan = _remirrored(plan, cluster.fail([12]), lines)
    (alone,) = [owner for owner, mirrors in _links(plan).items() if len(mirrors) > 1]
    experts = [axis for axis, line in axis_lines(lines).items() if line.kind is LineKind.EXPERTS]
    owned = {axis: plan.owners.intervals(axis, alone) for axis in experts}
    found = {
        slot: [count_units(intersect(owned[axis], plan.mirrors.intervals(axis, slot))) for axis in experts]
        for slot in _links(plan)[alone]
    }
    total = sum(map(count_units, owned.values()))
    for units in found.values():
        parts = [sum(units) * count_units(own) / total for own in owned.values()]
        assert all(abs(unit - part) < 3 for unit, part in zip(units, parts, strict=True)), found


def _uneven(units: list[int], unit_numel: int = 2) -> tuple[Plan, Lines]:
    """One axis; slot i owns so many units, one after the other, and nothing is mirrored."""
    ends = [sum(units[: index + 1]) for index in range(len(units))]
    slots = tuple(range(len(units)))
    owners = Layout({"a": {slot: ((ends[slot] - units[slot], ends[slot]),) for slot in slots if units[slot]}})
    lines = {"a": Line(kind=LineKind.VOCAB, num_units=ends[-1], unit_shape=(unit_numel,), axis="a", layer=0)}
    return _plan(owners, slots), lines


def _plan(owners: Layout, slots: tuple[int, ...], mirrors: Layout | None = None) -> Plan:
    return Plan(
        number=1,
        slots=slots,
        replicas=(slots,),
        lanes=tuple(Lane(0, (slot,), 1) for slot in slots),
        holders=owners,
        owners=owners,
        mirrors=mirrors or Layout({}),
        redundancy="device",
        speeds_ppm=(1,) * len(slots),
    )


def _mirrored_on(plan: Plan, where: dict[int, dict[int, int]]) -> Plan:
    """The plan with owner -> slot -> so many of the owner's units, from the first on, mirrored there."""
    cuts: dict[int, list[tuple[int, int]]] = {}
    for owner, slots in where.items():
        ((lo, _),) = plan.owners.intervals("a", owner)
        for slot, units in slots.items():
            cuts.setdefault(slot, []).append((lo, lo + units))
            lo += units
    return replace(plan, mirrors=Layout({"a": {slot: tuple(units) for slot, units in cuts.items()}}))


THREE_AND_TWO = Cluster(tuple(Slot(slot, slot // 3) for slot in range(5)))


def _units_on(plan: Plan, owner: int) -> dict[int, int]:
    ((lo, hi),) = plan.owners.intervals("a", owner)
    return {
        slot: count
        for slot, intervals in plan.mirrors.by_slot("a").items()
        if (count := count_units(intersect(intervals, [(lo, hi)])))
    }


def test_who_is_left_out_goes_to_the_emptiest_whole_if_it_fits() -> None:
    # Twice the largest owner, 18 units and one of slack, is allowed: slot 3 has room for 8, slot 4 for 12.
    plan, lines = _uneven([2, 2, 6, 9, 5])
    plan = _mirrored_on(plan, {0: {3: 2}, 1: {4: 2}, 3: {0: 9}, 4: {1: 5}})
    after = plan_mirrors(plan, THREE_AND_TWO, lines)
    assert _units_on(after, 2) == {4: 6}
    plan, lines = _uneven([2, 2, 6, 9, 9])
    plan = _mirrored_on(plan, {0: {3: 2}, 1: {4: 2}, 3: {0: 9}, 4: {1: 9}})
    assert _units_on(plan_mirrors(plan, THREE_AND_TWO, lines), 2) == {3: 6}


def test_what_is_spread_already_stays_and_grows_where_it_is() -> None:
    plan, lines = _uneven([2, 2, 6, 5, 9])
    plan = _mirrored_on(plan, {0: {3: 2}, 1: {4: 2}, 2: {4: 2}, 3: {0: 5}, 4: {1: 9}})
    after = plan_mirrors(plan, THREE_AND_TWO, lines)
    assert _units_on(after, 2) == {4: 6}, "slot 3 is emptier, but would make another pair"
    # Both have too much: slot 3 keeps the 8 of 9 units that fit.
    plan, lines = _uneven([2, 2, 9, 9, 9])
    plan = _mirrored_on(plan, {0: {3: 2}, 1: {4: 2}, 2: {3: 9}, 3: {0: 9}, 4: {1: 9}})
    after = plan_mirrors(plan, THREE_AND_TWO, lines)
    assert _units_on(after, 2) == {3: 8, 4: 1}
    assert plan_mirrors(after, THREE_AND_TWO, lines) is after


def test_what_cannot_move_takes_room() -> None:
    """Slot 5 is about to leave and is mirrored on slot 3, so slot 2's state goes to slot 4."""
    cluster = Cluster(tuple(Slot(slot, min(slot // 3, 1), "draining" if slot == 5 else "healthy") for slot in range(6)))
    plan, lines = _uneven([2, 2, 6, 5, 9, 9])
    plan = _mirrored_on(plan, {0: {3: 2}, 1: {4: 2}, 3: {0: 5}, 4: {1: 9}, 5: {3: 9}})
    assert _units_on(plan_mirrors(plan, cluster, lines), 2) == {4: 6}


@given(st.data())
def test_any_owners_in_any_domains_are_within_the_bound(data: st.DataObject) -> None:
    num_units = data.draw(AXES)
    lines = {
        axis: Line(kind=LineKind.VOCAB, num_units=units, unit_shape=(data.draw(st.integers(1, 9)),), axis=axis, layer=0)
        for axis, units in num_units.items()
    }
    slots = tuple(range(data.draw(st.integers(2, 7))))
    cluster = Cluster(tuple(Slot(slot, data.draw(st.integers(0, 2))) for slot in slots))
    owners = data.draw(layouts(num_units, slots, "partition"))
    before = _plan(owners, slots)
    if data.draw(st.booleans()):  # the same owners as if they had once been mirrored in other domains
        before = replace(before, mirrors=place_mirrors(before, Cluster.uniform(len(slots), 1), lines))
    plan = plan_mirrors(before, cluster, lines)
    check_plan(plan, lines)
    assert plan.unprotected(lines) == []
    assert plan_mirrors(plan, cluster, lines) is plan
    domains = cluster.domains
    links = _links(plan)
    assert all(domains[owner] != domains[mirror] for owner, mirrors in links.items() for mirror in mirrors)
    state, owned = _state(plan, lines), _bytes(plan.owners, plan, lines)
    crowded = max(slots, key=lambda slot: list(domains.values()).count(domains[slot]))
    away = [slot for slot in slots if domains[slot] != domains[crowded]]
    mean = -(-sum(state[slot] for slot in away) // len(away)) if 2 * len(away) < len(slots) else 0
    slack = max(axis_unit_numel(lines).values()) if mean else 0
    assert max(state.values()) <= max(2 * max(owned.values()), mean) + slack


def test_a_returning_domain_takes_the_mirrors_that_one_domain_had_to_keep() -> None:
    """While only one node lives, slots are the domains; when a second one is there, mirrors go over to it."""
    plan, _ = _start(4, 4)
    split = Cluster(tuple(Slot(index, index // 2) for index in range(4)))
    after = plan_mirrors(plan, split, LINES)
    assert all(owner // 2 != mirror // 2 for owner, mirrors in _links(after).items() for mirror in mirrors)


def test_slots_about_to_leave_get_no_mirrors_and_keep_theirs() -> None:
    plan, cluster = _start(6, 1)
    draining = cluster.with_health([2], "draining")
    after = plan_mirrors(plan, draining, LINES)
    before, links = _links(plan), _links(after)
    assert links[2] == before[2]
    assert all(2 not in mirrors for owner, mirrors in links.items())
    assert after.unprotected(LINES) == []
    check_plan(after, LINES)
    assert plan_mirrors(after, draining, LINES) is after


def test_a_slots_own_mirror_of_itself_is_replaced() -> None:
    lines = line_list({"a": 4})
    owners = Layout({"a": {0: ((0, 2),), 1: ((2, 4),)}})
    plan = _plan(owners, (0, 1), mirrors=owners)
    assert place_mirrors(plan, Cluster.uniform(2, 1), lines) == Layout({"a": {0: ((2, 4),), 1: ((0, 2),)}})


def test_mirrors_in_place_are_the_same_object_whatever_their_order_of_storage() -> None:
    plan, cluster = _start(6, 2)
    turned = Layout(
        {
            axis: {
                slot: tuple((u, u + 1) for lo, hi in reversed(cut) for u in range(lo, hi)) for slot, cut in by.items()
            }
            for axis, by in plan.mirrors.cuts.items()
        }
    )
    other = replace(plan, mirrors=turned)
    assert plan_mirrors(other, cluster, LINES) is other
    assert place_mirrors(other, cluster, LINES) is turned


def test_every_owner_is_covered_even_if_the_other_domain_is_one_slot() -> None:
    plan, cluster = _start(6, 5)
    assert all(mirrors == {5} for owner, mirrors in _links(plan).items() if owner < 5)
    for axis, line in axis_lines(LINES).items():
        assert all(len(slots_with(plan.mirrors, axis, unit)) == 1 for unit in range(line.num_units))
    assert plan_mirrors(plan, cluster, LINES) is plan
