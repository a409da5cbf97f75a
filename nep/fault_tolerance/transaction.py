"""The rules of the step protocol as pure functions: no I/O, no clock, no torch.

`Progress` is what one slot can prove about itself, `Decision` what founds the next generation. Each rule is
one function, its docstring says what goes wrong without it, and `nep.testing.step_model` explores exactly
these functions. docs/protocol.md gives the order in which they are called.

Two counters: *transaction* numbers optimizer steps from 1 (0: nothing is committed yet), *layout* numbers
layouts. A change of layout never changes the state, so it leaves the transaction number alone.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from nep.fault_tolerance.records import NO_LAYOUT, Decision, LostInterval, Members, Progress


class ProtocolViolation(RuntimeError):
    """A state that the protocol excludes: a bug, or memory that lies. Going on would corrupt the training."""


class TooEarly(RuntimeError):
    """A decision was asked for while some member has neither posted nor is confirmed dead."""


# The step.


def after_prepare(progress: Progress, transaction: int) -> Progress:
    """STEP 3: every sum that this slot owns or mirrors, and the expert counts, are complete.

    Without the mirrored sums, who mirrors a dead owner's interval could not finish a step that others saw.
    """
    _require(progress.tx == progress.applied == transaction - 1, progress, f"prepares step {transaction}")
    # A layout received but not voted on would miss this step: layout transactions end before the next sums.
    _require(progress.next_layout is None, progress, f"prepares step {transaction} amid a change of layout")
    return dataclasses.replace(progress, prepared=transaction)


def may_vote(progress: Progress, transaction: int) -> bool:
    """STEP 4: only who could finish the step alone may vote on it.

    Without it a completed vote would not prove that everybody can roll forward, and the maximum over the
    survivors could not be reached.
    """
    return progress.prepared == transaction


def after_vote(progress: Progress, transaction: int, result: bytes, result_slots: Members) -> Progress:
    """STEP 5: the vote was seen, so the step is committed, whatever happens to whom from here on."""
    _require(may_vote(progress, transaction), progress, f"sees a vote on step {transaction} unprepared")
    return dataclasses.replace(progress, tx=transaction, result=result, result_slots=result_slots)


def after_apply(progress: Progress) -> Progress:
    """STEP 6: the committed step is in the owned and mirrored state. Only now may the sums be overwritten.

    Applied before the vote, a step that nobody else committed could not be taken back. With the sums
    overwritten before this, a roll-forward would apply something else than `prepared` promises.
    """
    _require(progress.applied == progress.tx - 1, progress, "applies a step that is not the next one")
    _require(progress.prepared == progress.tx, progress, "applies a step whose sums it does not hold")
    return dataclasses.replace(progress, applied=progress.tx, prepared=None, params_version=None)


def after_return(progress: Progress) -> Progress:
    """STEP 7: every held interval has been received at the applied step."""
    return dataclasses.replace(progress, params_version=progress.applied)


def after_receive(progress: Progress, number: int, digest: str) -> Progress:
    """RECOVER 8: the state under another layout lies complete in *fresh* memory; the old one is untouched.

    Overwritten in place, a failure before the layout vote would leave a mixture of two layouts, which neither
    the slot itself nor its peers can use.
    """
    _require(number > progress.layout, progress, f"receives layout {number}, which is no later one")
    _require(progress.applied == progress.tx, progress, f"receives layout {number} between two steps")
    return dataclasses.replace(progress, next_layout=number, next_digest=digest)


def after_adopt(progress: Progress) -> Progress:
    """RECOVER 9: the layout vote was seen; the received layout is in use and the old one may be freed."""
    if progress.next_layout is None or progress.next_digest is None:
        raise ProtocolViolation(f"slot {progress.slot} adopts a layout that it has not received")
    return dataclasses.replace(
        progress,
        layout=progress.next_layout,
        layout_digest=progress.next_digest,
        next_layout=None,
        next_digest=None,
        params_version=progress.applied,
    )


# The decision.


def waiting_for(members_before: Collection[int], records: Collection[int], dead: Collection[int]) -> Members:
    """RECOVER 3: the members of the old generation that have neither posted nor are confirmed dead.

    Deciding without one of them would leave out a slot that lives, and with it perhaps the only one who saw
    the vote, or the only copy of an interval.
    """
    return tuple(sorted(set(members_before) - set(records) - set(dead)))


def choose_committed(records: Mapping[int, Progress]) -> tuple[int, bytes | None, Members]:
    """RECOVER 3: C is the maximum that any survivor saw committed, with that step's result.

    By minimum or majority, a slot that has applied the step would have to take it back; by each slot's own
    view, they would go on from different steps. The maximum can always be reached, since a completed vote
    proves that everybody was prepared.

    Returns:
        C, the packed vote records of step C, the slots of those records.
    """
    newest = max(records.values(), key=lambda progress: progress.tx)
    for progress in records.values():
        near = newest.tx - 1 <= progress.applied <= newest.tx
        _require(near, progress, f"is not within one step of {newest.tx}")
        same = progress.tx != newest.tx or progress.result == newest.result
        _require(same, progress, f"has another result of step {newest.tx} than slot {newest.slot}")
    return newest.tx, newest.result, newest.result_slots


def choose_layout(records: Mapping[int, Progress]) -> tuple[int, str]:
    """RECOVER 3: LN is the largest layout number in use by any survivor.

    Whoever uses it has seen its vote and may have freed the old layout; everybody else has received it. A
    smaller number could name memory that is gone.
    """
    newest = max(records.values(), key=lambda progress: progress.layout)
    for progress in records.values():
        same = progress.layout != newest.layout or progress.layout_digest == newest.layout_digest
        _require(same, progress, f"has another layout {newest.layout} than slot {newest.slot}")
    return newest.layout, newest.layout_digest


def holds_nothing(progress: Progress, layout: int, digest: str) -> bool:
    """RECOVER 3: whether a poster returned lately and has not got layout LN yet, though LN may name it.

    Counted as a live owner or mirror, it would hide that an interval is lost, or be asked to send one.
    """
    return progress.layout == NO_LAYOUT and (progress.next_layout, progress.next_digest) != (layout, digest)


def has_left(progress: Progress, named: Collection[int]) -> bool:
    """RECOVER 3: whether a poster held state once and layout LN leaves it out: it was drained, and may go.

    As a member it would have no place in the plan. It posts all the same and waits for the decision: if it alone
    saw the vote on the layout that drains it, and left, the others would go back to a layout that counts on it.

    Args:
        named: the slots of layout LN.
    """
    return progress.layout != NO_LAYOUT and progress.slot not in named


def decide(
    generation: int,
    members_before: Collection[int],
    records: Mapping[int, Progress],
    dead: Collection[int],
    *,
    lost: Callable[[str, Members], Sequence[LostInterval]],
    plan: Callable[[str, Members], str],
    returners: Collection[int] = (),
    reason: str | None = None,
    named: Callable[[str], Collection[int]] | None = None,
    origin: Callable[[str], str] | None = None,
    incarnations: Mapping[int, int] | None = None,
    request: int = 0,
) -> Decision:
    """RECOVER 3: the decision that founds `generation`, to be written once by compare-and-set.

    Two decisions for one generation, made with different knowledge of who is dead, could differ in C.

    Args:
        generation: the new one.
        members_before: slots of the generation before.
        records: what they posted. A record of a slot known to be dead is ignored.
        dead: members confirmed dead, as this proposer knows.
        lost: (digest of layout LN, slots) -> intervals with neither an owner nor a mirror among the slots.
        plan: (digest of layout LN, members) -> canonical JSON of the plan to move to from there.
        returners: registered slots that join; they hold nothing yet.
        reason: for the log; None: composed from who died, left and came.
        named: digest of layout LN -> its slots; None: all that live.
        origin: digest of layout LN -> canonical JSON of its plan, for returners.
        incarnations: which trainer of each slot; of others than members it is dropped.
        request: number of the last request that the returners were drawn from.

    Raises:
        TooEarly: somebody has neither posted nor is confirmed dead.
        ProtocolViolation: the records contradict each other.
    """
    if missing := waiting_for(members_before, records, dead):
        raise TooEarly(f"generation {generation}: slots {list(missing)} have neither posted nor are they dead")
    survivors = {s: records[s] for s in sorted(members_before) if s in records and s not in dead}
    if not survivors:
        raise ProtocolViolation(f"generation {generation} has no survivor to decide it")
    committed, result, result_slots = choose_committed(survivors)
    layout, digest = choose_layout(survivors)
    left = () if named is None else tuple(s for s, post in survivors.items() if has_left(post, named(digest)))
    stay = {s: post for s, post in survivors.items() if s not in left}
    holders = tuple(s for s, progress in stay.items() if not holds_nothing(progress, layout, digest))
    members = tuple(sorted({*stay, *returners}))
    gone = tuple(lost(digest, holders))
    died = sorted(set(members_before) - set(survivors))
    empty = tuple(sorted(set(members) - set(holders)))
    return Decision(
        generation=generation,
        members=members,
        returners=empty,
        leavers=left,
        committed=committed,
        result=result,
        result_slots=result_slots,
        layout=layout,
        layout_digest=digest,
        action="checkpoint" if gone else "continue",
        plan=None if gone else plan(digest, members),
        params_versions={slot: survivors[slot].params_version for slot in holders},
        reason=reason or _reason(died, left, empty),
        lost=gone,
        incarnations={s: number for s, number in (incarnations or {}).items() if s in members},
        request=request,
        origin=origin(digest) if origin is not None and empty and not gone else None,
    )


def _reason(died: Sequence[int], left: Sequence[int], came: Sequence[int]) -> str:
    parts = [f"slots {list(who)} {what}" for who, what in ((died, "are dead"), (left, "are drained")) if who]
    parts += [f"slots {list(came)} return"] if came else []
    return ", ".join(parts) or "a fault without a death"


# After the decision.


def settle_layout(progress: Progress, decision: Decision) -> Literal["keep", "adopt"]:
    """RECOVER 5: "adopt" the received layout if the decision is in it, else "keep" (drop what was received).

    The received one is complete, for this slot voted only after receiving; and it is of step C, for no step
    can have been committed without this slot.
    """
    decided = decision.layout, decision.layout_digest
    if progress.slot in decision.returners or decided == (progress.layout, progress.layout_digest):
        return "keep"
    received = progress.next_layout, progress.next_digest
    _require(decided == received, progress, f"cannot reach layout {decision.layout}")
    _require(decision.committed == progress.applied, progress, "has received a layout of another step")
    return "adopt"


def record_committed(progress: Progress, decision: Decision) -> Progress:
    """RECOVER 6: C and its result are this slot's own knowledge *before* it rolls forward.

    Otherwise a second failure, in which the slots that saw the vote die, finds survivors that have applied a
    step which none of them can prove to be committed.
    """
    _require(progress.tx <= decision.committed, progress, f"knows more than C = {decision.committed}")
    return dataclasses.replace(
        progress, tx=decision.committed, result=decision.result, result_slots=decision.result_slots
    )


def must_apply(progress: Progress, decision: Decision) -> bool:
    """RECOVER 7: whether this slot must roll forward, that is apply C now from the decision's result.

    Raises:
        ProtocolViolation: it is ahead of C, more than a step behind, or does not hold the sums of C. An
            exception, not an assert: `python -O` must not turn it into silent corruption.
    """
    committed = decision.committed
    if progress.applied == committed or progress.slot in decision.returners:
        return False
    _require(progress.applied == committed - 1, progress, f"cannot get to step {committed}")
    _require(progress.prepared == committed, progress, f"must roll to step {committed} without its sums")
    return True


def after_decision(progress: Progress, decision: Decision) -> Progress:
    """RECOVER 5 to 7 in one: this slot once it has settled its layout, recorded C and rolled forward."""
    if progress.slot in decision.returners:
        return join(progress.slot, decision)
    adopted = settle_layout(progress, decision) == "adopt"
    rolled = must_apply(progress, decision)
    if adopted:
        progress = after_adopt(progress)
    progress = record_committed(progress, decision)
    if rolled:
        progress = after_apply(progress)
    return dataclasses.replace(progress, prepared=None, next_layout=None, next_digest=None)


def join(slot: int, decision: Decision) -> Progress:
    """RECOVER 5 to 7 for a returner: it holds nothing, knows C from the decision, and receives like all."""
    return Progress(
        slot=slot,
        tx=decision.committed,
        applied=decision.committed,
        result=decision.result,
        result_slots=decision.result_slots,
        layout=NO_LAYOUT,
        layout_digest="",
        params_version=None,
    )


def trusts_parameters(decision: Decision, slot: int) -> bool:
    """RECOVER 8: whether the held parameters of `slot` are all of step C, so that they may stay.

    After a partial return they are of mixed steps. A member that is not trusted takes every parameter that it
    neither owns nor mirrors from the interval's owner, else from its mirror.
    """
    return decision.params_versions.get(slot) == decision.committed


def state_source(owner: int, mirror: int | None, decision: Decision) -> int:
    """RECOVER 8: who sends an interval's state: the owner if it lives, else the mirror; never a returner.

    Raises:
        ProtocolViolation: both are dead; the decision must have been "checkpoint".
    """
    for slot in (owner, mirror):
        if slot is not None and slot in decision.members and slot not in decision.returners:
            return slot
    raise ProtocolViolation(f"an interval of layout {decision.layout} lost both owner {owner} and mirror {mirror}")


def _require(condition: bool, progress: Progress, what: str) -> None:
    if not condition:
        # Not the whole record: the result alone has 128 bytes per slot.
        state = ("tx", "applied", "prepared", "layout", "next_layout")
        known = ", ".join(f"{name} {getattr(progress, name)}" for name in state)
        raise ProtocolViolation(f"slot {progress.slot} {what} ({known})")
