"""A plan's report as one object, for scripts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nep.planning.cost.step_time import StepTime
from nep.planning.search.request import Planned, PlanRequest
from nep.planning.shapes import parameter_lines
from nep.report.plan_figures import held_experts, lost_share, samples_per_s, transfer_figures

SCHEMA = 1


def plan_object(
    request: PlanRequest, planned: Planned, *, notes: Sequence[str] = (), files: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What `nep plan --json` prints; everything in it is plain and finite.

    Times are seconds, sizes bytes, rates sequences per second. The plan itself is in the file that `--out` names.

    Args:
        request: what was asked.
        planned: what came out.
        notes: sentences about the input.
        files: what was written: `plan`, `html`, `export` -> path.
    """
    plan, report = planned.plan, planned.report
    held = held_experts(plan, parameter_lines(request.shape))
    return {
        "schema": SCHEMA,
        "model": request.shape.name,
        "hardware": request.hardware.name,
        "number": plan.number,
        "digest": plan.digest,
        "slots_used": list(plan.slots),
        "replicas": [list(slots) for slots in plan.replicas],
        "sequences": [{"slots": list(lane.slots), "sequences": lane.num_sequences} for lane in plan.lanes],
        "predicted": _step(report.predicted, request),
        "healthy": _step(report.healthy, request),
        "current": None if report.current is None else _step(report.current, request),
        "balance": report.balance,
        "placement_s": report.placement_s,
        "bound_s": report.bound_s,
        "binds": report.binds,
        "slots": [
            {
                "slot": figures.slot,
                "speed": figures.speed,
                "load": figures.load,
                "rows": figures.rows,
                "memory_bytes": int(figures.memory_bytes),
                "memory_limit_bytes": figures.memory_limit_bytes,
                "busy_s": figures.step_s,
                "whole_experts": float(held.whole[place]),
                "slices": float(held.slices[place]),
            }
            for place, figures in enumerate(report.slots)
        ],
        "copies": None if report.copies is None else int(np.asarray(report.copies).sum()),
        "transfers": {
            one.kind: {
                "pieces": one.pieces,
                "bytes": one.num_bytes,
                "busiest_bytes": one.busiest_bytes,
                "alone_s": one.seconds,
                "from": list(one.sources),
                "to": list(one.destinations),
            }
            for one in transfer_figures(request, planned)
        },
        "moved_bytes": int(report.moved_bytes),
        "move_s": report.move_s,
        "survival": {str(deaths): chance for deaths, chance in report.survival.items()},
        "considered": [
            {
                "name": one.name,
                "chosen": one.chosen,
                "step_s": _finite(one.step_s),
                "move_s": _finite(one.move_s),
                "samples_per_s": _finite(one.samples_per_s),
                "why": one.why,
            }
            for one in report.alternatives
        ],
        "kept": report.skipped,
        "lost_share": lost_share(request, report),
        "notes": list(notes),
        "files": dict(files or {}),
    }


def _step(step: StepTime, request: PlanRequest) -> dict[str, Any]:
    return {
        "step_s": step.total,
        "samples_per_s": samples_per_s(step, request),
        "parts_s": dict(step.parts),
        "waits_for": {part: {"slot": bound.slot, "resource": bound.resource} for part, bound in step.binding.items()},
        "rounds": step.rounds,
        "rows_per_token": step.rows_per_token,
        "busiest_rows": step.busiest_rows,
    }


def _finite(value: float | None) -> float | None:
    """JSON has no infinity; what takes for ever is not possible."""
    return value if value is not None and math.isfinite(value) else None
