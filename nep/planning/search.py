"""Finds the plan for a request: drafts every sensible way to go on, and takes the one that trains fastest.

The measure is time: seconds to get there and then the predicted seconds of the steps for which the plan will
hold. A plan that balances better and is slower loses.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from nep.planning.cluster import Cluster
from nep.planning.drafts import Draft, Drafter, Replicas
from nep.planning.plan import Plan
from nep.planning.plan_report import Refused, report_on
from nep.planning.replicas import replica_choices
from nep.planning.request import Planned, PlanRequest
from nep.planning.validation import check_plan

FULL_SPEED_PPM = 1_000_000


def make_plan(request: PlanRequest) -> Planned:
    """The plan, and what there is to say about it. Equal requests give equal plans.

    Args:
        request: everything that it depends on.

    Raises:
        ValueError: if the request contradicts itself, or nothing fits into memory.
    """
    _check(request)
    drafter = Drafter(request)
    search = _from_scratch(drafter) if request.current is None else _onward(drafter, request.current)
    best = search.best(request.horizon_steps)
    healthy = best
    if not _is_healthy(request.cluster) or request.current is not None:
        healthy = _healthy(request, best.plan)
    return report_on(drafter, best, search.drafts, search.refused, healthy)


@dataclass(eq=False)
class _Search:
    """Drafts, and ways that led nowhere."""

    drafts: list[Draft] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def add(self, name: str, make: Callable[[str], Draft]) -> Draft | None:
        """Tries one way; None if it led nowhere."""
        try:
            draft = make(name)
        except ValueError as error:
            self.refused.append(Refused(name, str(error)))
            return None
        self.drafts.append(draft)
        return draft

    def best(self, horizon_steps: int) -> Draft:
        """The draft with the fewest seconds; the first of equals.

        Raises:
            ValueError: if there is none.
        """
        if not self.drafts:
            raise ValueError("; ".join(dict.fromkeys(refused.why for refused in self.refused)))
        return min(self.drafts, key=lambda draft: draft.move_s + horizon_steps * draft.time.total)
