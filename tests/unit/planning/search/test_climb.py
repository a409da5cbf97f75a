"""Shares of the batch: no better neighbour, and slow lanes keep theirs while their replica gives sequences away."""

from dataclasses import replace

import pytest

from nep.planning.cluster import Cluster
from nep.planning.cost.known_times import KnownTimes
from nep.planning.cost.step_time import StepTime, step_time
from nep.planning.cost.workload import Workload
from nep.planning.holding.lanes import share_in_replicas, weights_of
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Lane, Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.search.pace import at_best_pace
from nep.planning.search.request import PlanRequest
from nep.planning.shapes import parameter_lines
from nep.testing.emulation.cases import IDEAL, MIXTRAL_LIKE

SHAPE = MIXTRAL_LIKE
LINES = parameter_lines(SHAPE)
HARDWARE = IDEAL
WORKLOAD = Workload(global_batch_size=512, micro_batch_size=8, seq_len=4096, grad_sync="point_to_point", overlap=True)


def _predicted(plan: Plan, cluster: Cluster) -> StepTime:
    return step_time(plan, shape=SHAPE, workload=WORKLOAD, cluster=cluster, hardware=HARDWARE)


def _paced(plan: Plan, cluster: Cluster) -> Plan:
    request = PlanRequest(cluster=cluster, shape=SHAPE, workload=WORKLOAD, hardware=HARDWARE, num_replicas=2)
    loads = ExpertLoads.uniform(SHAPE.num_moe_layers, SHAPE.num_experts)
    return at_best_pace(plan, request, cluster, loads, None, KnownTimes())[1]


def _sequences(plan: Plan) -> list[int]:
    return [sum(lane.num_sequences for lane in plan.lanes if lane.replica == index) for index in (0, 1)]


@pytest.mark.parametrize("failed", [(3,), (3, 5, 1), (3, 5, 1, 6)])
def test_a_damaged_job_has_no_better_shares_nearby(failed: tuple[int, ...]) -> None:
    cluster = Cluster.uniform(16, 8)
    plan = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=512)
    cluster = cluster.fail(failed)
    plan = plan_mirrors(plan_after_failure(plan, cluster, LINES), cluster, LINES)
    paced = _paced(plan, cluster)
    seconds = _predicted(paced, cluster).total
    assert paced.global_batch_size == 512
    assert seconds <= _predicted(plan, cluster).total
    first, second = _sequences(paced)
    for moved in (-2, -1, 1, 2):
        lanes = share_in_replicas(paced.lanes, [first + moved, second - moved])
        assert _predicted(replace(paced, lanes=lanes), cluster).total >= seconds


def test_a_slow_lane_keeps_its_share_while_its_replica_gives_sequences_away() -> None:
    cluster = Cluster.uniform(16, 8).with_speeds({2: 666_667})
    plan = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=512)
    paced = _paced(plan, cluster)
    shares = {lane.slots[0]: lane.num_sequences for lane in paced.lanes}
    others = [shares[slot] for slot in range(8) if slot != 2]
    assert max(others) - min(others) <= 1
    assert shares[2] < 0.75 * min(others)
    assert _sequences(paced)[0] < _sequences(plan)[0], "rows to slices of the slow slot's expert cost its replica"


def test_weights_say_what_shares_follow() -> None:
    speeds = {0: 1_000_000, 1: 500_000, 2: 1_000_000, 3: 1_000_000}

    def lanes(*shares: int) -> list[Lane]:
        return [Lane(slot // 2, (slot,), share) for slot, share in enumerate(shares)]

    assert weights_of(lanes(20, 10, 16, 15), speeds) == [1_000_000, 500_000, 1, 1]
    assert weights_of(lanes(15, 15, 16, 15), speeds) == [1, 1, 1, 1]
    assert weights_of(lanes(24, 6, 16, 15), speeds) == [24, 6, 1, 1]
