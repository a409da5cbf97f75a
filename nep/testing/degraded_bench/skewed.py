"""A router that prefers some experts: experts where they are, re-placed whole, cut anew, or copied with quotas."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from nep.planning.cost.step_time import step_time
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.search.drafts import Drafter
from nep.planning.search.request import Limits
from nep.planning.search.with_copies import shares_of
from nep.report.layouts import rendered
from nep.testing.degraded_bench.jobs import Job
from nep.testing.degraded_bench.measure import Bench
from nep.testing.emulation.cases import MIXTRAL_LIKE
from nep.testing.emulation.run import EmulatedVote, run_emulated
from nep.testing.emulation.setting import LABEL
from nep.testing.emulation.steering import Steersman
from nep.testing.planner_bench.cases import olmoe

DOMAINS = ("c4", "github")
"""Text whose loads the router has: of the web, and programs, which keep some experts much busier."""

_EVERY = 4

_WIDTH = 140


def skewed_jobs(data: Path) -> list[tuple[Job, int]]:
    """Jobs with the loads of real models, and the expert copies per layer that a plan with copies may have.

    Args:
        data: folder with `olmoe_routing`.

    Raises:
        ValueError: it has none.
    """
    folder = data / "olmoe_routing"
    found = []
    for name, shape, copies, pace in (("mixtral", MIXTRAL_LIKE, 16, 6.0), ("olmoe", olmoe(3), 72, 30.0)):
        path = folder / f"{name}_counts.npz"
        if not path.is_file():
            raise ValueError(f"{path} is missing; name a folder with olmoe_routing, or leave out the part skewed")
        with np.load(path) as tables:
            counts = {domain: np.asarray(tables[domain], dtype=np.float64) for domain in DOMAINS}
        for domain, mean in counts.items():
            of_loads = replace(shape, name=f"{shape.name}, {len(mean)} layers", num_layers=len(mean), vocab_size=16)
            loads = ExpertLoads(mean=mean)
            job = Job(name=f"{name}, {domain}", shape=of_loads, sequences=16, loads=loads, pace=pace)
            found.append((job, copies))
    return found


@dataclass(frozen=True, kw_only=True)
class Rebalanced:
    """One run: steps with experts where they were, then the rebalancer's plan.

    Attributes:
        static_s: of a step before.
        step_s: of a step after.
        predicted_s: of the planner, for the loads that the job has.
        moved_s: that changing took.
        cpu_share: of the processors.
        said: what the rebalancer said, with its step.
    """

    static_s: float
    step_s: float
    predicted_s: float
    moved_s: float
    cpu_share: float
    said: tuple[tuple[int, str], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "static_s": self.static_s,
            "step_s": self.step_s,
            "over_static": self.step_s / self.static_s,
            "predicted_s": self.predicted_s,
            "predicted_over_emulated": self.predicted_s / self.step_s,
            "moved_s": self.moved_s,
            "cpu_share": self.cpu_share,
            "rebalancer": [{"step": step, "said": text} for step, text in self.said],
        }


@dataclass(frozen=True, kw_only=True)
class SkewTable:
    """Steps of one job.

    Attributes:
        job: which.
        imbalance: most over mean load of a slot under the static placement, mean over layers.
        even_s: of a step with the static placement if all experts were equally busy.
        ways: way -> its run.
    """

    job: Job
    imbalance: float
    even_s: float
    ways: Mapping[str, Rebalanced]

    def to_json(self) -> dict[str, Any]:
        return {
            "static_imbalance": self.imbalance,
            "equal_loads_s": self.even_s,
            "ways": {name: one.to_json() for name, one in self.ways.items()},
        }

    def text(self) -> str:
        """A table."""
        table = Table(
            title=f"{self.job.name}: {LABEL}; static placement {self.imbalance:.2f} most over mean load; equal loads "
            f"would take {self.even_s:.4f} s",
            title_justify="left",
        )
        table.add_column("experts")
        for name in (
            "static s",
            "step s",
            "over static",
            "over equal loads",
            "predicted s",
            "pred/em",
            "moved s",
            "CPU",
        ):
            table.add_column(name, justify="right")
        for name, one in self.ways.items():
            table.add_row(
                name,
                f"{one.static_s:.4f}",
                f"{one.step_s:.4f}",
                f"{one.step_s / one.static_s:.4f}",
                f"{one.step_s / self.even_s:.4f}",
                f"{one.predicted_s:.4f}",
                f"{one.predicted_s / one.step_s:.3f}",
                f"{one.moved_s:.2f}",
                f"{one.cpu_share:.0%}",
            )
        return rendered(table, width=_WIDTH)


def run_skewed(bench: Bench, copies: int, *, tell: Callable[[str], None] = lambda _: None) -> SkewTable:
    """Runs a job with its experts placed in each way, each time from the static placement on.

    Args:
        bench: of a job with loads.
        copies: expert copies per layer and replica where there are any.
        tell: is told each result.
    """
    job = bench.job
    assert job.loads is not None
    ways = {
        "whole experts by load": Limits(fractions=False),
        "cuts, warm": Limits(),
        "copies and quotas": Limits(fractions=False, physical_experts=copies),
    }
    found = {}
    for name, limits in ways.items():
        found[name] = one = _rebalanced(bench, limits)
        tell(f"{job.name}, {name}: {one.static_s:.4f} to {one.step_s:.4f} s, {one.step_s / one.static_s:.4f}")
    even = Bench(replace(job, loads=None), bench.build, bench.pace)
    return SkewTable(job=job, imbalance=_imbalance(job), even_s=even.run(job.healthy).step_s, ways=found)


def _rebalanced(bench: Bench, limits: Limits) -> Rebalanced:
    """Steps, the rebalancer once, steps."""
    job = bench.job
    emulation = job.emulation(bench.build, bench.pace)
    steersman = Steersman(emulation=emulation, levers=(), rebalance_every=_EVERY, limits=limits)
    plans = [job.healthy]

    def steer(vote: EmulatedVote) -> Plan | None:
        plan = steersman(vote) if vote.step == _EVERY else None
        plans.extend([plan] if plan is not None else [])
        return plan

    run = run_emulated(job.healthy, emulation, steps=2 * _EVERY, steer=steer)
    slept = sum(step.wall_s for step in run.steps) / sum(step.seconds for step in run.steps) if run.pace else 1.0
    before = [step.seconds for step in run.steps if 1 < step.number <= _EVERY]
    # The first of a plan has no parameters to wait for.
    after = [step.seconds for step in run.steps if step.number > _EVERY + 1]
    return Rebalanced(
        static_s=slept * statistics.fmean(before),
        step_s=slept * statistics.fmean(after),
        predicted_s=_predicted(job, plans[-1]),
        moved_s=sum(run.moved_s.values()),
        cpu_share=run.cpu_share,
        said=tuple(steersman.rebalances),
    )


def _predicted(job: Job, plan: Plan) -> float:
    """With quotas copies do not share evenly, which is what a plan alone would say."""
    drafter = Drafter(job.request(job.cluster, plan))
    has_copies, has_slices = drafter.forms(plan)
    return step_time(
        plan,
        shape=job.shape,
        workload=job.workload,
        cluster=job.cluster,
        hardware=job.hardware,
        loads=job.loads,
        shares=shares_of(drafter, plan) if has_copies and not has_slices else None,
    ).total


def _imbalance(job: Job) -> float:
    assert job.loads is not None
    mean = job.loads.normalised().mean
    per_slot = mean.reshape(len(mean), job.slots_per_replica, -1).sum(axis=2)
    return float((per_slot.max(axis=1) / per_slot.mean(axis=1)).mean())
