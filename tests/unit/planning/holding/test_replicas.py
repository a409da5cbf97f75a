import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nep.planning.cluster import Cluster
from nep.planning.cost.hardware import scale_up_domains
from nep.planning.cost.profiles import PROFILES
from nep.planning.holding.lanes import form_lanes
from nep.planning.holding.replicas import is_even, replica_choices


@given(st.sets(st.integers(0, 40), min_size=1, max_size=20), st.integers(1, 6), st.data())
def test_every_choice_shares_out_all_slots_in_neighbours(slots: set[int], per_node: int, data: st.DataObject) -> None:
    domains = {slot: slot // per_node for slot in slots}
    number = data.draw(st.integers(1, len(slots)))
    choices = replica_choices(sorted(slots), domains, number)
    assert len(set(choices)) == len(choices)
    for replicas in choices:
        assert len(replicas) == number and all(replicas)
        assert [slot for replica in replicas for slot in replica] == sorted(slots), "neighbours, in order"
    assert is_even(choices[-1])
    inside, num_domains = choices[0], len(set(domains.values()))
    for replica in inside:
        mine = {domains[slot] for slot in replica}
        if number >= num_domains:
            assert len(mine) == 1, "no replica leaves its domain"
        else:
            assert set(replica) == {slot for slot in slots if domains[slot] in mine}, "of whole domains"


def test_nodes_with_lost_slots_keep_their_replica() -> None:
    slots = [slot for slot in range(32) if slot not in (3, 17)]
    (inside, even) = replica_choices(slots, {slot: slot // 8 for slot in slots}, 4)
    assert [len(replica) for replica in inside] == [7, 8, 7, 8]
    assert [len(replica) for replica in even] == [8, 8, 7, 7]


def test_domains_may_lie_across_the_numbers_of_slots() -> None:
    (inside, *_) = replica_choices(range(6), {slot: slot % 2 for slot in range(6)}, 2)
    assert inside == ((0, 2, 4), (1, 3, 5))


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 12))
def test_whole_domains_are_grouped_as_evenly_as_their_size_allows(nodes: int, per_node: int, number: int) -> None:
    assume(number <= nodes)
    slots = range(nodes * per_node)
    inside = replica_choices(slots, {slot: slot // per_node for slot in slots}, number)[0]
    sizes = [len(replica) for replica in inside]
    assert max(sizes) - min(sizes) <= per_node


def test_more_replicas_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_replicas \(3\) must be from 1 to the healthy slots \(2\)"):
        replica_choices([4, 5], {4: 0, 5: 0}, 3)


@pytest.mark.parametrize("per_node", [4, 8, 72])
@pytest.mark.parametrize("size", [8, 12, 36, 72])
@pytest.mark.parametrize("dead", [(), (5,), (0, 1, 70, 71, 143), tuple(range(30, 40))])
def test_replicas_stay_inside_racks_of_72(per_node: int, size: int, dead: tuple[int, ...]) -> None:
    """GB200: eighteen trays of four make a rack, whose slots reach each other fast."""
    cluster = Cluster.uniform(4 * 72, per_node).fail(dead)
    racks = scale_up_domains(cluster, PROFILES["gb200-nvl72"])
    assert [racks[slot] for slot in range(288)] == [slot // 72 for slot in range(288)]
    inside = replica_choices(cluster.healthy, racks, 4 * 72 // size)[0]
    assert sum(map(len, inside)) == 288 - len(dead)
    assert all(len({racks[slot] for slot in replica}) == 1 for replica in inside)
    # What dead slots leave is shared out over the replicas of their own rack.
    assert min(map(len, inside)) >= (72 - 10) // (72 // size)
    for _, slots in form_lanes(inside, 8, racks):
        assert len({racks[slot] for slot in slots}) == 1


def test_where_racks_do_not_divide_no_more_replicas_than_must_cross_them() -> None:
    """Nine replicas of sixteen on two racks of 72: inside racks they are uneven, evenly one of them crosses."""
    racks = {slot: slot // 72 for slot in range(144)}
    inside, even = replica_choices(range(144), racks, 9)
    assert all(len({racks[slot] for slot in replica}) == 1 for replica in inside)
    assert {len(replica) for replica in even} == {16}
    assert sum(len({racks[slot] for slot in replica}) > 1 for replica in even) == 1
