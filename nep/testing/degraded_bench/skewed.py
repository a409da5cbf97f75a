"""A router that prefers some experts: experts where they are, re-placed whole, cut anew, or copied with quotas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from nep.planning.loads import ExpertLoads
from nep.planning.search.make import make_plan
from nep.planning.search.request import Limits, Planned
from nep.report.layouts import rendered
from nep.testing.degraded_bench.jobs import Job
from nep.testing.degraded_bench.measure import Bench, Measured
from nep.testing.emulation.cases import MIXTRAL_LIKE
from nep.testing.emulation.setting import LABEL
from nep.testing.planner_bench.cases import olmoe

DOMAIN = "c4"
"""Text whose loads the router has; plain web text."""

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
    for name, shape, copies in (("mixtral", MIXTRAL_LIKE, 16), ("olmoe", olmoe(3), 72)):
        path = folder / f"{name}_counts.npz"
        if not path.is_file():
            raise ValueError(f"{path} is missing; name a folder with olmoe_routing, or leave out the part skewed")
        with np.load(path) as tables:
            counts = np.asarray(tables[DOMAIN])
        shape = replace(shape, name=f"{shape.name}, loads of {name}", num_layers=len(counts), vocab_size=16)
        job = Job(name=f"{name} loads", shape=shape, sequences=16, loads=ExpertLoads(mean=counts.astype(np.float64)))
        found.append((replace(job, pace=6.0 if name == "mixtral" else 30.0), copies))
    return found


@dataclass(frozen=True, kw_only=True)
class SkewTable:
    """Steps of one job.

    Attributes:
        job: which.
        imbalance: most over mean load of a slot under the static placement, mean over layers.
        steps: policy -> what was measured.
    """

    job: Job
    imbalance: float
    steps: Mapping[str, Measured]

    def to_json(self) -> dict[str, Any]:
        static = self.steps["static"].step_s
        return {
            "static_imbalance": self.imbalance,
            "policies": {
                name: {
                    "step_s": one.step_s,
                    "predicted_s": one.predicted_s,
                    "predicted_over_emulated": one.predicted_ratio,
                    "over_static": one.step_s / static,
                    "cpu_share": one.cpu_share,
                }
                for name, one in self.steps.items()
            },
        }

    def text(self) -> str:
        """A table."""
        table = Table(
            title=f"{self.job.name}: {LABEL} seconds of a step; static placement {self.imbalance:.2f} most over mean",
            title_justify="left",
        )
        table.add_column("experts")
        for name in ("step s", "over static", "predicted s", "pred/em", "CPU"):
            table.add_column(name, justify="right")
        for name, one in self.steps.items():
            table.add_row(
                name,
                f"{one.step_s:.4f}",
                f"{one.step_s / self.steps['static'].step_s:.4f}",
                f"{one.predicted_s:.4f}",
                f"{one.predicted_ratio:.3f}",
                f"{one.cpu_share:.0%}",
            )
        return rendered(table, width=_WIDTH)


def run_skewed(bench: Bench, copies: int, *, tell: Callable[[str], None] = lambda _: None) -> SkewTable:
    """Runs a job with its experts placed in each way.

    Args:
        bench: of a job with loads.
        copies: expert copies per layer and replica where there are any.
        tell: is told each result.
    """
    job = bench.job
    assert job.loads is not None
    even = Bench(replace(job, loads=None), bench.build, bench.pace)
    steps = {"static, equal loads": even.run(job.healthy), "static": bench.run(job.healthy)}
    ways = {
        "whole experts by load": Limits(fractions=False),
        "rebalanced (warm, cuts)": Limits(),
        "copies by load and quotas": Limits(fractions=False, physical_experts=copies),
    }
    for name, limits in ways.items():
        planned = _placed(job, limits)
        one = bench.run(planned.plan)
        # With quotas copies do not share evenly, which is what a plan alone would say.
        steps[name] = replace(one, predicted_s=planned.report.predicted.total)
        tell(f"{job.name}, {name}: {one.step_s:.4f} s, {one.step_s / steps['static'].step_s:.4f} of static")
    return SkewTable(job=job, imbalance=_imbalance(job), steps=steps)


def _placed(job: Job, limits: Limits) -> Planned:
    """The static plan, re-planned; with copies from scratch, as the static one has none."""
    current = None if limits.physical_experts is not None else job.healthy
    return make_plan(replace(job.request(job.cluster, current), limits=limits))


def _imbalance(job: Job) -> float:
    assert job.loads is not None
    mean = job.loads.normalised().mean
    per_slot = mean.reshape(len(mean), job.slots_per_replica, -1).sum(axis=2)
    return float((per_slot.max(axis=1) / per_slot.mean(axis=1)).mean())
