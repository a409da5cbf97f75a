"""How evenly tokens can be shared out over a tree of slots and experts."""

Branch = tuple[int, int, list[int]]
"""A shared expert in a tree: its position, the slot above it (-1: none), the slots below it."""


def tree_limits(
    branches: list[Branch], slots: list[int], movable: dict[int, int], tokens: list[int], speeds: list[int]
) -> list[int]:
    """Tokens that each slot of a tree may have at most if levels are as equal as possible, rounded up.

    Divides and conquers (Groenevelt 1991 for submodular flows; here on a tree): pours at the average level, and
    where that overflows, the slots whose own experts overflow them form one problem and all others the second.

    Args:
        branches: the tree, leaves first.
        slots: its slots.
        movable: tokens of each expert of the tree.
        tokens: what each slot has besides.
        speeds: of all slots.
    """
    tokens = list(tokens)
    limits = [0] * len(speeds)
    problems = [(branches, slots)]
    while problems:
        branches, slots = problems.pop()
        if not branches or len(slots) == 1:
            for slot in slots:
                limits[slot] = tokens[slot]
            for expert, _, _ in branches:
                limits[slots[0]] += movable[expert]
            continue
        total = sum([tokens[slot] for slot in slots]) + sum([movable[branch[0]] for branch in branches])
        speed = sum([speeds[slot] for slot in slots])
        for slot in slots:
            limits[slot] = -(-total * speeds[slot] // speed)
        over_slots, over_experts = _overflow(branches, slots, movable, tokens, limits)
        if not over_slots:
            continue
        inside = [branch for branch in branches if branch[0] in over_experts]
        problems.append((inside, [slot for slot in slots if slot in over_slots]))
        outside: list[Branch] = []
        for expert, above, below in branches:
            if expert not in over_experts:
                # Slots that overflow take nothing from the other experts.
                kept = [host for host in below if host not in over_slots]
                if above >= 0 and above not in over_slots:
                    outside.append((expert, above, kept))
                elif len(kept) == 1:
                    tokens[kept[0]] += movable[expert]
                else:
                    outside.append((expert, -1, kept))
        problems.append((outside, [slot for slot in slots if slot not in over_slots]))
    return limits


def _overflow(
    branches: list[Branch], slots: list[int], movable: dict[int, int], tokens: list[int], limits: list[int]
) -> tuple[set[int], set[int]]:
    """Slots that cannot keep to their limits, and the experts whose tokens have nowhere else to go."""
    have = list(tokens)
    rising: dict[int, list[Branch]] = {}
    over_experts: set[int] = set()
    over: list[int] = []
    for branch in branches:
        expert, above, below = branch
        left = movable[expert]
        for host in below:
            room = limits[host] - have[host]
            if room > 0:
                left -= room
        if left > 0:
            if above < 0:
                over_experts.add(expert)
                over += below
            else:
                have[above] += left
                if above in rising:
                    rising[above].append(branch)
                else:
                    rising[above] = [branch]
    over += [slot for slot in slots if have[slot] > limits[slot]]
    found = set(over)
    for slot in over:
        for expert, _, below in rising.get(slot, ()):
            over_experts.add(expert)
            for host in below:
                if host not in found:
                    found.add(host)
                    over.append(host)
    return found, over_experts
