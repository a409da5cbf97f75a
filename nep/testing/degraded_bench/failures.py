"""Slots fail one after the other: what is left of the pace, by policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from nep.report.layouts import rendered
from nep.testing.degraded_bench.jobs import Job
from nep.testing.degraded_bench.measure import Bench, Measured, Share
from nep.testing.degraded_bench.policies import POLICIES, Failed
from nep.testing.degraded_bench.power import with_power
from nep.testing.emulation.setting import LABEL

WHERE = ("one replica", "spread")
# Places in a replica, in the order in which they fail; where failures are spread the replicas take turns.
_ORDER, _SPREAD = (3, 5, 1, 6), (3, 4, 5, 1)
MOST_FAILED = len(_ORDER)
WITH_POWER = {"ours, power of the node": False, "ours, 1.3x power": True}
"""Policy -> whether the supply of a node has the headroom of its boards."""
_WIDTH = 156


def failed_slots(job: Job, where: str, count: int) -> Failed:
    """Which slots fail.

    Args:
        job: of two replicas.
        where: all in the first replica, or in turn in both.
        count: how many.
    """
    size = job.slots_per_replica
    if where == "one replica":
        return tuple(slot % size for slot in _ORDER[:count])
    return tuple(_SPREAD[index] % size + index % 2 * size for index in range(count))


@dataclass(frozen=True, kw_only=True)
class FailureTable:
    """Shares of one job.

    Attributes:
        job: which.
        shares: where -> policy -> number of failed slots -> share.
    """

    job: Job
    shares: Mapping[str, Mapping[str, Mapping[int, Share]]]

    def shares_of_ideal(self) -> dict[str, dict[str, dict[str, float]]]:
        return self._each(lambda share: share.of_ideal)

    def shares_of_healthy(self) -> dict[str, dict[str, dict[str, float]]]:
        return self._each(lambda share: share.of_healthy)

    def to_json(self) -> dict[str, dict[str, dict[str, Any]]]:
        return self._each(lambda share: share.to_json())

    def text(self) -> str:
        """One table: for each policy and number of failed slots the share of ideal, with what explains it."""
        table = Table(
            title=f"{self.job.name}: {LABEL} samples per second by number of failed slots", title_justify="left"
        )
        for name in ("failed in", "policy"):
            table.add_column(name, no_wrap=True)
        names = ("slots", "of healthy", "of ideal", "healthy slots", "sequences", "blocks", "step s", "predicted")
        for name in (*names, "pred/em", "CPU"):
            table.add_column(name, justify="right")
        for where, policies in self.shares.items():
            for policy, shares in policies.items():
                for count, share in shares.items():
                    run = share.measured
                    still = run.plan is None
                    table.add_row(
                        where,
                        policy,
                        str(count),
                        f"{share.of_healthy:.4f}",
                        f"{share.of_ideal:.4f}",
                        "-" if share.intact is None else f"{share.intact:.4f}",
                        f"{share.sequences:.4f}",
                        f"{share.blocks:.4f}",
                        "-" if still else f"{run.step_s:.4f}",
                        "-" if still else f"{run.predicted_s:.4f}",
                        "-" if still else f"{run.predicted_ratio:.3f}",
                        f"{run.cpu_share:.0%}",
                    )
        table.caption = (
            "sequences, blocks: share of the pace that whole sequences and blocks leave, of what is beside it"
        )
        return rendered(table, width=_WIDTH)

    def _each(self, value: Callable[[Share], Any]) -> dict[str, dict[str, dict[str, Any]]]:
        return {
            where: {
                policy: {str(count): value(share) for count, share in counts.items()} for policy, counts in by.items()
            }
            for where, by in self.shares.items()
        }


def run_failures(
    bench: Bench,
    *,
    most: int,
    policies: Sequence[str] = (*POLICIES, *WITH_POWER),
    tell: Callable[[str], None] = lambda _: None,
) -> FailureTable:
    """Runs policies for 0 to `most` failed slots of one replica, and 2 to `most` spread over both.

    Args:
        bench: of the job.
        most: slots that fail at most.
        policies: which.
        tell: is told each share.
    """
    job = bench.job
    shares: dict[str, dict[str, dict[int, Share]]] = {}
    for where in WHERE:
        counts = range(most + 1) if where == WHERE[0] else range(2, most + 1)
        for policy in policies:
            for count in counts:
                measured = _measured(bench, policy, failed_slots(job, where, count))
                share = bench.share(measured, count)
                shares.setdefault(where, {}).setdefault(policy, {})[count] = share
                tell(
                    f"{job.name}, {count} failed in {where}, {policy}: {share.of_ideal:.4f} of ideal, "
                    f"predicted over emulated {measured.predicted_ratio:.3f}"
                )
    return FailureTable(job=job, shares=shares)


def _measured(bench: Bench, policy: str, failed: Failed) -> Measured:
    if not failed:
        return bench.run(bench.job.healthy)
    if policy in POLICIES:
        return bench.run(POLICIES[policy](bench.job, failed))
    powered = with_power(bench.job, failed, node_headroom=WITH_POWER[policy])
    return bench.run(powered.plan, powered.speed, powered.watts.limits_w)
