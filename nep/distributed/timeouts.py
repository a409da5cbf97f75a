"""Every time-out of a job, derived from one base value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Time-outs in seconds. Larger ones contain smaller ones, so that the inner wait always speaks first.

    Args:
        base_s: how long a slot may make no progress before the others act. It must exceed the longest
            time one slot computes between two exchanges.
    """

    base_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.base_s > 0:
            raise ValueError(f"timeout base ({self.base_s} s) must be positive; give --timeout-base-s a value > 0")

    @property
    def wait_s(self) -> float:
        """A single wait on the data path."""
        return self.base_s

    @property
    def first_step_s(self) -> float:
        """A wait in the first step of a generation (allocations, lazy initialisation)."""
        return 3 * self.base_s

    @property
    def start_s(self) -> float:
        """Until every trainer of a new job has come up: imports, slow nodes."""
        return 10 * self.base_s

    @property
    def agree_s(self) -> float:
        """Until every member of a generation has posted its record or is confirmed dead."""
        return 4 * self.base_s

    @property
    def rebuild_s(self) -> float:
        """Building the process groups of a generation."""
        return 2 * self.base_s

    @property
    def group_s(self) -> float:
        """The process groups' own time-out: after it a parked operation has ended and may be reaped."""
        return 6 * self.base_s

    @property
    def store_s(self) -> float:
        """One request to the control store."""
        return max(5.0, 2 * self.base_s)

    @property
    def partition_s(self) -> float:
        """How long a recovery waits for a control store that cannot be reached. Steps do not need it."""
        return 20 * self.base_s

    @property
    def lease_s(self) -> float:
        """The term of a supervisor's lease. A slot whose lease has expired twice in a row is confirmed dead."""
        return self.base_s / 2

    @property
    def renew_s(self) -> float:
        """Between two renewals of a lease: a term sees several, so one that comes late costs nothing."""
        return self.lease_s / 5
