"""What the model's world consists of: slots with memory, the control store, and very small layouts.

There are as many intervals as ranks. A layout is written as its digest: one "owner mirror" pair of digits per
interval, with "-" where an interval has no mirror, so "01 12 20" is the first layout of three ranks. Every slot
holds the parameters of every interval.
"""

from functools import cache
from typing import NamedTuple

from nep.fault_tolerance.transaction import Decision, LostInterval, Members, Progress

# The stages of step t in program order. A generation starts with TRANSFER and ADOPT of step C.
SYNC, MIRROR, VOTE, APPLY, RETURN, TRANSFER, ADOPT, DONE = range(8)
STAGES = ("sync", "mirror", "vote", "apply", "return", "transfer", "adopt", "done")

At = tuple[int, int, int]  # step, stage, sends done in that stage
Pairs = tuple[tuple[int, int | None], ...]  # (owner, mirror) by interval
Versions = tuple[int, ...]  # by interval, the step that the held parameters are from
Results = tuple[bytes, ...]  # by step, the result that was applied


class Slot(NamedTuple):
    """One slot. A dead one keeps only what others can still receive from it.

    Attributes:
        alive: has memory and runs.
        posted: is in recovery and has posted its progress; else it runs.
        decision: what founded the generation it is in.
        at: its place in the program, and so what it has sent: each generation's program is one line.
        progress: what it believes, which is all that the rules see.
        history: truth: the results that are in its state; None once that memory was overwritten.
        owned_sums: truth: the result that its complete gradient sums of owned intervals will be part of.
        mirrored_sums: likewise for mirrored intervals.
        versions: truth: of its held parameters.
        received: truth: history and versions in the fresh memory of the next layout.
    """

    alive: bool
    posted: bool
    decision: Decision | None
    at: At
    progress: Progress | None
    history: Results | None
    owned_sums: bytes | None
    mirrored_sums: bytes | None
    versions: Versions
    received: tuple[Results, Versions] | None

    def dead(self) -> "Slot":
        """The same slot after a crash."""
        return GONE._replace(decision=self.decision, at=self.at)


GONE = Slot(False, False, None, (0, 0, 0), None, None, None, None, (), None)


class Store(NamedTuple):
    """The control store, and what may still go wrong.

    Attributes:
        decision: the newest one.
        records: by slot, what was posted for the generation after it.
        flagged: the fault flag of the decision's generation.
        crashes, alarms: budgets left.
        rival: a second decision for the same generation; the protocol excludes it.
    """

    decision: Decision
    records: tuple[Progress | None, ...]
    flagged: bool
    crashes: int
    alarms: int
    rival: Decision | None = None


class World(NamedTuple):
    """One state of the model."""

    slots: tuple[Slot, ...]
    store: Store


class Event(NamedTuple):
    """One thing that can happen: the slots and the store that it changes.

    Attributes:
        label: for the trace.
        slots: the changed ones.
        store: None if unchanged.
        checkpoint: the decision is a checkpoint: the exploration ends here.
        progress: false for crashes and alarms, which a world must not need in order to go on.
    """

    label: str
    slots: tuple[tuple[int, Slot], ...] = ()
    store: Store | None = None
    checkpoint: bool = False
    progress: bool = True


@cache
def pairs_of(digest: str) -> Pairs:
    """Owner and mirror of each interval."""
    return tuple((int(owner), None if mirror == "-" else int(mirror)) for owner, mirror in digest.split())


def digest_of(pairs: Pairs) -> str:
    """The inverse of `pairs_of`."""
    return " ".join(f"{owner}{'-' if mirror is None else mirror}" for owner, mirror in pairs)


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
    """Owners stay; a dead owner's interval goes to another holder, if possible one that does not mirror it."""
    pairs: list[tuple[int, int | None]] = []
    for owner, mirror in pairs_of(digest):
        mirror = mirror if mirror in members else None
        if owner not in members:
            others = [slot for slot in members if slot != mirror] or list(members)
            owner = min(others, key=lambda slot: (slot < owner, slot))
        pairs.append((owner, mirror if mirror != owner else None))
    return digest_of(tuple(pairs))


@cache
def layout_with_mirrors(digest: str, members: Members) -> str:
    """The same owners, and a mirror for each interval that had none."""
    pairs: list[tuple[int, int | None]] = []
    for owner, mirror in pairs_of(digest):
        following = members[(members.index(owner) + 1) % len(members)]
        pairs.append((owner, mirror if mirror is not None or following == owner else following))
    return digest_of(tuple(pairs))


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
