"""What is measured of a placement: balance and predicted seconds on several windows, time, movement, memory, rows."""

import statistics
import time
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nep.planning.cluster import Cluster, Slot
from nep.planning.copies.quotas import QuotaSolver
from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.step_time import StepTime, step_time
from nep.planning.cost.workload import Workload
from nep.planning.holding.assembly import ExpertAxes, assemble, hold_experts
from nep.planning.holding.dealing import deal_cut
from nep.planning.holding.lanes import hold_dense, make_lanes
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.planning.shapes import ModelShape, parameter_lines
from nep.testing.planner_bench.cases import Case, Counts
from nep.testing.planner_bench.planners import Placed, Planner, without_last

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One planner on one case; means over windows, times are medians.

    Balance is the mean over the maximum of load per speed, over layers; beside each stands the predicted step.

    Attributes:
        planned: balance on the window that was planned for; tokens of an expert shared evenly over its copies.
        planned_step_s: seconds of the step there.
        planned_quotas: balance there with quotas from its own counts; without copies the same as `planned`.
        planned_quotas_step_s: seconds there.
        next: balance on the window after it; tokens of an expert shared evenly over its copies.
        next_step_s: seconds there.
        next_quotas: balance there with quotas from its own counts; without copies the same as `next`.
        next_quotas_step_s: seconds there.
        cpu_ms: processor time of one plan, all layers.
        quotas_ms: processor time of the quotas of one layer; None without copies.
        moved_bytes: parameters of experts that slots receive in a re-plan.
        moved_share: of the bytes of all experts (copies included).
        duplicates: copies that a slot has of an expert that it already has, all layers.
        memory: fullest slot over mean, all layers together.
        memory_total: units of all slots over those of the model.
        rows_per_token: rows that a token sends per layer.
        busiest_rows: rows of a layer's busiest slot over the mean.
        death_lost_share: of all bytes, what the last slot held that nobody else does: it has to be moved if it dies.
        death_moved_share: of all bytes, what slots receive when it dies; None if there is no way to go on.
        death_balance: balance afterwards on the same window, tokens shared evenly over copies.
        death_step_s: seconds of the step there.
    """

    planned: float
    planned_step_s: float
    planned_quotas: float
    planned_quotas_step_s: float
    next: float
    next_step_s: float
    next_quotas: float
    next_quotas_step_s: float
    cpu_ms: float
    quotas_ms: float | None
    moved_bytes: float
    moved_share: float
    duplicates: float
    memory: float
    memory_total: float
    rows_per_token: float
    busiest_rows: float
    death_lost_share: float
    death_moved_share: float | None = None
    death_balance: float | None = None
    death_step_s: float | None = None

    def to_json(self) -> dict[str, float | None]:
        """Plain numbers."""
        return asdict(self)


def measure(planner: Planner, case: Case, *, workload: Workload, hardware: HardwareProfile, repeats: int) -> Measured:
    """Plans every window but the last and looks at what came of it in the next.

    Args:
        planner: who plans; from the second window on it is given its own plan of the one before.
        case: windows and slots.
        workload: of the predicted step.
        hardware: likewise.
        repeats: plans that the processor time is the median of.
    """
    bench = _Bench(case, workload, hardware)
    before: Placed | None = None
    rows: list[dict[str, float]] = []
    quota_times: list[float] = []
    for index in range(len(case.windows) - 1):
        loads, following = case.windows[index], case.windows[index + 1]
        placed = planner.plan(known_loads(case.windows[: index + 1]), before)
        rows.append(bench.row(placed, before, loads, following, quota_times))
        before = placed
    # Keys of a window that has no plan before it are missing from its row.
    means = {key: statistics.fmean(row[key] for row in rows if key in row) for key in rows[-1]}
    return Measured(
        **means,
        **_death(planner, case, workload, hardware),
        cpu_ms=_cpu_ms(planner, case, repeats),
        quotas_ms=statistics.median(quota_times) if quota_times else None,
    )


def known_loads(windows: Counts) -> ExpertLoads:
    """What is known after some windows: the loads of the last, and how much shares have varied among all of them."""
    sums = windows.sum(axis=2, keepdims=True)
    variance = None
    if len(windows) > 1:
        variance = (windows / np.maximum(sums, 1)).var(axis=0, ddof=1) * sums[-1].astype(np.float64) ** 2
    return ExpertLoads(mean=windows[-1], variance=variance, num_steps=len(windows))


def _death(planner: Planner, case: Case, workload: Workload, hardware: HardwareProfile) -> dict[str, float]:
    """The last slot dies after the first window."""
    loads = ExpertLoads.from_counts(case.windows[:1])
    placed = planner.plan(loads, None)
    kept = placed.units[:, :, :-1]
    total = placed.units.sum()
    missing = np.maximum(placed.size - kept.sum(axis=2), 0).sum()
    numbers = {"death_lost_share": float(missing / total)}
    if planner.recover is None:
        return numbers
    try:
        after = planner.recover(loads, placed)
    except ValueError:  # the others have no room for what is lost
        return numbers
    bench = _Bench(without_last(case), workload, hardware)
    shares = _even_shares(after)
    return numbers | {
        "death_moved_share": float(np.maximum(after.units - kept * (after.size // placed.size), 0).sum() / total),
        "death_balance": bench.balance(after, shares, case.windows[0]),
        "death_step_s": bench.step(bench.plan(after), after, shares, case.windows[0]).total,
    }


def _cpu_ms(planner: Planner, case: Case, repeats: int) -> float:
    """Median processor time of a plan on the second window, with the plan of the first in force."""
    first = planner.plan(ExpertLoads.from_counts(case.windows[:1]), None)
    loads = known_loads(case.windows[:2])
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        planner.plan(loads, first)
        times.append(1e3 * (time.process_time() - begin))
    return statistics.median(times)


class _Bench:
    """Measures placements of one case."""

    def __init__(self, case: Case, workload: Workload, hardware: HardwareProfile) -> None:
        self.case, self.workload, self.hardware = case, workload, hardware
        self.speeds = np.array(case.speeds)
        self.cluster = Cluster(
            tuple(
                Slot(slot, slot // case.slots_per_node, speed_ppm=round(speed * 1e6))
                for slot, speed in enumerate(case.speeds)
            )
        )

    def row(
        self, placed: Placed, before: Placed | None, loads: Counts, following: Counts, quota_times: list[float]
    ) -> dict[str, float]:
        """Everything of one window and the next."""
        even = _even_shares(placed)
        plan = self.plan(placed)
        planned = self.step(plan, placed, even, loads)
        numbers: dict[str, float] = {}
        for name, counts in (("planned", loads), ("next", following)):
            numbers[name] = self.balance(placed, even, counts)
            step = planned if counts is loads else self.step(plan, placed, even, counts)
            numbers[f"{name}_step_s"] = numbers[f"{name}_quotas_step_s"] = step.total
            numbers[f"{name}_quotas"] = numbers[name]
            if placed.has_copies:
                quotas = self._quotas(placed, counts, quota_times)
                numbers[f"{name}_quotas"] = self.balance(placed, quotas, counts)
                numbers[f"{name}_quotas_step_s"] = self.step(plan, placed, quotas, counts).total
        numbers |= {
            "duplicates": float(np.maximum(placed.units - placed.size, 0).sum() / placed.size),
            "memory": float(placed.units.sum(axis=(0, 1)).max() / placed.units.sum(axis=(0, 1)).mean()),
            "memory_total": float(placed.units.sum() / (placed.size * loads.size)),
            "rows_per_token": planned.rows_per_token,
            "busiest_rows": planned.busiest_rows,
        }
        if before is not None:
            moved = np.maximum(placed.units - before.units, 0).sum() / placed.size
            numbers["moved_bytes"] = float(moved) * self._expert_bytes()
            numbers["moved_share"] = float(moved * placed.size / placed.units.sum())
        return numbers

    def _expert_bytes(self) -> int:
        shape = self.case.shape
        return 3 * shape.ffn_hidden_size * shape.hidden_size * self.workload.parameter_bytes

    def balance(self, placed: Placed, shares: Floats, counts: Counts) -> float:
        """Of load, i.e. tokens times the part of the expert that a slot has of it."""
        part = 1.0 if placed.has_copies else placed.units / placed.size
        load = np.einsum("le,les->ls", counts.astype(np.float64), shares * part)
        level = load.sum(axis=1) / self.speeds.sum()
        return float((level / (load / self.speeds).max(axis=1)).mean())

    def _quotas(self, placed: Placed, counts: Counts, times: list[float]) -> Floats:
        """Shares by quotas of these counts."""
        solver = QuotaSolver((placed.units > 0).astype(np.int8), [round(speed * 1e6) for speed in self.speeds])
        begin = time.process_time()
        quotas = solver.split(counts)
        times.append(1e3 * (time.process_time() - begin) / len(counts))
        totals = counts[:, :, None].astype(np.float64)
        return np.where(totals > 0, quotas / np.maximum(totals, 1.0), _even_shares(placed))

    def step(self, plan: Plan, placed: Placed, shares: Floats, counts: Counts) -> StepTime:
        return step_time(
            plan,
            shape=self._shape(placed),
            workload=self.workload,
            cluster=self.cluster,
            hardware=self.hardware,
            loads=ExpertLoads.from_counts(counts[None]),
            shares=shares,
        )

    def _shape(self, placed: Placed) -> ModelShape:
        """The model, cut as finely as the placement is."""
        return replace(self.case.shape, neuron_block=self.case.shape.ffn_hidden_size // placed.size)

    def plan(self, placed: Placed) -> Plan:
        """One replica that holds this placement; lanes of one slot."""
        lines = parameter_lines(self._shape(placed))
        experts = ExpertAxes.of(lines)
        assert experts is not None  # every case has some
        slots = tuple(range(self.case.num_slots))
        speeds = self.cluster.speeds_ppm
        lanes = make_lanes([(0, (slot,)) for slot in slots], speeds, self.workload.global_batch_size)
        dealt = deal_cut(np.minimum(placed.units, placed.size), placed.size)
        cuts = hold_dense(lanes, speeds, lines) | hold_experts(experts, (slots,), [dealt])
        return assemble(replicas=(slots,), lanes=lanes, cuts=cuts, cluster=self.cluster, lines=lines, redundancy="none")


def _even_shares(placed: Placed) -> Floats:
    """[layers, experts, slots], share of an expert's tokens that each slot gets: all of them, or those of copies."""
    if not placed.has_copies:
        return (placed.units > 0).astype(np.float64)
    shares: Floats = placed.units / placed.units.sum(axis=2, keepdims=True)
    return shares
