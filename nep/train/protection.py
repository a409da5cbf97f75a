"""Time without protection: from the loss of a mirror or an owner until everything is held twice again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from nep.planning.layout import Lines
from nep.planning.plan import Plan


@dataclass(kw_only=True)
class Protection:
    """What is known about it; all slots see the same plans at the same steps. Times in seconds since the epoch.

    Attributes:
        windows_s: how long each time without protection was that is over.
        since_step: the last committed step when the one of now began; None: everything is held twice, or never was.
        since_s: when that was.
        was_complete: some plan of this job had a mirror for everything.
    """

    windows_s: list[float] = field(default_factory=list)
    since_step: int | None = None
    since_s: float = 0.0
    was_complete: bool = False

    def observe(self, plan: Plan, lines: Lines, *, step: int, lost_at_s: float | None) -> str | None:
        """A plan comes into force.

        Args:
            step: the last committed one.
            lost_at_s: when the loss happened that the plan follows, if any.

        Returns:
            A line for people when protection has gone or is back.
        """
        if plan.redundancy == "none":
            return None  # as asked for; the plan says so
        single = plan.unprotected(lines)
        if not single and self.since_step is not None:
            self.windows_s.append(time.time() - self.since_s)
            since, self.since_step = self.since_step, None
            return (
                f"protected again after {self.windows_s[-1]:.2f} s without (from step {since} to {step}): all state is "
                "held twice"
            )
        self.was_complete |= not single
        if single and self.was_complete and self.since_step is None:
            self.since_step, self.since_s = step, time.time() if lost_at_s is None else lost_at_s
            return (
                f"unprotected since step {step}: {len(single)} intervals are held once; until they have mirrors, the "
                "loss of their owner means a checkpoint"
            )
        return None

    def all_windows_s(self) -> list[float]:
        """With the one of now, as long as it is so far."""
        return [*self.windows_s, *([] if self.since_step is None else [time.time() - self.since_s])]
