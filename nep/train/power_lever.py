"""Power limits as part of a job's balance: when watts are thought of, set, and put back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nep.planning.cluster import Cluster
from nep.planning.plan import Plan
from nep.planning.power import PPM
from nep.train.adjustments import Adjustment
from nep.train.devices import board_of
from nep.train.power import SlotPower
from nep.train.power_facts import Offer

if TYPE_CHECKING:
    from nep.train.trainer import Trainer

log = logging.getLogger(__name__)


class PowerLever:
    """The power of one trainer's job.

    Watts are thought of once after slots have been lost, and again when another slot has been found to be slow. In
    between speeds count as they are measured: boards that do not become as fast as their curve says get less work, not
    more and more watts.

    Args:
        trainer: whose.
        announce: says a line to people.
    """

    def __init__(self, trainer: Trainer, announce: Callable[[str], None]) -> None:
        self._trainer, self._announce = trainer, announce
        self._config = trainer.config.balance.power
        self._slot: SlotPower | None = None
        self._members: frozenset[int] = frozenset()
        self._flagged: frozenset[int] = frozenset()
        self._due = False
        self._raised: set[int] = set()  # slots that have been given more watts

    @property
    def is_on(self) -> bool:
        """Whether watts are a lever at all."""
        return self._config.mode != "off"

    def begin(self) -> None:
        """A new generation. Slots that are back need their watts, so the others give theirs up."""
        if not self.is_on:
            return
        members = frozenset(self._trainer.members)
        if self._slot is None:
            self._open()
        if members - self._members:
            self.release()
        self._members, self._flagged = members, frozenset()
        self._due = len(members) < self._whole

    def poll(self) -> None:
        """Between two steps."""
        if self._slot is not None:
            self._slot.poll(self._trainer.run_state.store)

    def wants_thought(self, flagged: Mapping[int, float]) -> bool:
        """Whether there is a reason to plan watts that has not been looked at.

        Args:
            flagged: slots that were found to be slow.
        """
        return self.is_on and (self._due or bool(frozenset(flagged) - self._flagged))

    def thought(self, flagged: Mapping[int, float]) -> None:
        """It is being looked at."""
        self._due, self._flagged = False, self._flagged | frozenset(flagged)

    def adopt(self, adjustment: Adjustment) -> None:
        """The plan that these limits belong to is in force, on all slots."""
        run = self._trainer.run_state
        if self._slot is None or not adjustment.limits_w:
            return
        nodes = {slot.index: slot.node for slot in run.cluster.slots}
        mine = frozenset(slot for slot, node in nodes.items() if node == nodes[run.slot])
        name = f"{run.current.number}.{self._trainer.plan.number}"
        self._slot.order(name, adjustment.limits_w, adjustment.before_w, mine)
        self._raised |= {slot for slot, limit in adjustment.limits_w.items() if limit > adjustment.before_w[slot]}

    def release(self) -> None:
        """Limits as they were."""
        self._raised = set()
        if self._slot is not None:
            self._slot.release()

    def welcome(self) -> None:
        """Slots will be back in the next generation: limits as they were, and a plan for it goes by speeds to match."""
        run = self._trainer.run_state
        speeds = run.cluster.speeds_ppm
        run.cluster = run.cluster.with_speeds({slot: min(speeds[slot], PPM) for slot in self._raised})
        self.release()

    def missed(self) -> None:
        """A thought came to nothing, since the plan that it was about is not in force any more."""
        self._due = self.is_on and len(self._members) < self._whole

    def finish(self) -> None:
        """The trainer ends."""
        if self._slot is not None:
            self._slot.finish()

    @property
    def _whole(self) -> int:
        """Slots that train when none is lost."""
        return self._trainer.run_state.job.num_slots - self._trainer.config.spares

    def _open(self) -> None:
        config, job = self._trainer.config, self._trainer.run_state.job
        board = board_of(config.backend, job.local_index) if self._config.source == "nvml" else job.local_index
        self._slot = SlotPower(
            self._config, slot=job.slot, local_index=job.local_index, board=board, announce=self._announce
        )

    # In the planner's thread.

    def asker(self, cluster: Cluster, plan: Plan) -> Callable[[], Offer]:
        """How the planner's thread learns what watts there are. Called in the main thread.

        Args:
            cluster: of the job.
            plan: in force.

        Returns:
            A function that raises ValueError if nothing is known of a board, RuntimeError if the store is away.
        """
        job, config, whole = self._trainer.run_state.job, self._config, self._whole
        # A connection belongs to one thread.
        return lambda: Offer.make(job.connect(), config, cluster, plan, whole)

    @property
    def only_advises(self) -> bool:
        """Whether limits are left to people."""
        return self._config.mode == "advise"


def advice(offer: Offer, plan: Plan, speeds_ppm: Mapping[int, int], step: int) -> Sequence[str]:
    """What people are told: the limits that would help, and the commands that would set them.

    Args:
        offer: of now; only asked.
        plan: in force.
        speeds_ppm: slot -> speed, see `Offer.speeds_at_first`.
        step: the last committed one.
    """
    offer.boost(plan, speeds_ppm)
    if not offer.changes_w:
        return [f"power after step {step}: no watts can be moved"]
    return [f"power after step {step}, advice: {offer.line()}; to set them: " + "; ".join(offer.commands())]
