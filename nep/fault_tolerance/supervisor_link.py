"""A supervisor's connection to the control store, which may be out of reach for a while, or gone for good.

Out of reach is no reason to stop a trainer: steps do not need the store. Gone is: then nobody can agree on anything any
more. A host that refuses connections to the port has no store; a network that swallows or resets them says nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from nep.distributed.timeouts import SupervisorTimeouts, Timeouts
from nep.fault_tolerance.control_store import ControlStore, lease_key, supervisor_key
from nep.fault_tolerance.job import JobSpec, publish_job
from nep.fault_tolerance.unsupervised import whereabouts

T = TypeVar("T")


class StoreLink:
    """One supervisor's words with the store.

    Args:
        spec: its slot's place in the job.
        timeouts: see there.
        say: tells people a line.
    """

    def __init__(self, spec: JobSpec, timeouts: SupervisorTimeouts, say: Callable[[str], None]):
        self._spec = spec
        self._timeouts = timeouts
        self._say = say
        self._store: ControlStore | None = None
        self._away_since: float | None = None
        self._retry_at = 0.0
        self.is_refused = False
        self._renew_at = 0.0
        self._renewals = 0

    def connect(self) -> None:
        """Open the connection, after the fork, and register.

        Raises:
            RuntimeError: this slot has a supervisor already.
        """
        spec = self._spec
        assert spec.store_address is not None
        try:
            self._store = ControlStore.connect(
                spec.store_address, spec.prefix, Timeouts(base_s=spec.timeout_base_s).store_s
            )
        except RuntimeError as error:
            self.is_refused = True
            self._away(error)
            return
        if spec.joins:
            return  # registered before the fork, see `nep.fault_tolerance.takeover`
        me = json.dumps(whereabouts())
        found = self.ask(lambda s: s.compare_and_set(supervisor_key(spec.slot), "", me), me)
        if found != me:
            # An elastic launcher starts its workers anew without counting it as an attempt.
            raise RuntimeError(
                f"slot {spec.slot} of {spec.prefix} in the control store {spec.store_address} has had a "
                f"supervisor already ({found}); start a new launcher, with a fixed number of nodes, or let the slot "
                "come back with: nep join"
            )
        if spec.slot == 0:
            self.ask(lambda s: publish_job(spec, s, s.address), None)

    @property
    def away_s(self) -> float:
        """How long the store has not answered; 0 while it does."""
        return 0.0 if self._away_since is None else max(time.monotonic() - self._away_since, 1e-9)

    @property
    def is_gone(self) -> bool:
        """Whether it will not come back, as far as can be told."""
        return self._store is None or (self.is_refused and self.away_s > self._timeouts.grace_s)

    def ask(self, question: Callable[[ControlStore], T], otherwise: T) -> T:
        """`question` about the store; `otherwise` while it cannot be reached."""
        if self._store is None or (self._away_since is not None and time.monotonic() < self._retry_at):
            return otherwise
        try:
            answer = question(self._store)
        except dist.DistError as error:
            self._away(error)
            return otherwise
        if self._away_since is not None:
            self._say(f"the control store can be reached again, after {self.away_s:.1f} s")
            self._away_since, self.is_refused = None, False
        return answer

    def _away(self, error: Exception) -> None:
        self._retry_at = time.monotonic() + self._timeouts.slow_poll_s
        self.is_refused |= isinstance(error.__cause__, ConnectionRefusedError)
        if self._away_since is None:
            self._away_since = time.monotonic()
            first_line = str(error).partition("\n")[0]
            what = "; the launcher that hosts it is gone" if self.is_refused else "; training goes on without"
            self._say(f"lost the control store{what}: {first_line}")

    def renew(self) -> None:
        """Renew the lease if it is time to."""
        now = time.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + self._timeouts.renew_s
            self._renewals += 1
            self.ask(lambda s: s.set(lease_key(self._spec.slot), f"{os.getpid()}:{self._renewals}"), None)
