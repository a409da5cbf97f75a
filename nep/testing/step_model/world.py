"""What the model's world consists of: slots with memory, the control store, and events that change them."""

from typing import NamedTuple

from nep.fault_tolerance.records import NO_LAYOUT, Decision, Members, Progress

# The stages of step t in program order. A generation starts with TRANSFER and ADOPT of step C.
# LEAVE: a slot is drained, and all break the generation on purpose.
SYNC, MIRROR, VOTE, APPLY, RETURN, TRANSFER, ADOPT, DONE, LEAVE = range(9)
STAGES = ("sync", "mirror", "vote", "apply", "return", "transfer", "adopt", "done", "leave")

At = tuple[int, int, int]  # step, stage, sends done in that stage
Versions = tuple[int, ...]  # by interval, the step that the held parameters are from
Results = tuple[bytes, ...]  # by step, the result that was applied


class Violation(Exception):
    """Memory does not hold what the protocol promises, or a slot is stuck."""


class Slot(NamedTuple):
    """One slot. A dead one keeps only what others can still receive from it.

    Attributes:
        alive: has memory and runs.
        posted: is in recovery and has posted its progress; else it runs.
        decision: what founded the generation it is in.
        at: its place in the program, and so what it has sent: each generation's program is one line.
        progress: what it believes, which is all that the rules see.
        history: truth: the results that are in its state.
        owned_sums: truth: the result that its complete gradient sums of owned intervals will be part of.
        mirrored_sums: likewise for mirrored intervals.
        versions: truth: of its held parameters.
        received: truth: history and versions in the fresh memory of the next layout.
    """

    alive: bool
    posted: bool
    decision: Decision
    at: At
    progress: Progress
    history: Results
    owned_sums: bytes | None
    mirrored_sums: bytes | None
    versions: Versions
    received: tuple[Results, Versions] | None

    def dead(self) -> "Slot":
        """The same slot after a crash; what it has sent carries its history."""
        return GONE._replace(decision=self.decision, at=self.at, history=self.history)


NO_DECISION = Decision(
    generation=0,
    members=(),
    committed=0,
    result=None,
    result_slots=(),
    layout=NO_LAYOUT,
    layout_digest="",
    action="continue",
    plan=None,
    params_versions={},
)
GONE = Slot(
    alive=False,
    posted=False,
    decision=NO_DECISION,
    at=(0, 0, 0),
    progress=Progress(slot=-1, layout=NO_LAYOUT, layout_digest=""),
    history=(),
    owned_sums=None,
    mirrored_sums=None,
    versions=(),
    received=None,
)


class Store(NamedTuple):
    """The control store, and what may still go wrong.

    Attributes:
        decision: the newest one.
        records: by slot, what was posted for the generation after it.
        flagged: the fault flag of the decision's generation.
        crashes, alarms, returns: budgets left.
        rival: a second decision for the same generation; the protocol excludes it.
    """

    decision: Decision
    records: tuple[Progress | None, ...]
    flagged: bool
    crashes: int
    alarms: int
    returns: int
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


def move(r: int, slot: Slot, label: str) -> Event:
    """Slot r becomes `slot`."""
    return Event(f"slot {r} {label}", ((r, slot),))


def send(r: int, slot: Slot, targets: Members) -> Event:
    """The next send of the stage that slot r is in."""
    step, stage, sends = slot.at
    label = f"sends to {targets[sends]} ({STAGES[stage]} of {step})"
    return move(r, slot._replace(at=(step, stage, sends + 1)), label)


def has_sent(world: World, q: int, targets: Members, r: int, slot: Slot) -> bool:
    """Whether slot q has sent to slot r what the stage of `slot` waits for; q sends to `targets` in order."""
    other = world.slots[q]
    if q == r:
        return True
    return same_generation(other, slot) and other.at >= (*slot.at[:2], targets.index(r) + 1)


def has_reached(world: World, q: int, slot: Slot) -> bool:
    """Whether slot q has come to the stage of `slot` or further, in the same generation."""
    other = world.slots[q]
    return same_generation(other, slot) and other.at[:2] >= slot.at[:2]


def same_generation(one: Slot, other: Slot) -> bool:
    """Whether what one sends can reach the other: groups are rebuilt whole for each generation."""
    return one.decision.generation == other.decision.generation


def result_of(slot: Slot, step: int) -> bytes:
    """What the vote of a step in the slot's generation yields; stands for its packed records."""
    return f"generation {slot.decision.generation} step {step}".encode()


def truth(slot: Slot) -> Results:
    """The state in the newest complete memory of a slot."""
    return slot.received[0] if slot.received else slot.history
