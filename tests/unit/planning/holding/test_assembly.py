"""Plans put together from cuts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nep.planning.cluster import Cluster
from nep.planning.holding.assembly import ExpertAxes, assemble, hold_experts, in_line_order
from nep.planning.holding.dealing import deal_cut
from nep.planning.holding.replica_cuts import CutsFromScratch, Prices
from nep.planning.layout import Layout
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.planner import plan_from_scratch
from nep.planning.validation import check_plan
from tests.unit.planning.strategies import debug_like_lines, units_of

LINES = debug_like_lines(num_layers=2, num_experts=8, units_per_expert=4)


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_equally_busy_experts_are_exchanged_and_no_slot_gets_more_or_less(
    num_experts: int, num_slots: int, data: st.DataObject
) -> None:
    cut = np.array(
        data.draw(
            st.lists(
                st.lists(st.integers(0, 3), min_size=num_slots, max_size=num_slots),
                min_size=num_experts,
                max_size=num_experts,
            )
        )
    )[None]
    mean = np.array([data.draw(st.lists(st.sampled_from((0.0, 1.0, 2.0)), min_size=num_experts, max_size=num_experts))])
    ordered = in_line_order(cut, ExpertLoads(mean=mean))
    for load in (0.0, 1.0, 2.0):
        experts = np.flatnonzero(mean[0] == load)
        assert sorted(map(tuple, cut[0, experts].tolist())) == sorted(map(tuple, ordered[0, experts].tolist()))
        columns = [tuple(row) for row in ordered[0, experts].tolist()]
        assert columns == sorted(columns, reverse=True), "what the first slot has most of comes first"


def test_layers_that_are_cut_alike_share_their_mapping() -> None:
    experts = ExpertAxes.of(LINES)
    assert experts is not None and experts.num_units == 2 * 8 * 4
    dealt = [deal_cut(np.full((2, 8, 2), 2), 4)] * 2
    cuts = hold_experts(experts, [(0, 1), (2, 3)], dealt)
    assert cuts["layers.0.experts"] is cuts["layers.1.experts"]
    assert cuts["layers.0.experts"][0] is cuts["layers.0.experts"][2]


def test_layers_with_other_experts_are_refused() -> None:
    other = debug_like_lines(num_layers=1, num_experts=3, units_per_expert=2)
    mixed = LINES | {f"x.{name}": replace(line, axis=f"x.{line.axis}") for name, line in other.items()}
    with pytest.raises(ValueError, match=r"layers have different experts .*\(3, 2\), \(8, 4\)"):
        ExpertAxes.of(mixed)
    assert ExpertAxes.of({"final_norm.weight": LINES["final_norm.weight"]}) is None


def _recut(plan: Plan, cluster: Cluster, loads: ExpertLoads) -> Plan:
    experts = ExpertAxes.of(LINES)
    assert experts is not None
    prices = replace(Prices.unknown(experts, cluster.speeds_ppm), loads=loads)
    scratch = CutsFromScratch(prices)
    cuts = dict(plan.holders.cuts) | hold_experts(
        experts, plan.replicas, [scratch.deal(slots, plan.holders) for slots in plan.replicas]
    )
    return assemble(
        replicas=plan.replicas,
        lanes=plan.lanes,
        cuts=cuts,
        cluster=cluster,
        lines=LINES,
        redundancy=plan.redundancy,
        current=plan,
    )


@given(st.integers(0, 50), st.integers(1, 2))
def test_owners_and_mirrors_follow_holders_and_stay_where_they_can(seed: int, num_replicas: int) -> None:
    cluster = Cluster.uniform(6, 3)
    plan = plan_from_scratch(cluster, LINES, num_replicas=num_replicas, global_batch_size=12)
    loads = ExpertLoads(mean=np.random.default_rng(seed).gamma(1.0, size=(2, 8)))
    after = _recut(plan, cluster, loads)
    check_plan(after, LINES)
    assert after.number == 2 and after.unprotected(LINES) == []
    owned, held = units_of(after.owners), units_of(after.holders)
    for (axis, slot), units in units_of(plan.owners).items():
        still = units & held.get((axis, slot), set())
        assert still <= owned.get((axis, slot), set())
    assert all(units <= held[where] for where, units in owned.items())


def test_the_same_loads_again_move_nothing() -> None:
    cluster = Cluster.uniform(4, 4)
    plan = plan_from_scratch(cluster, LINES, num_replicas=1, global_batch_size=8)
    after = _recut(plan, cluster, ExpertLoads.uniform(2, 8))
    assert (after.holders, after.owners, after.mirrors) == (plan.holders, plan.owners, plan.mirrors)
    assert Layout(after.holders.cuts) == plan.holders


def test_equal_slots_change_names_rather_than_experts() -> None:
    """Loads in another order: each slot keeps most of what it has, whoever would be first from scratch."""
    cluster = Cluster.uniform(4, 4)
    mean = np.array([[8.0, 1, 1, 1, 4, 4, 2, 2]] * 2)
    plan = _recut(
        plan_from_scratch(cluster, LINES, num_replicas=1, global_batch_size=8), cluster, ExpertLoads(mean=mean)
    )
    after = _recut(plan, cluster, ExpertLoads(mean=mean * 3))
    assert after.holders == plan.holders
