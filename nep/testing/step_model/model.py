"""The step protocol as a transition system: what each slot may do next in a given world.

Messages are never stored: whatever a slot has sent follows from its place in the program, and a receiver may take
it or fail instead, which covers loss. Work without a wait inside is one event. A method that holds a rule in place
is small, so that `mutants` can override just that.
"""

from collections.abc import Iterator
from itertools import chain, combinations

from nep.fault_tolerance import transaction
from nep.fault_tolerance.transaction import Decision, Members, Progress
from nep.testing.step_model.world import (
    ADOPT,
    APPLY,
    DONE,
    GONE,
    MIRROR,
    RETURN,
    STAGES,
    SYNC,
    TRANSFER,
    VOTE,
    Event,
    Slot,
    Store,
    Versions,
    World,
    first_layout,
    keeps,
    layout_after_failure,
    layout_with_mirrors,
    lost_intervals,
    mirrors_of,
    pairs_of,
    peers_of,
)


class Violation(Exception):
    """Memory does not hold what the protocol promises, or a slot is stuck."""


class StepModel:
    """All ranks run all steps; crashes and false alarms strike anywhere, up to their budgets.

    Args:
        ranks: 2 to 6.
        steps: optimizer steps of the job.
        crashes: how many slots may die, each at any point.
        alarms: how many fault flags may be raised without a cause.
        remirror: whether a layout transaction restores missing mirrors after the next step.
    """

    def __init__(self, ranks: int, steps: int, crashes: int, alarms: int, remirror: bool = True):
        if not 2 <= ranks <= 6:
            raise ValueError(f"ranks ({ranks}) must be 2 to 6; more worlds than memory otherwise")
        if steps < 1 or crashes < 0 or alarms < 0:
            raise ValueError(f"steps ({steps}) must be at least 1, crashes ({crashes}) and alarms ({alarms}) at least 0")
        self.ranks, self.steps, self.crashes, self.alarms, self.remirror = ranks, steps, crashes, alarms, remirror
        self._decisions: dict[object, Decision] = {}

    def initial(self) -> World:
        """Step 1 of generation 1, nothing sent."""
        members = tuple(range(self.ranks))
        digest = first_layout(self.ranks)
        decision = Decision(
            generation=1,
            members=members,
            committed=0,
            result=None,
            result_slots=(),
            layout=1,
            layout_digest=digest,
            action="continue",
            plan=digest,
            params_versions=dict.fromkeys(members, 0),
        )
        slots = tuple(
            GONE._replace(
                alive=True,
                decision=decision,
                at=(1, SYNC, 0),
                progress=Progress(slot=slot, layout=1, layout_digest=digest),
                history=(),
                versions=(0,) * self.ranks,
            )
            for slot in members
        )
        return World(slots, Store(decision, (None,) * self.ranks, False, self.crashes, self.alarms))

    def is_over(self, world: World) -> bool:
        """Whether every live slot has finished the last step.

        Raises:
            Violation: they have, but not with the same, complete training.
        """
        live = [slot for slot in world.slots if slot.alive]
        if not all(slot.at[1] == DONE and not slot.posted for slot in live):
            return False
        if len({(slot.history, slot.versions, slot.progress.result) for slot in live}) > 1:
            raise Violation(f"the job ends differently: {[(slot.history, slot.versions) for slot in live]}")
        return True

    def events(self, world: World) -> Iterator[Event]:
        """Everything that can happen next."""
        store = world.store
        live = [(r, slot) for r, slot in enumerate(world.slots) if slot.alive]
        for r, slot in live:
            if slot.posted:
                yield from self.recover(world, r, slot)
            else:
                yield from self.run(world, r, slot)
                if store.flagged or not all(world.slots[member].alive for member in slot.decision.members):
                    yield self.fail(world, r, slot)
            if store.crashes:
                where = "recovery" if slot.posted else f"{STAGES[slot.at[1]]} of {slot.at[0]}"
                label, after = f"slot {r} crashes in {where}", store._replace(crashes=store.crashes - 1)
                yield Event(label, ((r, slot.dead()),), after, progress=False)
        if store.alarms and not store.flagged and not all(slot.at[1] == DONE for _, slot in live):
            after = store._replace(flagged=True, alarms=store.alarms - 1)
            yield Event("false alarm", store=after, progress=False)

    # The step, in program order. Each method yields what slot r can do in that stage.

    def run(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        """Dispatches to the stage that the slot is in."""
        stages = (self.sync, self.mirror, self.vote, self.apply, self.return_parameters, self.transfer, self.adopt)
        if slot.at[1] != DONE:
            yield from stages[slot.at[1]](world, r, slot)

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
        """STEP 2 to 4: finished sums to the mirrors; with those that it mirrors itself the slot is prepared."""
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
            yield move(r, slot._replace(at=(step, APPLY, 0), progress=progress), f"sees the vote on step {step}")

    def apply(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        """STEP 6. A fault may still come between the vote and this, as it can on an accelerator."""
        step = slot.at[0]
        progress = transaction.after_apply(slot.progress)
        after = self.with_step(world, r, slot, slot.progress.result)._replace(at=(step, RETURN, 0), progress=progress)
        yield move(r, after, f"applies step {step}")

    def with_step(self, world: World, r: int, slot: Slot, result: bytes | None) -> Slot:
        """Truth: what applying a step does to the slot's memory.

        Raises:
            Violation: the buffers hold something else, or another slot has applied something else.
        """
        held = slot.owned_sums, slot.mirrored_sums
        if held != (result, result):
            raise Violation(f"slot {r} applies {result!r}, but its sums (owned, mirrored) are of {held}")
        history = (*slot.history, result)
        for q, other in enumerate(world.slots):
            if other.alive and any(a != b for a, b in zip(history, other.history, strict=False)):
                raise Violation(f"slots {r} and {q} have applied different steps: {history} and {other.history}")
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
        if self.remirror and step < self.steps and layout_with_mirrors(digest, slot.decision.members) != digest:
            return slot._replace(at=(step, TRANSFER, 0))
        return self.begin_step(r, slot)

    def begin_step(self, r: int, slot: Slot) -> Slot:
        """STEP 1: the forward pass reads every held parameter."""
        done = slot.at[0]
        if set(slot.versions) != {done} or len(slot.history) != done:
            raise Violation(f"slot {r} goes on after step {done} with state {slot.history}, versions {slot.versions}")
        return slot._replace(at=(done, DONE, 0) if done == self.steps else (done + 1, SYNC, 0))

    # The layout transaction: after a decision, and later to restore mirrors.

    def target(self, slot: Slot) -> tuple[int, str]:
        """Number and digest of the layout that a slot in TRANSFER moves to."""
        if self.is_recovering(slot):
            return slot.progress.layout + 1, slot.decision.plan
        return slot.progress.layout + 1, layout_with_mirrors(slot.progress.layout_digest, slot.decision.members)

    def is_recovering(self, slot: Slot) -> bool:
        """Whether a slot in TRANSFER is there because of a decision; else it restores mirrors."""
        return slot.at[0] == slot.decision.committed

    def trusts(self, slot: Slot, r: int) -> bool:
        """Whether the parameters that slot r holds may stay. Before mirrors are restored all were returned."""
        return not self.is_recovering(slot) or transaction.trusts_parameters(slot.decision, r)

    def sources(self, slot: Slot, r: int) -> set[int]:
        """The slots from which slot r receives something; `slot` tells the transaction and may be another."""
        old, (_, new) = slot.progress.layout_digest, self.target(slot)
        wanted = keeps(new, r) if self.trusts(slot, r) else (True,) * self.ranks
        return {
            transaction.state_source(*pair, slot.decision)
            for pair, kept, want in zip(pairs_of(old), keeps(old, r), wanted, strict=True)
            if want and not kept
        }

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
            kept, stale = keeps(slot.progress.layout_digest, r), not self.trusts(slot, r)
            versions = tuple(
                step if stale and not own else version for version, own in zip(slot.versions, kept, strict=True)
            )
            after = self.receive(slot._replace(at=(step, ADOPT, 0)), number, digest, versions)
            yield move(r, after, f"has layout {number} complete and votes")

    def receive(self, slot: Slot, number: int, digest: str, versions: Versions) -> Slot:
        """RECOVER 8: into fresh memory; the old memory stays as it is."""
        return slot._replace(
            progress=transaction.after_receive(slot.progress, number, digest), received=(slot.history, versions)
        )

    def adopt(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        """RECOVER 9: the layout vote can be seen; the old memory is freed."""
        members = slot.decision.members
        if not all(has_reached(world, q, slot) for q in members):
            return
        for q in members:
            if world.slots[q].alive and world.slots[q].history != slot.history:
                raise Violation(f"slots {r} and {q} commit a layout with states {slot.history} and {world.slots[q].history}")
        after = self.begin_step(r, with_received(slot, transaction.after_adopt(slot.progress)))
        yield move(r, after, f"sees the vote on layout {after.progress.layout}")

    # RECOVER.

    def fail(self, world: World, r: int, slot: Slot) -> Event:
        """RECOVER 1 to 2: a wait ends with an error; the slot raises the flag and posts what it can prove."""
        records = list(world.store.records)
        records[r] = slot.progress
        store = world.store._replace(records=tuple(records), flagged=True)
        p = slot.progress
        label = f"fails in {STAGES[slot.at[1]]} of {slot.at[0]}, posts tx {p.tx} applied {p.applied} layout {p.layout}"
        return move(r, slot._replace(posted=True), label)._replace(store=store)

    def recover(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        """RECOVER 3 to 7: propose a decision, or read the one that stands and obey it."""
        store, generation = world.store, slot.decision.generation
        if store.decision.generation > generation:
            for decision in (store.decision, store.rival) if store.rival else (store.decision,):
                yield self.obey(world, r, slot, self.as_read(decision, slot))
        elif r == min(q for q, other in enumerate(world.slots) if other.alive and other.posted):
            # What is proposed depends on what the proposer knows, not on who it is.
            yield from self.propose(world, slot.decision)

    def propose(self, world: World, before: Decision) -> Iterator[Event]:
        """RECOVER 3: one decision, for each state of knowledge about who died after posting."""
        store = world.store
        posted = {q: record for q, record in enumerate(store.records) if record is not None}
        dead = {q for q in before.members if not world.slots[q].alive}
        if transaction.waiting_for(before.members, posted, dead):
            return
        late = sorted(dead & set(posted))
        for unknown in chain.from_iterable(combinations(late, k) for k in range(len(late) + 1)):
            decision = self.decision(before, posted, dead - set(unknown))
            if decision.action == "checkpoint":
                check_lost(world, decision)
                yield Event(f"checkpoint: {decision.reason}", checkpoint=True)
                continue
            slots = tuple((q, GONE) for q in sorted(dead))
            after = self.decided(world, before, decision)
            label = f"generation {decision.generation}: members {list(decision.members)}, C = {decision.committed}"
            yield Event(f"{label}, LN = {decision.layout}", slots, after)

    def decision(self, before: Decision, records: dict[int, Progress], dead: set[int]) -> Decision:
        """RECOVER 3: `transaction.decide`, remembered."""
        key = before, tuple(records.items()), frozenset(dead)
        if key not in self._decisions:
            self._decisions[key] = transaction.decide(
                before.generation + 1,
                before.members,
                records,
                dead,
                lost=lost_intervals,
                plan=layout_after_failure,
            )
        return self._decisions[key]

    def decided(self, world: World, before: Decision, decision: Decision) -> Store:
        """RECOVER 3: the store once the compare-and-set has won."""
        return world.store._replace(decision=decision, records=(None,) * self.ranks, flagged=False)

    def as_read(self, decision: Decision, slot: Slot) -> Decision:
        """RECOVER 4: everybody obeys the stored bytes."""
        return decision

    def obey(self, world: World, r: int, slot: Slot, decision: Decision) -> Event:
        """RECOVER 4 to 7: settle the layout, record C, roll forward."""
        if r not in decision.members:
            raise Violation(f"slot {r} is alive but left out of generation {decision.generation}")
        rolls = transaction.must_apply(slot.progress, decision)
        after = slot
        if transaction.settle_layout(slot.progress, decision) == "adopt":
            after = with_received(slot, transaction.after_adopt(slot.progress))
        if rolls:
            after = self.with_step(world, r, after, decision.result)
        after = after._replace(
            posted=False,
            decision=decision,
            at=(decision.committed, TRANSFER, 0),
            progress=self.progress_after(slot.progress, decision),
            owned_sums=None,
            mirrored_sums=None,
            received=None,
        )
        if len(after.history) != decision.committed:
            raise Violation(f"slot {r} obeys C = {decision.committed} with state {after.history}")
        return move(r, after, f"obeys generation {decision.generation}" + (", rolls forward" if rolls else ""))

    def progress_after(self, progress: Progress, decision: Decision) -> Progress:
        """RECOVER 5 to 7: `transaction.after_decision`."""
        return transaction.after_decision(progress, decision)


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
    in_generation = other.decision is not None and other.decision.generation == slot.decision.generation
    return q == r or (in_generation and other.at >= (*slot.at[:2], targets.index(r) + 1))


def has_reached(world: World, q: int, slot: Slot) -> bool:
    """Whether slot q has come to the stage of `slot` or further, in the same generation."""
    other = world.slots[q]
    in_generation = other.decision is not None and other.decision.generation == slot.decision.generation
    return in_generation and other.at[:2] >= slot.at[:2]


def result_of(slot: Slot, step: int) -> bytes:
    """What the vote of a step in the slot's generation yields; stands for its packed records."""
    return f"generation {slot.decision.generation} step {step}".encode()


def with_received(slot: Slot, progress: Progress) -> Slot:
    """The received layout becomes the one in use."""
    history, versions = slot.received
    return slot._replace(progress=progress, history=history, versions=versions, received=None)


def check_lost(world: World, decision: Decision) -> None:
    """A checkpoint must be needed: some interval is in no live slot's memory under layout LN.

    Raises:
        Violation: every interval could have been recovered.
    """
    kept = [keeps(decision.layout_digest, q) for q in decision.members if world.slots[q].alive]
    if all(any(column) for column in zip(*kept, strict=True)):
        raise Violation(f"a checkpoint although nothing is lost: {decision.reason}")
