"""What frameworks do when slots are gone: each policy is a function from a job and its failed slots to a plan.

What peers do is made of our parts where that favours them: the same owners and mirrors, overlapped as here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nep.planning.batch import split_sequences
from nep.planning.cluster import Cluster
from nep.planning.cost.known_times import KnownTimes
from nep.planning.holding.assembly import ExpertAxes, assemble, hold_experts
from nep.planning.holding.lanes import form_lanes, hold_dense, make_lanes
from nep.planning.intervals import Intervals
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Lane, Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.search.make import make_plan
from nep.planning.search.pace import at_best_pace
from nep.testing.degraded_bench.jobs import Job

Failed = tuple[int, ...]

Policy = Callable[[Job, Failed], Plan | None]
"""A plan for the slots that the policy still uses; None: the job stands still."""


def drop_the_replica(job: Job, failed: Failed) -> Plan | None:
    """Replicas that lost a slot are given up, as with torchft: the others share the whole batch."""
    intact = [replica for replica in job.healthy.replicas if not set(failed) & set(replica)]
    if not intact:
        return None
    slots = sorted(slot for replica in intact for slot in replica)
    return plan_from_scratch(
        job.cluster.restrict(slots),
        job.lines,
        num_replicas=len(intact),
        global_batch_size=job.global_batch_size,
        redundancy="device" if len(intact) > 1 else "none",
    )


def whole_experts(job: Job, failed: Failed, *, fixed: bool = False) -> Plan | None:
    """A damaged replica places its experts whole and evenly by number on fewer slots, as NEP in Megatron.

    Args:
        job: the job.
        failed: slots that are gone.
        fixed: replicas keep their shares of the batch; otherwise these are in proportion to their slots.
    """
    replicas = tuple(tuple(slot for slot in replica if slot not in failed) for replica in job.healthy.replicas)
    cluster = job.cluster.fail(failed)
    experts = ExpertAxes.of(job.lines)
    assert experts is not None
    dealt = [[_even_by_number(len(replica), experts)] * len(experts.names) for replica in replicas]
    lanes = make_lanes(form_lanes(replicas, 1, cluster.domains), cluster.speeds_ppm, job.global_batch_size)
    if fixed:
        lanes = _fixed_shares(job, lanes)
    return assemble(
        replicas=replicas,
        lanes=lanes,
        cuts=hold_dense(lanes, cluster.speeds_ppm, job.lines) | hold_experts(experts, replicas, dealt),
        cluster=cluster,
        lines=job.lines,
        redundancy="device",
    )


def whole_experts_fixed_shares(job: Job, failed: Failed) -> Plan | None:
    """`whole_experts` with the shares of the healthy job."""
    return whole_experts(job, failed, fixed=True)


def whole_experts_paced(job: Job, failed: Failed) -> Plan | None:
    """`whole_experts` with our shares of the batch: what cutting experts adds to these."""
    plan = whole_experts(job, failed)
    return None if plan is None else with_shares(job, plan, job.cluster.fail(failed))


def recovered(job: Job, failed: Failed) -> Plan:
    """Ours in the first step after the last of several failures: nobody has looked at pace yet."""
    plan, cluster = job.healthy, job.cluster
    for slot in failed:
        cluster = cluster.fail([slot])
        plan = plan_mirrors(plan_after_failure(plan, cluster, job.lines), cluster, job.lines)
    return plan


def ours(job: Job, failed: Failed) -> Plan:
    """Ours: recovered, with the batch shared by pace, the first lever of compensation."""
    plan = recovered(job, failed)
    return with_shares(job, plan, job.cluster.fail(failed)) if failed else plan


def ours_replanned(job: Job, failed: Failed) -> Plan:
    """Ours once the rebalancer has looked at it: a warm start that moves what pays."""
    plan = recovered(job, failed)
    return make_plan(job.request(job.cluster.fail(failed), plan)).plan if failed else plan


def with_shares(job: Job, plan: Plan, cluster: Cluster) -> Plan:
    """The plan with the batch shared so that its replicas take equally long, as predicted.

    Args:
        job: the job.
        plan: who holds what.
        cluster: slots with the speeds that they have.
    """
    speeds = cluster.speeds_ppm
    plan = replace(plan, speeds_ppm=tuple(speeds[slot] for slot in plan.slots))
    loads = job.loads or ExpertLoads.uniform(job.shape.num_moe_layers, job.shape.num_experts)
    return at_best_pace(plan, job.request(cluster, plan), cluster, loads, None, KnownTimes())[1]


POLICIES: dict[str, Policy] = {
    "drop the replica": drop_the_replica,
    "whole experts, fixed shares": whole_experts_fixed_shares,
    "whole experts": whole_experts,
    "whole experts, our shares": whole_experts_paced,
    "ours, first step": recovered,
    "ours": ours,
    "ours, re-planned": ours_replanned,
}


def _even_by_number(num_slots: int, experts: ExpertAxes) -> list[Intervals]:
    """Neighbouring experts for each slot, numbers that differ by one at most."""
    size, first = experts.units_per_expert, 0
    held: list[Intervals] = []
    for count in split_sequences(experts.num_experts, [1] * num_slots):
        held.append(((first * size, (first + count) * size),) if count else ())
        first += count
    return held


def _fixed_shares(job: Job, lanes: tuple[Lane, ...]) -> tuple[Lane, ...]:
    """Every replica has as many sequences as before, shared evenly by what is left of it."""
    shared: list[Lane] = []
    for replica in sorted({lane.replica for lane in lanes}):
        own = [lane for lane in lanes if lane.replica == replica]
        parts = split_sequences(job.global_batch_size // len(job.healthy.replicas), [1] * len(own))
        shared += [replace(lane, num_sequences=part) for lane, part in zip(own, parts, strict=True)]
    return tuple(shared)
