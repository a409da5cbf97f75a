"""Steers an emulated job as training steers itself: measures from the votes, compensates, rebalances."""

from __future__ import annotations

from dataclasses import dataclass, field

from nep.planning.compensate import LEVERS, Boost, Compensation, Lever, compensate
from nep.planning.cost.work import WorkOfSlots
from nep.planning.pace import PaceChange, PaceConfig, PaceMeter
from nep.planning.plan import Plan
from nep.planning.router_statistics import RouterStatistics
from nep.planning.search.make import make_plan
from nep.planning.search.request import Limits, PlanRequest
from nep.planning.shapes import parameter_lines
from nep.testing.emulation.run import EmulatedVote
from nep.testing.emulation.setting import Emulation

_LEAST_CHANGE = 0.03


@dataclass(kw_only=True)
class Steersman:
    """A `steer` for `run_emulated`.

    Attributes:
        emulation: the job.
        levers: of compensation; empty: none.
        boost: power.
        rebalance_every: steps; 0: never.
        limits: of what the planner may do.
        horizon_steps: within which a change must pay.
        pace: how soon a slot is taken for a slow one.
        changes: of pace, as they were found: (step, change).
        compensations, rebalances: (step, what was found), used or not.
    """

    emulation: Emulation
    levers: tuple[Lever, ...] = LEVERS
    boost: Boost | None = None
    rebalance_every: int = 0
    limits: Limits = field(default_factory=Limits)
    horizon_steps: int = 1000
    pace: PaceConfig = field(default_factory=PaceConfig)
    changes: list[tuple[int, PaceChange]] = field(default_factory=list)
    compensations: list[tuple[int, Compensation]] = field(default_factory=list)
    rebalances: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.meter = PaceMeter(self.pace)
        self.statistics = RouterStatistics()
        self._lines = parameter_lines(self.emulation.shape)

    def __call__(self, vote: EmulatedVote) -> Plan | None:
        """See `Steer`."""
        workload = self.emulation.workload
        self.statistics.update(vote.counts_le)
        work = WorkOfSlots(
            vote.plan,
            self._lines,
            tokens_per_sequence=workload.seq_len,
            micro_batch_size=workload.micro_batch_size,
        )
        found = self.meter.observe(vote.seconds, work.of(vote.counts_le))
        self.changes += [(vote.step, change) for change in found]
        plan = None
        if found and self.levers:
            plan = self._compensated(vote)
        elif self.rebalance_every and vote.step % self.rebalance_every == 0:
            plan = self._rebalanced(vote)
        if plan is not None:
            self.meter.restart()
        return plan

    def _compensated(self, vote: EmulatedVote) -> Plan | None:
        speeds = self.meter.speeds_ppm(least_change=_LEAST_CHANGE)
        found = compensate(self._request(vote, speeds), levers=self.levers, boost=self.boost)
        self.compensations.append((vote.step, found))
        return found.plan if found.lever is not None else None

    def _rebalanced(self, vote: EmulatedVote) -> Plan | None:
        planned = make_plan(self._request(vote, dict(zip(vote.plan.slots, vote.plan.speeds_ppm, strict=True))))
        self.rebalances.append((vote.step, planned.report.skipped or "changed"))
        return planned.plan if planned.report.skipped is None and planned.plan.number != vote.plan.number else None

    def _request(self, vote: EmulatedVote, speeds: dict[int, int]) -> PlanRequest:
        emulation = self.emulation
        return PlanRequest(
            cluster=emulation.cluster.with_speeds(speeds),
            shape=emulation.shape,
            workload=emulation.workload,
            hardware=emulation.hardware,
            loads=self.statistics.loads(),
            num_replicas=len(vote.plan.replicas),
            redundancy=vote.plan.redundancy,
            limits=self.limits,
            current=vote.plan,
            horizon_steps=self.horizon_steps,
        )
