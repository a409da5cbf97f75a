"""Very small layouts: as many intervals as ranks, and every slot holds the parameters of all of them.

A layout is written as its digest: one pair of digits per interval, owner and mirror, with "-" where an
interval has no mirror. "01 12 20" is the first layout of three ranks. "x2" at the end: slot 2 was drained, and the
layout leaves it out.
"""

from functools import cache

from nep.fault_tolerance.records import LostInterval, Members

Pairs = tuple[tuple[int, int | None], ...]  # (owner, mirror) by interval


@cache
def pairs_of(digest: str) -> Pairs:
    """Owner and mirror of each interval."""
    words = [word for word in digest.split() if word[0] != "x"]
    return tuple((int(pair[0]), None if pair[1] == "-" else int(pair[1])) for pair in words)


@cache
def drained_of(digest: str) -> Members:
    """The slots that were drained."""
    return tuple(int(word[1:]) for word in digest.split() if word[0] == "x")


def digest_of(pairs: Pairs, drained: Members = ()) -> str:
    """The inverse of `pairs_of` and `drained_of`."""
    words = [f"{owner}{'-' if mirror is None else mirror}" for owner, mirror in pairs]
    return " ".join([*words, *(f"x{slot}" for slot in drained)])


def first_layout(ranks: int) -> str:
    """Interval i is owned by slot i and mirrored by the next slot."""
    return digest_of(tuple((i, (i + 1) % ranks) for i in range(ranks)))


@cache
def lost_intervals(digest: str, members: Members) -> tuple[LostInterval, ...]:
    """Intervals with neither owner nor mirror among the members."""
    pairs = pairs_of(digest)
    return tuple(("line", i, i + 1) for i, pair in enumerate(pairs) if not set(pair) & set(members))


@cache
def layout_after_failure(digest: str, members: Members) -> str:
    """Owners stay; a dead owner's interval goes to another holder, if possible not to its mirror."""
    pairs: list[tuple[int, int | None]] = []
    for owner, mirror in pairs_of(digest):
        mirror = mirror if mirror in members else None
        if owner not in members:
            others = [slot for slot in members if slot != mirror] or list(members)
            owner = min(others, key=lambda slot: (slot < owner, slot))
        pairs.append((owner, mirror if mirror != owner else None))
    return digest_of(tuple(pairs), tuple(slot for slot in drained_of(digest) if slot not in members))


@cache
def layout_without(digest: str, members: Members, slot: int) -> str:
    """What a slot that is drained has goes to the others, mirrored at once: there is time for it."""
    others = tuple(member for member in members if member != slot)
    after = layout_with_mirrors(layout_after_failure(digest, others), others)
    return digest_of(pairs_of(after), (*drained_of(after), slot))


@cache
def layout_with_mirrors(digest: str, members: Members) -> str:
    """The same owners, and a mirror for each interval that had none."""
    pairs: list[tuple[int, int | None]] = []
    for owner, mirror in pairs_of(digest):
        following = members[(members.index(owner) + 1) % len(members)]
        pairs.append((owner, mirror if mirror is not None or following == owner else following))
    return digest_of(tuple(pairs), drained_of(digest))


@cache
def peers_of(members: Members, slot: int) -> Members:
    """The members that a slot sends to, in the order of its sends."""
    return tuple(member for member in members if member != slot)


@cache
def mirrors_of(digest: str, slot: int) -> Members:
    """The slots that mirror what this slot owns, in the order of its sends."""
    return tuple(sorted({m for owner, m in pairs_of(digest) if owner == slot and m is not None}))


@cache
def keeps(digest: str, slot: int) -> tuple[bool, ...]:
    """By interval, whether the slot owns or mirrors it."""
    return tuple(slot in pair for pair in pairs_of(digest))
