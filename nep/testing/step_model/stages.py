"""The running part of the protocol: the stages of a step, and of a change of layout.

Each stage is a method that yields what slot r can do there. Messages are never stored: what a slot has sent
follows from its place in the program, and a receiver may take it or fail instead, which covers loss.
"""

from collections.abc import Iterator

from nep.fault_tolerance import transaction
from nep.fault_tolerance.records import Members
from nep.testing.step_model.layouts import (
    drained_of,
    keeps,
    layout_with_mirrors,
    layout_without,
    mirrors_of,
    pairs_of,
    peers_of,
)
from nep.testing.step_model.world import (
    ADOPT,
    APPLY,
    DONE,
    LEAVE,
    MIRROR,
    RETURN,
    SYNC,
    TRANSFER,
    VOTE,
    Event,
    Results,
    Slot,
    Versions,
    Violation,
    World,
    has_reached,
    has_sent,
    move,
    result_of,
    send,
    truth,
)


class Stages:
    """What a slot does while nothing fails.

    Attributes:
        ranks, steps, remirror, drain: see `StepModel`.
    """

    ranks: int
    steps: int
    remirror: bool
    drain: bool

    # The step, in program order. Each method yields what slot r can do in that stage.

    def run(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        """Dispatches to the stage that the slot is in."""
        stage = slot.at[1]
        if stage not in (DONE, LEAVE):
            steps = (self.sync, self.mirror, self.vote, self.apply, self.return_parameters)
            yield from (*steps, self.transfer, self.adopt)[stage](world, r, slot)

    def sync(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        """STEP 1 to 3: pieces of gradients to their owners; then the own sums are complete."""
        step, sends, members = slot.at[0], slot.at[2], slot.decision.members
        peers = peers_of(members, r)
        if sends < len(peers):
            yield send(r, slot, peers)
        elif all(has_sent(world, q, peers_of(members, q), r, slot) for q in peers):
            after = slot._replace(at=(step, MIRROR, 0), owned_sums=result_of(slot, step), mirrored_sums=None)
            yield move(r, after, f"has the sums it owns of step {step}")

    def mirror(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        """STEP 2 to 4: finished sums to the mirrors; with those that it mirrors a slot is prepared."""
        step, sends = slot.at[0], slot.at[2]
        targets = mirrors_of(slot.progress.layout_digest, r)
        if sends < len(targets):
            yield send(r, slot, targets)
        elif self.mirrored_sums_came(world, r, slot):
            progress = transaction.after_prepare(slot.progress, step)
            if transaction.may_vote(progress, step):
                after = slot._replace(at=(step, VOTE, 0), progress=progress, mirrored_sums=result_of(slot, step))
                yield move(r, after, f"has the sums it mirrors of step {step} and votes")

    def mirrored_sums_came(self, world: World, r: int, slot: Slot) -> bool:
        """Whether every owner of an interval that slot r mirrors has sent its sums of this step."""
        digest, here = slot.progress.layout_digest, slot._replace(at=(slot.at[0], MIRROR, 0))
        owners = {owner for owner, mirror in pairs_of(digest) if mirror == r}
        return all(has_sent(world, q, mirrors_of(digest, q), r, here) for q in owners)

    def vote(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        """STEP 5: the vote can be seen once every record can have come."""
        step, members = slot.at[0], slot.decision.members
        if all(has_reached(world, q, slot) for q in members):
            progress = transaction.after_vote(slot.progress, step, result_of(slot, step), members)
            after = slot._replace(at=(step, APPLY, 0), progress=progress)
            yield move(r, after, f"sees the vote on step {step}")

    def apply(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        """STEP 6. A fault may still come between the vote and this, as it can on an accelerator."""
        step = slot.at[0]
        after = self.with_step(world, r, slot, slot.progress.result)
        after = after._replace(at=(step, RETURN, 0), progress=transaction.after_apply(slot.progress))
        yield move(r, after, f"applies step {step}")

    def with_step(self, world: World, r: int, slot: Slot, result: bytes | None) -> Slot:
        """Truth: what applying a step does to the slot's memory.

        Raises:
            Violation: the buffers hold something else, or another slot has applied something else.
        """
        held = slot.owned_sums, slot.mirrored_sums
        if result is None or held != (result, result):
            raise Violation(f"slot {r} applies {result!r}, but its sums (owned, mirrored) are of {held}")
        history = (*slot.history, result)
        for q, other in enumerate(world.slots):
            if other.alive and any(a != b for a, b in zip(history, other.history, strict=False)):
                raise Violation(f"slots {r} and {q} have applied {history} and {other.history}")
        kept = keeps(slot.progress.layout_digest, r)
        versions = tuple(len(history) if own else v for v, own in zip(slot.versions, kept, strict=True))
        return slot._replace(history=history, versions=versions, owned_sums=None, mirrored_sums=None)

    def return_parameters(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        """STEP 7: own parameters to all holders; theirs arrive one interval after the other."""
        (step, _, sends), members = slot.at, slot.decision.members
        peers = peers_of(members, r)
        missing = next((i for i, version in enumerate(slot.versions) if version != step), None)
        if sends < len(peers):
            yield send(r, slot, peers)
        elif missing is None:
            after = slot._replace(progress=transaction.after_return(slot.progress))
            yield move(r, self.finish_step(r, after), f"has all parameters of step {step}")
        else:
            owner = pairs_of(slot.progress.layout_digest)[missing][0]
            if has_sent(world, owner, peers_of(members, owner), r, slot):
                versions = (*slot.versions[:missing], step, *slot.versions[missing + 1 :])
                yield move(r, slot._replace(versions=versions), f"receives interval {missing} of step {step}")

    def finish_step(self, r: int, slot: Slot) -> Slot:
        """On to a layout transaction if mirrors are missing, else to the next step."""
        step, digest = slot.at[0], slot.progress.layout_digest
        if self.drains(slot) and step < self.steps:
            return slot._replace(at=(step, TRANSFER, 0))
        complete = layout_with_mirrors(digest, slot.decision.members)
        if self.remirror and step < self.steps and complete != digest:
            return slot._replace(at=(step, TRANSFER, 0))
        return self.begin_step(r, slot)

    def drains(self, slot: Slot) -> bool:
        """Whether the last slot is still to be drained, in the generation and layout of this one."""
        last, members = self.ranks - 1, slot.decision.members
        return self.drain and last in members and members != (last,) and last not in self.drained(slot)

    def drained(self, slot: Slot) -> Members:
        """The slots that the layout of this one leaves out."""
        return drained_of(slot.progress.layout_digest)

    def begin_step(self, r: int, slot: Slot) -> Slot:
        """STEP 1: the forward pass reads every held parameter."""
        done = slot.at[0]
        if set(slot.versions) != {done} or len(slot.history) != done:
            held = f"state {slot.history} and parameters of steps {slot.versions}"
            raise Violation(f"slot {r} goes on after step {done} with {held}")
        return slot._replace(at=(done, DONE, 0) if done == self.steps else (done + 1, SYNC, 0))

    # The layout transaction: after a decision, and later to restore mirrors.

    def target(self, slot: Slot) -> tuple[int, str]:
        """Number and digest of the layout that a slot in TRANSFER moves to."""
        if self.is_recovering(slot):
            assert slot.decision.plan is not None, "a checkpoint ends the exploration"
            return slot.decision.layout + 1, slot.decision.plan
        if self.drains(slot):
            after = layout_without(slot.progress.layout_digest, slot.decision.members, self.ranks - 1)
        else:
            after = layout_with_mirrors(slot.progress.layout_digest, slot.decision.members)
        return slot.progress.layout + 1, after

    def origin(self, slot: Slot) -> str:
        """Digest of the layout that a slot in TRANSFER moves from."""
        return slot.decision.layout_digest if self.is_recovering(slot) else slot.progress.layout_digest

    def is_recovering(self, slot: Slot) -> bool:
        """Whether a slot in TRANSFER is there because of a decision; else it restores mirrors."""
        return slot.at[0] == slot.decision.committed

    def trusts(self, slot: Slot, r: int) -> bool:
        """Whether slot r may keep its parameters. Before mirrors are restored, all were returned."""
        return not self.is_recovering(slot) or transaction.trusts_parameters(slot.decision, r)

    def sources(self, slot: Slot, r: int) -> set[int]:
        """The slots from which slot r receives something; `slot` tells the transaction and may be another."""
        wanted = keeps(self.target(slot)[1], r) if self.trusts(slot, r) else (True,) * self.ranks
        return {
            self.source(slot, *pair)
            for pair, kept, want in zip(pairs_of(self.origin(slot)), self.kept(slot, r), wanted, strict=True)
            if want and not kept
        }

    def source(self, slot: Slot, owner: int, mirror: int | None) -> int:
        """Who sends the state of an interval."""
        return transaction.state_source(owner, mirror, slot.decision)

    def kept(self, slot: Slot, r: int) -> tuple[bool, ...]:
        """By interval, whether slot r has its state already."""
        returned = self.is_recovering(slot) and r in slot.decision.returners
        return (False,) * self.ranks if returned else keeps(self.origin(slot), r)

    def targets(self, slot: Slot, r: int) -> Members:
        """The slots to which slot r sends something."""
        return tuple(q for q in peers_of(slot.decision.members, r) if r in self.sources(slot, q))

    def transfer(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        """RECOVER 8: state and stale parameters into fresh memory."""
        step, _, sends = slot.at
        targets = self.targets(slot, r)
        if sends < len(targets):
            yield send(r, slot, targets)
        elif all(has_sent(world, q, self.targets(slot, q), r, slot) for q in self.sources(slot, r)):
            number, digest = self.target(slot)
            kept, trusted = self.kept(slot, r), self.trusts(slot, r)
            versions = tuple(
                version if own or trusted else step for version, own in zip(slot.versions, kept, strict=True)
            )
            after = self.receive(slot, number, digest, (self.history(world, r, slot), versions))
            yield move(r, after._replace(at=(step, ADOPT, 0)), f"has layout {number} complete and votes")

    def history(self, world: World, r: int, slot: Slot) -> Results:
        """Truth: the state that slot r has after a transfer.

        Raises:
            Violation: its sources do not all send the same state.
        """
        histories = {world.slots[q].history for q in self.sources(slot, r)}
        if r not in slot.decision.returners:
            histories.add(slot.history)
        if len(histories) != 1:
            raise Violation(f"slot {r} receives different states: {sorted(histories)}")
        return histories.pop()

    def receive(self, slot: Slot, number: int, digest: str, memory: tuple[Results, Versions]) -> Slot:
        """RECOVER 8: into fresh memory; the old memory stays as it is."""
        progress = transaction.after_receive(slot.progress, number, digest)
        return slot._replace(progress=progress, received=memory)

    def adopt(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        """RECOVER 9: the layout vote can be seen; the old memory is freed."""
        members = slot.decision.members
        if not all(has_reached(world, q, slot) for q in members):
            return
        states = {truth(world.slots[q]) for q in members if world.slots[q].alive}
        if len(states) != 1:
            raise Violation(f"slots {list(members)} commit a layout with different states: {sorted(states)}")
        after = self.adopted(slot)
        if not self.is_recovering(slot) and set(self.drained(after)) & set(members):
            after = after._replace(at=(slot.at[0], LEAVE, 0))
        else:
            after = self.begin_step(r, after)
        yield move(r, after, f"sees the vote on layout {after.progress.layout}")

    def adopted(self, slot: Slot) -> Slot:
        """The received layout is the one in use."""
        assert slot.received is not None, "only a slot that has received votes"
        history, versions = slot.received
        progress = transaction.after_adopt(slot.progress)
        return slot._replace(progress=progress, history=history, versions=versions, received=None)
