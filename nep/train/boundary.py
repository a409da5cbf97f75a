"""What may change between two steps, decided by all slots alike from committed state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from nep.distributed.waiting import Fault
from nep.fault_tolerance.change import change_layout, drain_layout
from nep.fault_tolerance.commit import settle
from nep.fault_tolerance.recovery import PLANNED
from nep.fault_tolerance.requests import leaving, returners, spares_first, taken_in
from nep.planning.planner import plan_after_failure, plan_mirrors
from nep.planning.validation import check_runnable
from nep.train.rebalance import Balance

if TYPE_CHECKING:
    from nep.train.trainer import Trainer


class Boundary:
    """The boundaries between the steps of one trainer.

    Args:
        trainer: whose.
        install: makes the model anew for the plan that has become the current one.
        announce: says a line to people.
    """

    def __init__(self, trainer: Trainer, install: Callable[[], None], announce: Callable[[str], None]) -> None:
        self._trainer, self._install, self._announce = trainer, install, announce
        self.balance = Balance(trainer, announce)
        self._protected = 0  # number of a plan that cannot be protected any better

    def cross(self) -> None:
        """Let slots go and come, change the plan, complete the mirrors. All members call it after the same step.

        Raises:
            Fault: a change was not completed; or on purpose, so that the next generation begins.
        """
        if self._trainer.preemption is not None:
            self._trainer.preemption.tell()
        self.balance.observe()
        self._obey_requests()
        self._change_plan()
        if self.balance.goal is None:  # stages on the way to a goal are protected already
            self._protect()
        self.balance.crossed()

    def _obey_requests(self) -> None:
        """Let slots go that are drained, and slots in that have come back. All slots decide alike.

        Raises:
            Fault: on purpose, so that the next generation begins.
        """
        trainer, run = self._trainer, self._trainer.run_state
        if trainer.step == trainer.config.steps or run.stopping:
            return
        effective = run.requests.known[: run.history.request]
        if spares_first(effective, trainer.plan.slots, run.considered):
            self._welcome()
            raise Fault(PLANNED, "all slots shall leave: letting those that wait in first")
        gone = leaving(effective, trainer.plan.slots)
        staying = [slot for slot in trainer.plan.slots if slot not in gone]
        come = taken_in(returners(effective, run.considered), staying, run.wanted_members)
        if gone:
            cluster = run.cluster.with_health(gone, "draining")
            # With mirrors at once: there is no time without protection when nothing has failed.
            plan = plan_mirrors(plan_after_failure(trainer.plan, cluster, run.recipe.lines), cluster, run.recipe.lines)
            drain_layout(run, plan, f"draining slots {list(gone)}")
        elif come:
            self._welcome()
        if gone or come:
            raise Fault(PLANNED, f"draining {list(gone)}, letting {list(come)} in")

    def _welcome(self) -> None:
        """Others will come with the next generation."""
        self.balance.power.welcome()  # their boards need the watts that the others have
        settle(self._trainer.run_state)

    def _change_plan(self) -> None:
        """Go on under the plan that is wanted from here. All slots decide alike."""
        trainer, run = self._trainer, self._trainer.run_state
        wanted = trainer.config.plan_changes.get(trainer.step) or trainer.hooks.next_plan(trainer)
        if wanted is not None:
            self.balance.forget()
        else:
            wanted = self.balance.next_plan()
        if wanted is None or dataclasses.replace(wanted, number=trainer.plan.number) == trainer.plan:
            return
        try:
            check_runnable(
                wanted, run.recipe.lines, slots=trainer.plan.slots, global_batch_size=trainer.config.global_batch_size
            )
        except ValueError as error:
            # Slots may have died since somebody wanted it. Training goes on as it is.
            if trainer.reports:
                self._announce(f"no change of plan after step {trainer.step}: {error}")
            return
        change_layout(run, wanted, f"changing to the plan with digest {wanted.digest[:12]}")
        self._install()

    def _protect(self) -> None:
        """Complete the mirrors after a loss: the next layout transaction. All slots decide alike."""
        trainer, run = self._trainer, self._trainer.run_state
        if self._protected == trainer.plan.number:
            return
        plan = plan_mirrors(trainer.plan, run.cluster, run.recipe.lines)
        if plan is not trainer.plan:
            change_layout(run, plan, "completing the mirrors")
            self._install()
        # Only now: the number of a layout that was not committed is used again, by the plan that recovery makes.
        self._protected = plan.number
