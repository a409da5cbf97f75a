"""Checks a plan against a model. Plans come out of the planner right; plans from a file may not."""

from nep.planning.intervals import Interval, count_units, intersect
from nep.planning.layout import Layout, Lines, axis_lines
from nep.planning.plan import Plan


def check_plan(plan: Plan, lines: Lines) -> None:
    """Makes sure that every unit is held in every replica and owned once, and that mirrors are of use.

    Raises:
        ValueError: with everything that is wrong.
    """
    errors: list[str] = []
    order = axis_lines(lines)
    for name, layout in (("holders", plan.holders), ("owners", plan.owners), ("mirrors", plan.mirrors)):
        unknown = sorted(set(layout.cuts) - set(order))
        if unknown:
            errors.append(f"{name} has axes {unknown} that the model has not; plan for this model")
    replicas = [plan.holders.restrict(slots) for slots in plan.replicas]
    for axis, line in order.items():
        for index, held in enumerate(replicas):
            if not held.covers(axis, line.num_units):
                errors.append(
                    f"replicas[{index}] holds {list(held.covered(axis))} of {axis} and must hold "
                    f"[0, {line.num_units}); give its slots the rest"
                )
        if not plan.owners.covers(axis, line.num_units) or _num_units(plan.owners, axis) != line.num_units:
            errors.append(f"owners of {axis} must share out [0, {line.num_units}), each unit once")
        if _num_units(plan.mirrors, axis) != count_units(plan.mirrors.covered(axis)):
            errors.append(f"mirrors of {axis} overlap; a unit has one mirror")
        for slot, mirrored in sorted(plan.mirrors.by_slot(axis).items()):
            both: tuple[Interval, ...] = intersect(mirrored, plan.owners.intervals(axis, slot))
            if both:
                errors.append(f"slot {slot} mirrors {list(both)} of {axis}, which it owns; use another slot")
    if errors:
        raise ValueError(f"plan {plan.number}: " + "; ".join(errors))


def _num_units(layout: Layout, axis: str) -> int:
    return sum(count_units(intervals) for intervals in layout.by_slot(axis).values())
