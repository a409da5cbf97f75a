"""Plans that one slot computes and all carry out.

Sums of floats differ between machines, so a plan is computed once: whoever computed it writes it to the control store
and posts a request. Like every request it takes effect with the first committed step whose records all carry its
number, so that all slots turn to it at the same boundary, whatever fails meanwhile; the vote on the change of layout
then compares the digest. No step waits for the store: who proposes does so in a thread of its own, and who reads has
read the plan before its vote carries the request's number.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from nep.fault_tolerance.connections import lent
from nep.fault_tolerance.control_store import plan_key
from nep.fault_tolerance.requests import Request
from nep.fault_tolerance.runtime import SlotRun
from nep.planning.plan import Plan

log = logging.getLogger(__name__)


class Proposal:
    """Asks the job to go on under a plan. One slot does that, in the background.

    Args:
        run: of the slot.
        plan: to follow the one in force.
        why: JSON for whoever carries it out.
    """

    def __init__(self, run: SlotRun, plan: Plan, why: str):
        self._run, self._plan = run, plan
        self._request = Request(kind="plan", slot=run.slot, digest=plan.digest, base=run.state.plan.number, why=why)
        self._number = 0  # of the request, once it is posted
        self._thread = threading.Thread(target=self._post, name="propose", daemon=True)
        self._thread.start()

    def _post(self) -> None:
        run = self._run
        try:
            with lent(run.connections) as store:
                store.set(plan_key(self._plan.digest), self._plan.canonical_json())
                self._number = run.requests.post(store, self._request)
        except RuntimeError as error:
            log.warning("a plan cannot be proposed: %s", error)

    def is_open(self, effective: int) -> bool:
        """Whether it may still come into effect.

        Args:
            effective: number of the last request that is in effect.
        """
        return self._thread.is_alive() or self._number > effective

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until it is posted; the number of its request, 0 if it is not: the store could not be reached (so far).

        Args:
            timeout_s: wait no longer.
        """
        self._thread.join(timeout_s)
        return self._number


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
    text = run.requests.plans.get(request.digest) or run.store.get(plan_key(request.digest))
    plan = None if text is None else Plan.from_json(text)
    if plan is None or plan.digest != request.digest:
        raise RuntimeError(f"the control store has no plan with digest {request.digest[:12]}; was it started anew?")
    return plan
