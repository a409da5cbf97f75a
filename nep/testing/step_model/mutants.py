"""The protocol with one rule dropped at a time.

Each must lead to a violation: a rule that could be dropped unnoticed would not be needed, or not be explored.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median_low
from typing import ClassVar

from nep.fault_tolerance.records import Decision, Progress
from nep.testing.step_model.layouts import layout_after_failure, mirrors_of
from nep.testing.step_model.model import StepModel
from nep.testing.step_model.world import (
    RETURN,
    VOTE,
    Event,
    Results,
    Slot,
    Versions,
    World,
    move,
    result_of,
    send,
)


class Mutant(StepModel):
    """A model without one rule.

    Attributes:
        shown_by: ranks, steps, crashes, alarms and returns of a small exploration that finds the violation.
    """

    shown_by: ClassVar[tuple[int, int, int, int, int]] = (3, 2, 1, 0, 0)


class DecideByMinimum(Mutant):
    """C is the minimum over the survivors instead of the maximum."""

    def decision(self, before: Decision, records: dict[int, Progress], dead: set[int], returners: set[int]) -> Decision:
        return with_committed(super().decision(before, records, dead, returners), records, min)


class DecideByMajority(Mutant):
    """C is what more than half of the survivors have seen."""

    def decision(self, before: Decision, records: dict[int, Progress], dead: set[int], returners: set[int]) -> Decision:
        return with_committed(super().decision(before, records, dead, returners), records, median_low)


class OwnView(Mutant):
    """Each slot goes on from the step that it has seen committed itself."""

    def as_read(self, decision: Decision, slot: Slot) -> Decision:
        own = slot.progress
        return replace(decision, committed=own.tx, result=own.result, result_slots=own.result_slots)


class DecideTwice(Mutant):
    """No compare-and-set: a second proposer, who knows other slots to be dead, overwrites the decision."""

    shown_by = (3, 1, 1, 1, 0)

    def propose(self, world: World, before: Decision) -> Iterator[Event]:
        events = list(super().propose(world, before))
        yield from events
        for one in events:
            for other in events:
                if one.store and other.store and one is not other:
                    store = one.store._replace(rival=other.store.decision)
                    yield one._replace(label=f"{one.label}; rival {other.label}", store=store)


class DecideEarly(Mutant):
    """Decides as soon as anybody has posted: silence counts as death."""

    def propose(self, world: World, before: Decision) -> Iterator[Event]:
        posted = {q: record for q, record in enumerate(world.store.records) if record is not None}
        yield self.write(world, self.decision(before, posted, set(before.members) - set(posted), set()))

    def may_fail(self, world: World, slot: Slot) -> bool:
        return super().may_fail(world, slot) or world.store.decision.generation > slot.decision.generation


class ApplyBeforeVote(Mutant):
    """Applies as soon as the sums are complete; the vote comes after."""

    def mirror(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        for event in super().mirror(world, r, slot):
            after = event.slots[0][1]
            step, stage, _ = after.at
            if stage == VOTE:
                progress = replace(after.progress, applied=step, prepared=None, params_version=None)
                after = self.with_step(world, r, after, result_of(after, step))._replace(progress=progress)
                event = move(r, after, f"has the sums it mirrors of step {step}, applies it and votes")
            yield event

    def vote(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        step = slot.at[0]
        unapplied = replace(slot.progress, applied=step - 1, prepared=step)
        for event in super().vote(world, r, slot._replace(progress=unapplied)):
            after = event.slots[0][1]
            progress = replace(after.progress, applied=step, prepared=None)
            after = after._replace(at=(step, RETURN, 0), progress=progress)
            yield move(r, after, f"sees the vote on step {step}")


class VoteBeforeMirror(Mutant):
    """Votes once the owned sums are complete, and waits for the mirrored ones before it applies."""

    def mirror(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        step, targets = slot.at[0], mirrors_of(slot.progress.layout_digest, r)
        if slot.at[2] < len(targets):
            yield send(r, slot, targets)
        else:
            progress = replace(slot.progress, prepared=step)
            yield move(r, slot._replace(at=(step, VOTE, 0), progress=progress), f"votes on step {step}")

    def apply(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        if slot.mirrored_sums is not None:
            yield from super().apply(world, r, slot)
        elif self.mirrored_sums_came(world, r, slot):
            after = slot._replace(mirrored_sums=slot.progress.result)
            yield move(r, after, f"has the sums it mirrors of step {slot.at[0]}")


class SeePartialVote(Mutant):
    """Counts the vote as seen when the records of all others but one have come."""

    def vote(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        for absent in slot.decision.members:
            if absent != r:
                there = world.slots[absent]._replace(at=slot.at, decision=slot.decision)
                slots = (*world.slots[:absent], there, *world.slots[absent + 1 :])
                yield from super().vote(world._replace(slots=slots), r, slot)


class ForgetCommitted(Mutant):
    """Records C only when the layout vote is seen, not before rolling forward."""

    shown_by = (3, 1, 1, 1, 0)

    def progress_after(self, progress: Progress, decision: Decision) -> Progress:
        after = super().progress_after(progress, decision)
        return replace(after, tx=progress.tx, result=progress.result, result_slots=progress.result_slots)

    def receive(self, slot: Slot, number: int, digest: str, memory: tuple[Results, Versions]) -> Slot:
        received = super().receive(knowing(slot), number, digest, memory)
        own = slot.progress
        progress = replace(received.progress, tx=own.tx, result=own.result, result_slots=own.result_slots)
        return received._replace(progress=progress)

    def adopted(self, slot: Slot) -> Slot:
        return super().adopted(knowing(slot) if not slot.posted else slot)


class TrustHolders(Mutant):
    """After a decision every slot keeps the parameters that it holds."""

    def trusts(self, slot: Slot, r: int) -> bool:
        return True


class OverwriteInPlace(Mutant):
    """Receives the new layout into the memory of the old one."""

    shown_by = (3, 1, 1, 1, 0)

    def receive(self, slot: Slot, number: int, digest: str, memory: tuple[Results, Versions]) -> Slot:
        progress = replace(slot.progress, layout=number, layout_digest=digest)
        return slot._replace(progress=progress, versions=memory[1])

    def adopted(self, slot: Slot) -> Slot:
        return slot._replace(progress=replace(slot.progress, params_version=slot.at[0]))


class SmallerLayout(Mutant):
    """LN is the smallest layout number in use by a survivor."""

    shown_by = (3, 1, 1, 1, 0)

    def decision(self, before: Decision, records: dict[int, Progress], dead: set[int], returners: set[int]) -> Decision:
        decision = super().decision(before, records, dead, returners)
        oldest = min((records[slot] for slot in decision.members), key=lambda progress: progress.layout)
        plan = layout_after_failure(oldest.layout_digest, decision.members) if decision.plan else None
        return replace(decision, layout=oldest.layout, layout_digest=oldest.layout_digest, plan=plan)


class CountReturners(Mutant):
    """A returner counts as a holder of layout LN because LN names it."""

    shown_by = (3, 1, 2, 0, 1)

    def source(self, slot: Slot, owner: int, mirror: int | None) -> int:
        return super().source(slot._replace(decision=replace(slot.decision, returners=())), owner, mirror)


class ReuseBeforeApply(Mutant):
    """On a failure, gives up the sums of a step that it has not applied, as if that step were lost."""

    def fail(self, world: World, r: int, slot: Slot) -> Event:
        return super().fail(world, r, slot._replace(owned_sums=None, mirrored_sums=None))


def with_committed(decision: Decision, records: dict[int, Progress], choose: Callable[[list[int]], int]) -> Decision:
    """The decision with another C."""
    members = [records[slot] for slot in decision.members]
    chosen = choose([progress.tx for progress in members])
    witness = next(progress for progress in members if progress.tx == chosen)
    return replace(decision, committed=chosen, result=witness.result, result_slots=witness.result_slots)


def knowing(slot: Slot) -> Slot:
    """The slot with C and its result in its progress."""
    decision = slot.decision
    progress = replace(
        slot.progress, tx=slot.progress.applied, result=decision.result, result_slots=decision.result_slots
    )
    return slot._replace(progress=progress)


DROPPABLE: dict[str, type[Mutant]] = {
    "decide-by-minimum": DecideByMinimum,
    "decide-by-majority": DecideByMajority,
    "own-view": OwnView,
    "decide-twice": DecideTwice,
    "decide-early": DecideEarly,
    "apply-before-vote": ApplyBeforeVote,
    "vote-before-mirror": VoteBeforeMirror,
    "see-partial-vote": SeePartialVote,
    "forget-committed": ForgetCommitted,
    "trust-holders": TrustHolders,
    "overwrite-in-place": OverwriteInPlace,
    "smaller-layout": SmallerLayout,
    "count-returners": CountReturners,
    "reuse-before-apply": ReuseBeforeApply,
}
