"""Every time-out of a job, derived from one base value."""

from __future__ import annotations

from dataclasses import dataclass

LAUNCHER_KILL_S = 30.0  # torchrun kills what has not ended so long after it said so, whatever is configured


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
    def hung_s(self) -> float:
        """What a slot that the others have waited for in vain still gets to say that it lives; then it is killed."""
        return self.base_s / 2

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
        """Building the process groups of a generation.

        With `hung_s` no more than twice the base: a slot that hangs there, too, is answered soon.
        """
        return 1.5 * self.base_s

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
    def two_leases_s(self) -> float:
        """From the last sign of a supervisor until its slot is confirmed dead."""
        return 2 * self.lease_s

    @property
    def renew_s(self) -> float:
        """Between two renewals of a lease: a term sees several, so one that comes late costs nothing."""
        return self.lease_s / 5

    def problems(self) -> list[str]:
        """What is out of order: a sentence for each inner wait that does not speak before the one around it."""
        return [
            f"{inner} ({getattr(self, inner):g} s) must be less than {outer} ({getattr(self, outer):g} s): {why}"
            for inner, outer, why in _ORDER
            if not getattr(self, inner) < getattr(self, outer)
        ] + SupervisorTimeouts.from_base(self.base_s).problems()


# Inner wait, the wait around it, and what goes wrong otherwise.
_ORDER = (
    ("wait_s", "first_step_s", "the first step of a generation does all that later ones do, and more"),
    ("hung_s", "wait_s", "a slot that was waited for in vain gets no more time than one that was not"),
    ("wait_s", "agree_s", "a slot that says nothing is fenced after one wait, and its supervisor needs time to obey"),
    ("first_step_s", "agree_s", "the last slot to notice a fault would come to an agreement that was given up"),
    ("wait_s", "group_s", "a group that gives up by itself frees memory that is still waited for"),
    ("first_step_s", "group_s", "a group that gives up by itself frees memory that is still waited for"),
    ("agree_s", "group_s", "a parked operation would end while slots still agree on what it meant"),
    ("rebuild_s", "group_s", "a new group would be taken for a broken one"),
    ("rebuild_s", "start_s", "whoever comes up late would be given up before the groups that it is late for"),
    ("first_step_s", "start_s", "whoever comes up late would be given up before the step that it is late for"),
    ("renew_s", "lease_s", "a lease would expire between two renewals"),
    ("two_leases_s", "agree_s", "slots of a host that is gone are confirmed dead before the agreement is given up"),
    ("agree_s", "partition_s", "a recovery would give up the store before those who reach it have agreed"),
)


@dataclass(frozen=True, kw_only=True)
class SupervisorTimeouts:
    """The supervisor's time constants, all derived from one base (seconds).

    Attributes:
        poll_s: between two looks at the store. A child's death does not wait for it: SIGCHLD ends the pause.
        slow_poll_s: between two looks at what is not urgent.
        grace_s: what a trainer gets to finish by itself after a signal or the loss of the store: a recovery, a
            step and a checkpoint fit in it. Less than the 30 s after which torchrun kills.
        leave_s: what a trainer gets to leave after the end of the job.
        drain_s: what the trainer of a node whose launcher has died gets to hand over its state.
        renew_s: between two renewals of the lease.
        helper_s: what helper processes that a dead trainer left behind get after SIGTERM.
    """

    poll_s: float
    slow_poll_s: float
    grace_s: float
    leave_s: float
    drain_s: float
    renew_s: float
    helper_s: float

    @classmethod
    def from_base(cls, base_s: float) -> SupervisorTimeouts:
        return cls(
            poll_s=min(base_s / 20, 0.05),
            slow_poll_s=min(base_s / 5, 0.5),
            grace_s=min(10 * base_s, 25.0),
            leave_s=4 * base_s,
            drain_s=10 * base_s,
            renew_s=Timeouts(base_s=base_s).renew_s,
            helper_s=min(base_s / 2, 5.0),
        )

    def problems(self) -> list[str]:
        """What is out of order, a sentence each."""
        order = (
            ("poll_s", self.poll_s, "slow_poll_s", self.slow_poll_s, "what is urgent is looked at more often"),
            ("slow_poll_s", self.slow_poll_s, "leave_s", self.leave_s, "the end of the job would be seen too late"),
            ("helper_s", self.helper_s, "grace_s", self.grace_s, "helpers of a stopped trainer end before it must"),
            ("grace_s", self.grace_s, "the launcher's", LAUNCHER_KILL_S, "it would kill before a checkpoint is whole"),
        )
        return [
            f"{inner} ({first:g} s) must be less than {outer} ({second:g} s): {why}"
            for inner, first, outer, second, why in order
            if not first < second
        ]
