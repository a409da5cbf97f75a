"""How long a recovery took, and where."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

PHASES = ("detect", "agree", "rebuild", "transfer", "replay")


@dataclass(kw_only=True)
class Recovery:
    """One recovery as one slot saw it; times in seconds since the epoch.

    Attributes:
        failed_at: when the failure happened, or the earliest sign of it.
        entered_at: when this slot stopped working in the old generation (phase detect).
        agreed_at: when the decision was read (agree).
        rebuilt_at: when the new groups stood (rebuild).
        moved_at: when the new layout was committed (transfer).
        resumed_at: when the next step was committed (replay).
        generation: the one that it led to.
        reasons: one line for people for each generation that it took.
        failed_slots: slots that were left behind.
        step: last committed step, as decided.
        attempts: generations that it took (more than one if something failed during recovery).
        planned: nothing has failed: slots were drained or have come back.
    """

    entered_at: float = field(default_factory=time.time)
    failed_at: float | None = None
    agreed_at: float = 0.0
    rebuilt_at: float = 0.0
    moved_at: float = 0.0
    resumed_at: float = 0.0
    generation: int = 0
    reasons: tuple[str, ...] = ()
    failed_slots: tuple[int, ...] = ()
    step: int = 0
    attempts: int = 0
    planned: bool = True
    named: int = 0  # reasons that `take_news` has given

    @property
    def reason(self) -> str:
        """All that went wrong, or was asked for, in one line."""
        return _joined(self.reasons)

    def take_news(self) -> str:
        """The same, without what an earlier call has named."""
        news, self.named = self.reasons[self.named :], len(self.reasons)
        return _joined(news)

    @property
    def total_s(self) -> float:
        """From the failure to the next committed step."""
        return self.resumed_at - self.started_at

    @property
    def started_at(self) -> float:
        """When the failure happened, as far as is known."""
        return self.entered_at if self.failed_at is None else min(self.failed_at, self.entered_at)

    def phases_s(self) -> dict[str, float]:
        """Seconds of each phase; they add up to `total_s`."""
        marks = (
            self.started_at,
            self.entered_at,
            self.agreed_at,
            self.rebuilt_at,
            self.moved_at,
            self.resumed_at,
        )
        return {phase: end - start for phase, start, end in zip(PHASES, marks, marks[1:], strict=False)}


def _joined(reasons: Sequence[str]) -> str:
    return "; then ".join(dict.fromkeys(reasons))
