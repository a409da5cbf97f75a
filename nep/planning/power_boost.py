"""Watts as a lever of whoever shares out work: given what slots measure, how fast they would be under better limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from nep.planning.plan import Plan
from nep.planning.power import PPM, PowerSlot, WattsPlan, plan_watts


class PowerBoost:
    """(plan, measured speeds) -> speeds under planned watts; an answer to `nep.planning.compensate`'s question.

    A replica is to do the work that it would do undamaged, whatever share of the batch the plan gives it now: watts
    come first, and shares follow the speeds that come of them. It is the same on all ranks.

    Args:
        slots: every slot of the job that may be in a plan; their needs and speeds are not looked at.
        budgets_w: domain -> watts, for the live slots' limits together; where nothing is said the sum of default limits
            of all slots given here, so what failed ones no longer need is for the others of their domain.
        failed_draw_w: what each slot that the plan does not use may still draw; it is taken off the budget.

    Attributes:
        in_force_w: slot -> limit under which speeds are measured; whoever sets limits says so with `hold`.
        latest: the last answer, with the limits to set.
    """

    def __init__(
        self, slots: Iterable[PowerSlot], *, budgets_w: Mapping[int, int] | None = None, failed_draw_w: int = 0
    ) -> None:
        self._slots = {slot.slot: slot for slot in slots}
        self._budgets = dict(budgets_w or {})
        for slot in self._slots.values():
            if slot.domain not in (budgets_w or {}):
                self._budgets[slot.domain] = self._budgets.get(slot.domain, 0) + slot.default_w
        self._failed_draw_w = failed_draw_w
        self.in_force_w = {number: slot.default_w for number, slot in self._slots.items()}
        self.latest: WattsPlan | None = None

    def __call__(self, plan: Plan, speeds_ppm: Mapping[int, int]) -> dict[int, int]:
        """Speeds of the plan's slots under the limits of `latest`; speeds of other slots as they are.

        Args:
            plan: whose slots and replicas count.
            speeds_ppm: slot -> measured speed, under `in_force_w`.

        Raises:
            ValueError: the plan has slots that nothing is known of.
        """
        if strangers := sorted(set(plan.slots) - set(self._slots)):
            raise ValueError(
                f"slots {strangers} of plan {plan.number} have no power slot; it knows {list(self._slots)}"
            )
        work = len(self._slots) / len(plan.replicas)
        asked = []
        for replica in plan.replicas:
            total = sum(speeds_ppm[number] for number in replica)
            for number in replica:
                slot, speed = self._slots[number], speeds_ppm[number]
                # In proportion to the speeds, as cuts and lanes share a replica's work out.
                asked.append(
                    replace(slot, needed_ppm=round(speed / total * work * PPM), speed_ppm=self._at_default(slot, speed))
                )
        used = {slot.domain for slot in asked}
        budgets = {domain: watts for domain, watts in self._budgets.items() if domain in used}
        for number, slot in self._slots.items():
            if number not in plan.slots and slot.domain in used:
                budgets[slot.domain] -= self._failed_draw_w
        self.latest = plan_watts(asked, budgets_w=budgets)
        return {**speeds_ppm, **self.latest.speeds_ppm}

    def hold(self, limits_w: Mapping[int, int]) -> None:
        """These limits have been set; speeds measured from now on are under them.

        Args:
            limits_w: slot -> limit; other slots keep theirs.
        """
        self.in_force_w.update(limits_w)

    def _at_default(self, slot: PowerSlot, speed_ppm: int) -> int:
        """What a measured speed would be at the default limit."""
        curve = slot.curve
        return max(1, round(speed_ppm * curve.speed(slot.default_w) / curve.speed(self.in_force_w[slot.slot])))
