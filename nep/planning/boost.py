"""The fourth lever of compensation: watts for slow slots, as `nep.planning.compensate` asks for them."""

from collections.abc import Mapping
from dataclasses import replace

from nep.planning.compensate import Boost
from nep.planning.plan import Plan
from nep.planning.power import PowerSlot, plan_watts


def boost_by_watts(boards: Mapping[int, PowerSlot], *, budgets_w: Mapping[int, int] | None = None) -> Boost:
    """Moves watts so that slow slots keep pace with full ones, within the budget of their domain.

    Args:
        boards: slot -> its board and curve; what it needs and how fast it is are filled in.
        budgets_w: domain -> watts of its slots' limits together, see `plan_watts`.

    Returns:
        What `compensate` takes. It predicts; whoever carries the plan out sets the limits of `plan_watts`, too.
    """

    def boost(plan: Plan, speeds_ppm: Mapping[int, int]) -> Mapping[int, int]:
        pace = max(speeds_ppm.values())
        wanted = [
            replace(boards[slot], needed_ppm=pace, speed_ppm=speeds_ppm[slot]) for slot in plan.slots if slot in boards
        ]
        return dict(speeds_ppm) | dict(plan_watts(wanted, budgets_w=budgets_w).speeds_ppm if wanted else {})

    return boost
