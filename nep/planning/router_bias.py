"""Where router biases aim when slots are not equally fast: more tokens for experts on fast slots.

This changes what is learned, unlike everything else that nep does about slow slots, so it is asked for by name. It
helps where experts cannot be cut or copied.
"""

from nep.planning.intervals import count_units
from nep.planning.layout import LineKind, Lines, axis_lines
from nep.planning.plan import Plan


def expert_weights(plan: Plan, lines: Lines) -> tuple[tuple[int, ...], ...]:
    """How many tokens each expert should get, relative to the others of its layer.

    The mean speed of the units of an expert, over all replicas, less what its slots have to do for other experts: a
    slot's speed is shared by what it holds. Integers, so that all slots find the same.

    Args:
        plan: in force.
        lines: the model's.

    Returns:
        ``[layers][experts]``, parts per million of a slot.
    """
    speeds = dict(zip(plan.slots, plan.speeds_ppm, strict=True))
    found = []
    for axis, line in axis_lines(lines).items():
        if line.kind is not LineKind.EXPERTS:
            continue
        size = line.units_per_expert
        assert size is not None
        weights = [0] * (line.num_units // size)
        for slot, held in plan.holders.by_slot(axis).items():
            total = count_units(held)
            for lo, hi in held:
                for expert in range(lo // size, (hi - 1) // size + 1):
                    inside = min(hi, (expert + 1) * size) - max(lo, expert * size)
                    # A slot with two experts has half of its speed for each.
                    weights[expert] += speeds[slot] * inside // total
        found.append(tuple(max(1, weight) for weight in weights))
    return tuple(found)
