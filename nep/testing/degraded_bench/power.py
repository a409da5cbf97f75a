"""Ours with power: watts for slots that have more to do, on simulated boards whose speed follows their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nep.planning.cost.known_times import KnownTimes
from nep.planning.cost.step_time import StepTime, replica_seconds, step_time
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.power import PPM, WattsPlan, domain_budgets, needed_speeds, plan_watts
from nep.power.controller import PowerController
from nep.testing.degraded_bench.jobs import Job
from nep.testing.degraded_bench.policies import Failed, ours_replanned, with_shares
from nep.testing.emulation.powered import PoweredSpeed

HEADROOM = 1.3
"""Highest limit of a board over its default."""

_COMPUTING = ("expert_gemm", "attention", "dense", "optimizer")
# Shares of the batch follow speeds and speeds follow shares: it settles at once.
_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Powered:
    """A plan with its watts.

    Attributes:
        plan: with the speeds that the watts are predicted to give.
        watts: limits.
        speed: boards under these limits.
    """

    plan: Plan
    watts: WattsPlan
    speed: PoweredSpeed


def with_power(job: Job, failed: Failed, *, node_headroom: bool) -> Powered:
    """Ours, re-planned, and watts planned for it.

    Boards may be set up to `HEADROOM` times their default limit.

    Args:
        job: the job.
        failed: slots that are gone, and draw nothing.
        node_headroom: a node's supply has the same headroom as its boards; otherwise it was built for the default
            limits of all its slots, and those that are left share what the failed ones no longer need.
    """
    plan = ours_replanned(job, failed)
    domains = {slot.index: slot.node for slot in job.cluster.slots}
    default_w = PoweredSpeed.uniform(range(job.num_slots), headroom=HEADROOM).default_w()
    budgets = domain_budgets(default_w, domains)
    if node_headroom:
        budgets = {domain: int(HEADROOM * watts) for domain, watts in budgets.items()}
    powered = PoweredSpeed.uniform(plan.slots, headroom=HEADROOM)
    target_s = job.emulation(_no_build, 0.0).predicted(job.healthy).total
    best: tuple[float, Plan, WattsPlan] | None = None
    # Shares by what all watts together would give, then by what is needed of them.
    speeds = _all_spent(powered, domains, budgets)
    for _ in range(_ROUNDS):
        shared = with_shares(job, plan, job.cluster.fail(failed).with_speeds(speeds))
        watts = plan_watts(
            powered.power_slots(_needed(job, shared, target_s), domains),
            budgets_w={domain: budgets[domain] for domain in {domains[slot] for slot in plan.slots}},
        )
        speeds = dict(watts.speeds_ppm)
        shared = replace(shared, speeds_ppm=tuple(speeds[slot] for slot in shared.slots))
        seconds = _step(job, shared).total
        if best is None or seconds < best[0]:
            best = seconds, shared, watts
    assert best is not None
    PowerController(powered.devices).set_limits(best[2].limits_w)
    return Powered(plan=best[1], watts=best[2], speed=powered)


def _all_spent(powered: PoweredSpeed, domains: Mapping[int, int], budgets: Mapping[int, int]) -> dict[int, int]:
    """Slot -> speed if each node's budget were shared evenly by the boards that are left of it."""
    speeds = {}
    for one in powered.power_slots(dict.fromkeys(powered.devices, PPM), domains):
        left = sum(domains[slot] == one.domain for slot in powered.devices)
        speeds[one.slot] = one.speed_at(max(one.lowest_w, min(one.max_w, budgets[one.domain] // left)))
    return speeds


def _needed(job: Job, plan: Plan, target_s: float) -> dict[int, int]:
    """Slot -> speed with which it would keep the healthy job's pace.

    The slots of a replica wait for each other in every layer, so each has to be as fast as the busiest needs.
    """
    full = replace(plan, speeds_ppm=(PPM,) * len(plan.slots))
    time = _step(job, full)
    seconds = replica_seconds(full, **_known(job), known=KnownTimes())
    after = time.total - max(seconds)
    compute_s: dict[int, float] = {}
    other_s: dict[int, float] = {}
    for replica, of_replica in zip(full.replicas, seconds, strict=True):
        busy = max(sum(time.by_slot[slot][part] for part in _COMPUTING) for slot in replica)
        compute_s |= dict.fromkeys(replica, busy)
        other_s |= dict.fromkeys(replica, max(0.0, of_replica - busy) + after)
    return needed_speeds(compute_s, target_s=target_s, other_s=other_s)


def _step(job: Job, plan: Plan) -> StepTime:
    return step_time(plan, **_known(job))


def _known(job: Job) -> Mapping[str, object]:
    return {
        "shape": job.shape,
        "workload": job.workload,
        "cluster": job.cluster,
        "hardware": job.hardware,
        "loads": job.loads or ExpertLoads.uniform(job.shape.num_moe_layers, job.shape.num_experts),
    }


def _no_build(*_: object) -> None:  # type: ignore[misc]
    raise AssertionError("a prediction builds no model")
