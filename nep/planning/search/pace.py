"""How a plan shares out its batch for the shortest step."""

from dataclasses import replace

from nep.planning.cluster import Cluster
from nep.planning.cost.held import Floats
from nep.planning.cost.known_times import KnownTimes
from nep.planning.cost.step_time import StepTime, replica_seconds, step_time
from nep.planning.holding.lanes import batch_choices, fill_rounds, share_by_pace, weights_of
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Lane, Plan
from nep.planning.search.climb import MOST_SLOTS, climb_shares
from nep.planning.search.request import PlanRequest

_ROUNDS = 4


def at_best_pace(
    plan: Plan, request: PlanRequest, cluster: Cluster, loads: ExpertLoads, shares: Floats | None, known: KnownTimes
) -> tuple[StepTime, Plan]:
    """The plan with the fastest way to share its batch that is found; the plan itself if none is faster.

    Args:
        plan: its lanes say who shares the batch.
        request: the model, the step and the hardware.
        cluster: the slots.
        loads: of the router.
        shares: see `step_time`.
        known: see `step_time`.

    Returns:
        Its step, and the plan.
    """
    speeds = cluster.speeds_ppm
    micro_batch_size = request.workload.micro_batch_size

    def paced(lanes: tuple[Lane, ...]) -> tuple[tuple[float, ...], Plan]:
        other = plan if lanes == plan.lanes else replace(plan, lanes=lanes)
        seconds = replica_seconds(
            other,
            shape=request.shape,
            workload=request.workload,
            cluster=cluster,
            hardware=request.hardware,
            loads=loads,
            shares=shares,
            known=known,
        )
        return seconds, other

    best = min((paced(lanes) for lanes in batch_choices(plan.lanes, speeds, micro_batch_size)), key=_slowest)
    weights = weights_of(best[1].lanes, speeds)
    # Replicas that are cut differently keep another pace: share by what was predicted, as long as that helps.
    for _ in range(_ROUNDS if len(plan.replicas) > 1 else 0):
        seconds, lanes = best[0], best[1].lanes
        others = [
            share_by_pace(lanes, seconds, weights),
            fill_rounds(lanes, seconds, micro_batch_size, weights),
        ]
        better = min((paced(other) for other in others if other != lanes), key=_slowest, default=best)
        if _slowest(better) >= _slowest(best):
            break
        best = better
    chosen = best[1]

    def predict(lanes: tuple[Lane, ...]) -> StepTime:
        return step_time(
            replace(chosen, lanes=lanes),
            shape=request.shape,
            workload=request.workload,
            cluster=cluster,
            hardware=request.hardware,
            loads=loads,
            shares=shares,
            known=known,
        )

    time = predict(chosen.lanes)
    # Replicas that are alike have equal shares already.
    alike = max(time.replica_seconds) <= min(time.replica_seconds) * (1 + 1e-9)
    if len(plan.replicas) == 1 or alike or len(plan.slots) > MOST_SLOTS:
        return time, chosen
    time, lanes = climb_shares(chosen.lanes, time, predict, weights)
    return time, chosen if lanes == chosen.lanes else replace(chosen, lanes=lanes)


def _slowest(paced: tuple[tuple[float, ...], Plan]) -> float:
    return max(paced[0])
