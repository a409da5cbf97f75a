"""Plans that one slot computes and all carry out.

Sums of floats differ between machines, so a plan is computed once: whoever computed it writes it to the control store
and posts a request. Like every request it takes effect with the first committed step whose records all carry its
number, so that all slots turn to it at the same boundary, whatever fails meanwhile; the vote on the change of layout
then compares the digest.
"""

from __future__ import annotations

from collections.abc import Sequence

from nep.fault_tolerance.control_store import plan_key
from nep.fault_tolerance.requests import Request
from nep.fault_tolerance.runtime import SlotRun
from nep.planning.plan import Plan


def propose(run: SlotRun, plan: Plan, why: str) -> int:
    """Ask the job to go on under a plan. One slot does that; it waits for the store, not for the others.

    Args:
        plan: to follow the one in force.
        why: JSON for whoever carries it out.

    Returns:
        Number of the request.
    """
    run.store.set(plan_key(plan.digest), plan.canonical_json())
    request = Request(kind="plan", slot=run.slot, digest=plan.digest, base=run.state.plan.number, why=why)
    return run.requests.post(run.store, request)


def newest(requests: Sequence[Request], base: int) -> Request | None:
    """The last proposal that follows a plan, among requests that are in effect and have not been looked at.

    Args:
        requests: in order.
        base: number of the plan in force.
    """
    fitting = [request for request in requests if request.kind == "plan" and request.base == base]
    return fitting[-1] if fitting else None


def read_plan(run: SlotRun, request: Request) -> Plan:
    """The plan that a request proposes.

    Raises:
        RuntimeError: the store does not have it, or has another one.
    """
    text = run.store.get(plan_key(request.digest))
    plan = None if text is None else Plan.from_json(text)
    if plan is None or plan.digest != request.digest:
        raise RuntimeError(f"the control store has no plan with digest {request.digest[:12]}; was it started anew?")
    return plan
