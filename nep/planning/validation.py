"""Checks a plan against a model and a job. Plans come out of the planner right; plans from a file may not."""

from collections.abc import Mapping, Sequence

from nep.planning.intervals import Interval, Intervals, arrange, count_units, intersect, normalize, subtract
from nep.planning.layout import Layout, Line, LineKind, Lines, axis_lines
from nep.planning.plan import Plan

_MOST_ERRORS = 4
"""A plan for another model is wrong everywhere; nobody reads all of that."""


def check_plan(plan: Plan, lines: Lines) -> None:
    """Makes sure that every unit is held in every replica and owned once, and that mirrors are of use.

    Raises:
        ValueError: with everything that is wrong.
    """
    errors = _layout_errors(plan, lines)
    if errors:
        raise ValueError(f"plan {plan.number}: " + "; ".join(errors))


def _layout_errors(plan: Plan, lines: Lines) -> list[str]:
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
    return errors


def check_runnable(plan: Plan, lines: Lines, *, slots: Sequence[int], global_batch_size: int) -> None:
    """Makes sure that a training job can carry out a plan, whoever made it.

    Args:
        plan: the plan.
        lines: the model's.
        slots: that the job runs on, ascending.
        global_batch_size: its sequences per step.

    Raises:
        ValueError: with everything that is wrong.
    """
    errors: list[str] = []
    if plan.slots != tuple(slots):
        errors.append(
            f"slots {_shown(plan.slots)} must be {_shown(slots)}, all that this job runs on; start as many "
            "processes as the plan has, or plan for these"
        )
    if plan.global_batch_size != global_batch_size:
        errors.append(
            f"global_batch_size ({plan.global_batch_size}) must be that of the job ({global_batch_size}); give the "
            "other one, or plan again"
        )
    found = _layout_errors(plan, lines) or _form_errors(plan, lines)
    errors += found[:_MOST_ERRORS]
    if len(found) > _MOST_ERRORS:
        errors.append(f"and {len(found) - _MOST_ERRORS} more of the kind; is it a plan for another model?")
    if errors:
        raise ValueError(f"plan {plan.number}: " + "; ".join(errors))


def _form_errors(plan: Plan, lines: Lines) -> list[str]:
    """What the layer cannot compute with: torn copies, lanes without a part, another order of storage."""
    errors: list[str] = []
    for axis, line in axis_lines(lines).items():
        held = plan.holders.by_slot(axis)
        odd = [slot for slot in sorted(held) if held[slot] != arrange(held[slot], line.units_per_expert)]
        if odd:
            errors.append(f"slots {_shown(odd)} store {axis} in an order that training does not use; plan again")
        groups = plan.replicas if line.kind is LineKind.EXPERTS else [lane.slots for lane in plan.lanes]
        name = "replica" if line.kind is LineKind.EXPERTS else "lane"
        for index, slots in enumerate(groups):
            problem = _group_error(line, [held.get(slot, ()) for slot in slots])
            if problem:
                errors.append(f"{name} {index} (slots {_shown(slots)}) {problem} of {axis}")
                break  # the others are likely to be alike
    return errors + _kv_errors(plan, axis_lines(lines))


def _kv_errors(plan: Plan, order: Mapping[str, Line]) -> list[str]:
    """Slots without a KV head that one of their query heads needs."""
    errors: list[str] = []
    queries = {line.layer: (axis, line) for axis, line in order.items() if line.kind is LineKind.HEADS}
    for axis, line in order.items():
        if line.kind is not LineKind.KV_HEADS or line.layer not in queries:
            continue
        query_axis, query = queries[line.layer]
        size = query.num_units // line.num_units
        for slot, heads in sorted(plan.holders.by_slot(query_axis).items()):
            needed = [(lo // size, -(-hi // size)) for lo, hi in heads]
            missing = subtract(needed, plan.holders.intervals(axis, slot))
            if missing:
                errors.append(f"slot {slot} has query heads {list(heads)} and lacks {list(missing)} of {axis}")
                break
    return errors


def _group_error(line: Line, held: Sequence[Intervals]) -> str | None:
    """What is wrong with how a replica holds experts, or a lane anything else."""
    whole = ((0, line.num_units),)
    if line.kind is LineKind.WHOLE:
        return None if all(intervals == whole for intervals in held) else "must have all on each slot"
    everything = [interval for intervals in held for interval in intervals]
    if normalize(everything) != whole:
        return f"must hold all {line.num_units} units"
    # A KV head is held by everybody who has one of its query heads.
    if line.kind is LineKind.KV_HEADS or count_units(everything) == line.num_units:
        return None
    if line.units_per_expert is None:
        return "must hold each unit once; only experts have copies; it holds some twice"
    expert = _torn_copy(held, line.units_per_expert)
    return None if expert is None else f"must hold each copy of an expert on one slot, whole; expert {expert} is not"


def _torn_copy(held: Sequence[Intervals], units_per_expert: int) -> int | None:
    """An expert of which some units are held several times, though not every slot with a part has all of it."""
    everything = sorted(interval for intervals in held for interval in intervals)
    end = 0
    for lo, hi in everything:
        held_twice = range(lo // units_per_expert, -(-min(hi, end) // units_per_expert)) if lo < end else ()
        for expert in held_twice:
            whole = ((expert * units_per_expert, (expert + 1) * units_per_expert),)
            if any(intersect(whole, normalize(intervals)) not in ((), whole) for intervals in held):
                return expert
        end = max(end, hi)
    return None


def _shown(slots: Sequence[int]) -> str:
    return str(list(slots)) if len(slots) <= 16 else f"{list(slots[:16])} and {len(slots) - 16} more"


def _num_units(layout: Layout, axis: str) -> int:
    return sum(count_units(intervals) for intervals in layout.by_slot(axis).values())
