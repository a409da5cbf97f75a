"""Partners against all partners there are, and what many deaths in a row leave of the pairs."""

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.holding.pairing import pair_up


def _pairs(partner: dict[int, int]) -> set[frozenset[int]]:
    """The pairs of slots whose death together loses something."""
    return {frozenset(link) for link in partner.items()}


def _check(partner: dict[int, int], domains: dict[int, int], owned: dict[int, int]) -> None:
    assert all(owned[owner] and domains[owner] != domains[other] for owner, other in partner.items())
    assert len(set(partner.values())) == len(partner), "a slot serves two owners"


@st.composite
def _slots(draw: st.DrawFn, most: int = 7) -> tuple[dict[int, int], dict[int, int]]:
    """Domains and what each slot owns, often nothing."""
    size = draw(st.integers(1, most))
    domains = {slot * 3: draw(st.integers(0, 3)) for slot in range(size)}
    return domains, {slot: draw(st.sampled_from((0, 1, 1, 2, 7))) for slot in domains}


@st.composite
def _kept(draw: st.DrawFn, domains: dict[int, int], owned: dict[int, int]) -> dict[int, int]:
    """Any links that are one-to-one, in other domains and of owners that own something."""
    others = draw(st.permutations(sorted(domains)))
    return {
        owner: other
        for owner, other in zip(sorted(domains), others, strict=True)
        if owned[owner] and domains[owner] != domains[other] and draw(st.integers(0, 3))
    }


def _most_owners_with_a_partner(domains: dict[int, int], owned: dict[int, int]) -> int:
    slots = sorted(domains)
    return max(
        sum(bool(owned[a]) and domains[a] != domains[b] for a, b in zip(slots, order, strict=True))
        for order in permutations(slots)
    )


@given(st.data())
def test_as_many_owners_as_possible_find_a_partner_and_few_lose_theirs(data: st.DataObject) -> None:
    domains, owned = data.draw(_slots(6))
    kept = data.draw(_kept(domains, owned))
    partner = pair_up(domains, owned, kept)
    _check(partner, domains, owned)
    assert len(partner) == _most_owners_with_a_partner(domains, owned)
    moved = [owner for owner in kept if partner.get(owner) != kept[owner]]
    assert len(moved) <= 2 * (sum(map(bool, owned.values())) - len(kept)), "pairs opened for nobody"
    assert pair_up(dict(reversed(domains.items())), owned, dict(reversed(kept.items()))) == partner


@given(_slots(12))
def test_what_is_complete_stays(slots: tuple[dict[int, int], dict[int, int]]) -> None:
    domains, owned = slots
    partner = pair_up(domains, owned)
    _check(partner, domains, owned)
    assert pair_up(domains, owned, partner) == partner


@given(_slots(12))
def test_owners_are_left_out_only_where_one_domain_has_more_than_half(
    slots: tuple[dict[int, int], dict[int, int]],
) -> None:
    domains, owned = slots
    partner = pair_up(domains, owned)
    alone = {domains[slot] for slot in domains if owned[slot] and slot not in partner}
    if alone:
        (domain,) = alone
        others = {slot for slot in domains if domains[slot] != domain}
        assert 2 * len(others) < len(domains)
        assert {other for owner, other in partner.items() if domains[owner] == domain} == others


@pytest.mark.parametrize("nodes", [[1] * 2, [1] * 9, [8] * 2, [8] * 3, [8] * 8, [4, 4, 3], [5, 3, 2, 1], [7] * 5])
def test_from_scratch_pairs_are_mutual(nodes: list[int]) -> None:
    domains = dict(enumerate(node for node, size in enumerate(nodes) for _ in range(size)))
    partner = pair_up(domains, dict.fromkeys(domains, 5))
    size = len(domains)
    assert len(partner) == size
    assert len(_pairs(partner)) == (size // 2 if size % 2 == 0 else (size - 3) // 2 + 3)


@pytest.mark.parametrize(("num_nodes", "node_pairs"), [(2, 1), (4, 2), (8, 4), (128, 64), (3, 3), (5, 4), (9, 6)])
def test_whole_nodes_pair_up(num_nodes: int, node_pairs: int) -> None:
    """Two nodes that die together then lose state only if they are such a pair. An odd number leaves three."""
    domains = {slot: slot // 8 for slot in range(8 * num_nodes)}
    partner = pair_up(domains, dict.fromkeys(domains, 1))
    assert len({frozenset((domains[a], domains[b])) for a, b in partner.items()}) == node_pairs


@given(st.data())
def test_pairs_stay_minimal_after_any_deaths(data: st.DataObject) -> None:
    """Mutual pairs and at most one ring of three, whatever died before, if every slot is a domain."""
    alive = set(range(data.draw(st.integers(2, 16))))
    partner: dict[int, int] = {}
    while len(alive) >= 2:
        links = {a: b for a, b in partner.items() if a in alive and b in alive}
        partner = pair_up({slot: slot for slot in alive}, dict.fromkeys(alive, 1), links)
        assert len(partner) == len(alive)
        assert len(_pairs(partner)) <= (len(alive) + 3 * (len(alive) % 2)) // 2
        alive -= data.draw(st.sets(st.sampled_from(sorted(alive)), min_size=1, max_size=3), "died")


@given(st.data())
def test_one_death_moves_at_most_three_mirrors(data: st.DataObject) -> None:
    """That of the partner left over, and, if the ring of three takes it in, those of two others."""
    size, per_node = data.draw(st.integers(4, 24)), data.draw(st.integers(1, 4))
    alive = {slot: slot // per_node for slot in range(size)}
    owned = dict.fromkeys(alive, 1)
    partner = pair_up(alive, owned)
    while len(alive) > 2:
        dead = data.draw(st.sampled_from(sorted(alive)))
        del alive[dead]
        links = {a: b for a, b in partner.items() if a in alive and b in alive}
        partner = pair_up(alive, owned, links)
        _check(partner, alive, owned)
        orphans = [slot for slot in alive if slot in partner and slot not in links]
        moved = [slot for slot, other in partner.items() if slot in links and links[slot] != other]
        assert len(moved) <= 2 * len(orphans)
        if 2 * max(Counter(alive.values()).values()) <= len(alive):
            assert len(partner) == len(alive)


def test_two_left_by_deaths_find_each_other() -> None:
    assert pair_up({0: 0, 1: 1, 4: 4, 5: 5}, dict.fromkeys((0, 1, 4, 5), 1), {0: 1, 1: 0}) == {0: 1, 1: 0, 4: 5, 5: 4}


def test_a_broken_ring_of_three_becomes_a_pair() -> None:
    assert pair_up({0: 0, 1: 1}, {0: 1, 1: 1}, {0: 1}) == {0: 1, 1: 0}


def test_a_single_one_takes_a_ring_of_three_apart() -> None:
    partner = pair_up({slot: slot for slot in range(4)}, dict.fromkeys(range(4), 1), {0: 1, 1: 2, 2: 0})
    assert len(_pairs(partner)) == 2


def test_two_of_one_node_take_a_pair_of_others_apart() -> None:
    domains = {0: 0, 1: 0, 2: 1, 3: 2}
    assert pair_up(domains, dict.fromkeys(domains, 1), {2: 3, 3: 2}) == {0: 2, 2: 0, 1: 3, 3: 1}


def test_a_node_that_dies_leaves_few_pairs_of_nodes() -> None:
    """The four it was paired with take two pairs of one other pair of nodes apart, not of two."""
    domains = {slot: slot % 6 for slot in range(24)}
    partner = pair_up(domains, dict.fromkeys(domains, 1))
    alive = {slot: node for slot, node in domains.items() if node}
    links = {a: b for a, b in partner.items() if a in alive and b in alive}
    after = pair_up(alive, dict.fromkeys(alive, 1), links)
    assert len(_pairs(after)) == 10
    assert len({frozenset((alive[a], alive[b])) for a, b in after.items()}) == 4


def test_two_that_find_only_a_ring_of_three_join_it() -> None:
    domains = {0: 0, 1: 0, 2: 1, 3: 2, 4: 3}
    partner = pair_up(domains, dict.fromkeys(domains, 1), {2: 3, 3: 4, 4: 2})
    _check(partner, domains, dict.fromkeys(domains, 1))
    assert len(partner) == 5


def test_a_long_ring_is_opened_rather_than_a_pair() -> None:
    """One pair more instead of two."""
    domains = {slot: slot for slot in range(7)}
    kept = {1: 2, 2: 1, 3: 4, 4: 5, 5: 6, 6: 3}
    partner = pair_up(domains, dict.fromkeys(domains, 1), kept)
    assert (partner[1], partner[2]) == (2, 1)
    assert len(_pairs(partner)) == 6


def test_a_ring_of_three_with_one_that_owns_nothing_leaves_no_pair_inside_a_domain() -> None:
    domains, owned = {0: 0, 1: 1, 2: 1, 3: 2}, {0: 1, 1: 1, 2: 0, 3: 1}
    partner = pair_up(domains, owned, {1: 0, 0: 2})
    _check(partner, domains, owned)
    assert len(partner) == 3


def test_the_large_is_paired_with_the_small() -> None:
    domains = {0: 0, 1: 0, 2: 1, 3: 1}
    assert pair_up(domains, {0: 4, 1: 9, 2: 4, 3: 9}) == {0: 3, 3: 0, 1: 2, 2: 1}


def test_who_owns_nothing_may_serve_but_needs_nobody() -> None:
    assert pair_up({0: 0, 1: 1}, {0: 4, 1: 0}) == {0: 1}
    assert pair_up({0: 0, 1: 1, 2: 1}, {0: 4, 1: 4, 2: 0}) == {0: 1, 1: 0}
    assert pair_up({0: 0, 1: 1, 2: 2}, {0: 4, 1: 4, 2: 0}) == {0: 1, 1: 0}
    assert pair_up({0: 0}, {0: 4}) == {}


def test_a_link_without_data_is_opened_first() -> None:
    owned = {0: 1, 1: 1, 2: 1, 3: 1, 4: 0}
    kept = {1: 2, 2: 1, 3: 4}
    assert pair_up({slot: slot for slot in range(5)}, owned, kept) == {**kept, 0: 3}
