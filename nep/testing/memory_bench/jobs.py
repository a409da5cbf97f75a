"""Runs the measured jobs and puts measured and predicted bytes side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nep.planning.cost.memory import Memory, change_memory, step_memory
from nep.planning.loads import ExpertLoads
from nep.planning.plan import Plan
from nep.testing.jobs import REPOSITORY
from nep.testing.memory_bench.cases import HEALTHY_STEP, STEPS, Case, more_to_hold
from nep.testing.memory_bench.counting import compile_allocator

_PASSING = ("staging", "activations", "workspace")
_WORKER = REPOSITORY / "nep" / "testing" / "memory_bench" / "worker.py"


def run_job(case: Case, folder: Path, *, timeout_s: float = 300.0) -> dict[int, dict[str, Any]]:
    """Run one job and collect what its slots counted.

    Args:
        case: the job.
        folder: for its files, empty or fresh.
        timeout_s: the job is killed after it.

    Returns:
        Slot -> what `nep.testing.memory_bench.worker` wrote; a slot that was killed is missing.

    Raises:
        RuntimeError: the job failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    compile_allocator(folder)
    file = folder / "case.json"
    file.write_text(case.to_json())
    command = [sys.executable, "-m", "nep.testing.launch", "--nproc-per-node", str(case.num_processes)]
    command += ["--timeout", str(timeout_s), "--", str(_WORKER), str(file)]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s + 20,
        check=False,
    )
    found = {int(path.stem[4:]): json.loads(path.read_text()) for path in sorted(folder.glob("slot*.json"))}
    if done.returncode or not found:
        raise RuntimeError(f"the job of {case.name!r} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return found


@dataclass(frozen=True, kw_only=True)
class SlotMemory:
    """One surviving slot, bytes.

    Attributes:
        slot: which.
        healthy, damaged: peak of live storages in a step of the healthy job, and of the damaged one once its mirrors
            are complete.
        more_to_hold: what it cannot avoid, see `more_to_hold`.
        healthy_kinds, damaged_kinds: the two peaks by kind.
        predicted_healthy, predicted_damaged: the planner's, by the same kinds.
        healthy_resident, damaged_resident: highest resident memory of the process in those steps.
        resident_before: before the trainer made anything: Python and torch.
        changes: each change of layout on the way: `measured`, of which `left_over` is what the interrupted step still
            had (parked operations keep their memory), `predicted`, `received_only` (the planner's estimate without a
            list of transfers) and `resident`.
    """

    slot: int
    healthy: int
    damaged: int
    more_to_hold: int
    healthy_kinds: dict[str, int]
    damaged_kinds: dict[str, int]
    predicted_healthy: dict[str, int]
    predicted_damaged: dict[str, int]
    healthy_resident: int
    damaged_resident: int
    resident_before: int
    changes: tuple[dict[str, int], ...]

    @property
    def raw(self) -> float:
        """Damaged over healthy."""
        return self.damaged / self.healthy

    @property
    def overhead(self) -> float:
        """Damaged over healthy and what fewer slots must hold anyway."""
        return self.damaged / (self.healthy + self.more_to_hold)

    @property
    def predictions(self) -> tuple[float, ...]:
        """Predicted over measured: healthy, damaged."""
        return (
            sum(self.predicted_healthy.values()) / self.healthy,
            sum(self.predicted_damaged.values()) / self.damaged,
        )

    @property
    def change_predictions(self) -> tuple[float, ...]:
        """Predicted over measured without what the step before left over: each change."""
        return tuple(change["predicted"] / (change["measured"] - change["left_over"]) for change in self.changes)


def measure(case: Case, folder: Path, *, timeout_s: float = 300.0) -> list[SlotMemory]:
    """Run a case and compare its survivors with what they were before.

    Args:
        case: the healthy job, which loses its last slot.
        folder: for files, empty or fresh.
        timeout_s: of each job.
    """
    first = run_job(case, folder / "job", timeout_s=timeout_s)
    last = first
    if case.redundancy == "none":
        first.pop(case.failed)
        last = run_job(replace(case, damaged=True), folder / "damaged", timeout_s=timeout_s)
    live = sorted(last)
    before, after = (_plans(found[live[0]]) for found in (first, last))
    more = more_to_hold(case, before[0], live)
    healthy = _predicted(case, before[0], first[live[0]]["steps"][str(HEALTHY_STEP)]["counts"])
    damaged = _predicted(case, after[-1], last[live[0]]["steps"][str(STEPS)]["counts"])
    found: list[SlotMemory] = []
    for slot in live:
        start, end = first[slot]["steps"][str(HEALTHY_STEP)], last[slot]["steps"][str(STEPS)]
        found.append(
            SlotMemory(
                slot=slot,
                healthy=start["total_bytes"],
                damaged=end["total_bytes"],
                more_to_hold=more[slot],
                healthy_kinds=start["by_kind"],
                damaged_kinds=end["by_kind"],
                predicted_healthy=measured_kinds(healthy.by_slot[slot]),
                predicted_damaged=measured_kinds(damaged.by_slot[slot]),
                healthy_resident=start["resident_bytes"],
                damaged_resident=end["resident_bytes"],
                resident_before=last[slot]["resident_before_bytes"],
                changes=_changes(case, slot, after, last[slot]["changes"]),
            )
        )
    return found


def measured_kinds(predicted: dict[str, int] | Any) -> dict[str, int]:
    """The planner's kinds as the finer ones that are measured: state is a master weight and two moments."""
    state, mirrors = predicted["state"] // 3, predicted["mirrors"] // 3
    return {
        "parameters": predicted["parameters"],
        "gradients": predicted["gradients"] - state - mirrors,
        "master": state,
        "moments": 2 * state,
        "sums": state,
        "mirrored master": mirrors,
        "mirrored moments": 2 * mirrors,
        "mirrored sums": mirrors,
        "staging": predicted["staging"],
        "activations": predicted["activations"],
        "workspace": predicted["workspace"],
    }


def _plans(found: dict[str, Any]) -> list[Plan]:
    return [Plan.from_json(entry["plan"]) for entry in found["plans"]]


def _predicted(case: Case, plan: Plan, counts: list[list[int]]) -> Memory:
    # On a CPU the host's memory is the device's. A router that has hardly been trained is far from even.
    plan = replace(plan, redundancy="device") if plan.redundancy == "host" else plan
    loads = ExpertLoads(mean=np.array(counts, dtype=np.float64))
    return step_memory(plan, shape=case.shape, workload=case.workload, loads=loads)


def _changes(case: Case, slot: int, plans: list[Plan], measured: list[dict[str, Any]]) -> tuple[dict[str, int], ...]:
    found: list[dict[str, int]] = []
    for change in measured:
        before, after = plans[change["to"] - 1], plans[change["to"]]
        exact, rough = (
            change_memory(before, after, shape=case.shape, workload=case.workload, live=live)
            for live in (after.slots, None)
        )
        found.append(
            {
                "measured": change["total_bytes"],
                "left_over": sum(change["by_kind"].get(f"{kind} (old)", 0) for kind in _PASSING),
                "predicted": exact.total(slot),
                "received_only": rough.total(slot),
                "resident": change["resident_bytes"],
            }
        )
    return tuple(found)
