import pytest

from nep.planning.cluster import Cluster, Slot


def test_uniform_numbers_slots_by_node() -> None:
    cluster = Cluster.uniform(5, 2)
    assert [slot.node for slot in cluster.slots] == [0, 0, 1, 1, 2]
    assert cluster.live == cluster.healthy == (0, 1, 2, 3, 4)
    assert set(cluster.speeds_ppm.values()) == {1_000_000}


def test_fail_changes_these_slots_only() -> None:
    cluster = Cluster.uniform(4, 2).fail([1, 3])
    assert cluster.live == (0, 2)
    assert cluster.fail([1]) == cluster
    assert Cluster.uniform(4, 2).live == (0, 1, 2, 3)


def test_only_healthy_slots_are_for_plans_but_all_live_ones_can_give() -> None:
    healths = ("healthy", "failed", "draining", "idle", "spare")
    cluster = Cluster(tuple(Slot(index, 0, health) for index, health in enumerate(healths)))
    assert cluster.healthy == (0,)
    assert cluster.live == (0, 2, 3, 4)
    assert cluster.with_health([4], "healthy").healthy == (0, 4)


def test_domains_are_nodes_while_two_of_them_live() -> None:
    cluster = Cluster.uniform(4, 2)
    assert cluster.domains == {0: 0, 1: 0, 2: 1, 3: 1}
    assert cluster.fail([2]).domains == {0: 0, 1: 0, 2: 1, 3: 1}
    assert cluster.fail([2, 3]).domains == {0: 0, 1: 1, 2: 2, 3: 3}
    assert cluster.restrict([0, 1]).domains == {0: 0, 1: 1}


def test_slots_are_sorted_and_unique() -> None:
    assert Cluster((Slot(2, 0), Slot(0, 0))) == Cluster((Slot(0, 0), Slot(2, 0)))
    with pytest.raises(ValueError, match=r"slots \[2\] are listed twice"):
        Cluster((Slot(2, 0), Slot(2, 1)))


def test_impossible_slots_are_refused() -> None:
    with pytest.raises(ValueError, match=r"index \(-1\).*health \('sick'\).*draining.*speed_ppm \(0\)"):
        Slot(-1, 0, "sick", 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"slots \[7\] are not of this cluster"):
        Cluster.uniform(2, 2).fail([7])
    with pytest.raises(ValueError, match=r"slots \[7\] are not of this cluster"):
        Cluster.uniform(2, 2).restrict([7])
    with pytest.raises(ValueError, match=r"num_slots \(0\).*slots_per_node \(0\)"):
        Cluster.uniform(0, 0)


def test_a_node_of_spares_is_no_fault_domain() -> None:
    """A mirror cannot lie there, so the slots of the other node must be told apart."""
    cluster = Cluster.uniform(4, 2).with_health([2, 3], "spare")
    assert cluster.domains == {0: 0, 1: 1, 2: 2, 3: 3}
    assert cluster.with_health([2], "healthy").domains == {0: 0, 1: 0, 2: 1, 3: 1}
    assert cluster.healthy == (0, 1)
