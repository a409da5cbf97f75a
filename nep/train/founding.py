"""The decision that founds a job: generation 1."""

from __future__ import annotations

from nep.fault_tolerance.control_store import FIRST_GENERATION
from nep.fault_tolerance.records import Decision
from nep.planning.plan import Plan


def founding_decision(plan: Plan, members: tuple[int, ...], step: int) -> Decision:
    """What a slot would found the job with; the first one that says so does.

    Args:
        plan: to begin with.
        members: all slots but those in reserve.
        step: of the checkpoint that is gone on from, or 0.
    """
    return Decision(
        generation=FIRST_GENERATION,
        members=members,
        committed=step,
        result=None,
        result_slots=(),
        layout=plan.number,
        layout_digest=plan.digest,
        action="continue",
        plan=plan.canonical_json(),
        params_versions=dict.fromkeys(members, step),
        reason="start",
    )
