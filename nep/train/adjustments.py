"""Changes of plan that a job made by itself: what was predicted of each, and what came of it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

Kind = Literal["compensation", "rebalance"]

_BY_SLOT = ("speeds_ppm", "limits_w", "before_w")


@dataclass(kw_only=True)
class Adjustment:
    """One change, which may take several boundaries.

    Attributes:
        kind: because of slow slots, or of the router's loads.
        step: the committed step after which it began.
        what: the lever, or the way that the planner chose.
        why: one line.
        predicted_gain: how many times as many steps in the same time, less one.
        predicted_move_s: seconds of all transfers.
        moved_bytes: predicted.
        speeds_ppm: slot -> speed that it goes by.
        limits_w: slot -> power limit that comes with the plan; empty: limits stay as they are.
        before_w: slot -> limit before; the same slots.
        boundaries: at which something has moved so far.
        move_s: seconds that steps waited for it, rebuilding the model included.
        done_step: the committed step after which the plan was the one wanted; None: not yet, or it was given up.
        before_s, after_s: median seconds of a step; None: too few steps.
    """

    kind: Kind
    step: int
    what: str
    why: str
    predicted_gain: float
    predicted_move_s: float
    moved_bytes: int
    speeds_ppm: dict[int, int]
    limits_w: dict[int, int] = field(default_factory=dict)
    before_w: dict[int, int] = field(default_factory=dict)
    boundaries: int = 0
    move_s: float = 0.0
    done_step: int | None = None
    before_s: float | None = None
    after_s: float | None = None

    @property
    def measured_gain(self) -> float | None:
        """As `predicted_gain`."""
        return None if self.before_s is None or self.after_s is None else self.before_s / self.after_s - 1

    def to_json(self) -> dict[str, Any]:
        """An entry of train.json."""
        value = dataclasses.asdict(self)
        for name in _BY_SLOT:
            value[name] = {str(slot): number for slot, number in sorted(value[name].items())}
        return {**value, "measured_gain": self.measured_gain}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Adjustment:
        """Reads what `to_json` made."""
        known = {item.name for item in dataclasses.fields(cls)}
        given = {name: entry for name, entry in value.items() if name in known}
        for name in _BY_SLOT:
            given[name] = {int(slot): number for slot, number in value.get(name, {}).items()}
        return cls(**given)

    def why_json(self) -> str:
        """What a request carries of it."""
        return json.dumps(self.to_json(), sort_keys=True)

    @property
    def announcement(self) -> str:
        """When it begins."""
        return f"{self.kind} after step {self.step}: {self.why}"

    @property
    def result(self) -> str:
        """When it has been measured."""
        gain, before, after = self.measured_gain, self.before_s, self.after_s
        measured = "not measured" if gain is None else f"measured {gain:+.1%} ({before:.4g} -> {after:.4g} s a step)"
        return (
            f"{self.kind} of step {self.step} ({self.what}): predicted {self.predicted_gain:+.1%}, {measured}; steps "
            f"waited {self.move_s:.3g} s at {self.boundaries} boundaries, transfers were predicted to take "
            f"{self.predicted_move_s:.3g} s"
        )


class StepSeconds:
    """Seconds of the last steps, before and after a change.

    Args:
        size: of the window.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._seconds: list[float] = []

    def add(self, seconds: float) -> None:
        """One step."""
        self._seconds = [*self._seconds, seconds][-self._size :]

    def clear(self) -> None:
        """What follows is not to be compared with what was."""
        self._seconds = []

    @property
    def is_full(self) -> bool:
        """Whether there are as many as the window holds."""
        return len(self._seconds) == self._size

    def median(self) -> float | None:
        """Of those there are; None of fewer than two."""
        return median(self._seconds) if len(self._seconds) > 1 else None
