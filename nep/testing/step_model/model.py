"""The step protocol as a transition system: what may happen next in a given world.

Work without a wait inside is one event. A method that upholds a rule is small, so that `mutants` can override
just that one.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations

from nep.fault_tolerance import transaction
from nep.fault_tolerance.records import NO_LAYOUT, Decision, Progress
from nep.testing.step_model.layouts import (
    drained_of,
    first_layout,
    keeps,
    layout_after_failure,
    lost_intervals,
)
from nep.testing.step_model.stages import Stages
from nep.testing.step_model.world import (
    DONE,
    GONE,
    LEAVE,
    NO_DECISION,
    STAGES,
    SYNC,
    TRANSFER,
    Event,
    Slot,
    Store,
    Violation,
    World,
    move,
)


class StepModel(Stages):
    """All ranks run all steps; crashes and false alarms strike anywhere, up to their budgets.

    Args:
        ranks: 2 to 6.
        steps: optimizer steps of the job.
        crashes: how many slots may die, each at any point.
        alarms: how many fault flags may be raised without a cause.
        returns: how often a dead slot may come back, with empty memory.
        remirror: whether a layout transaction restores missing mirrors after the next step.
        drain: whether the last slot is drained after the first step that a generation commits.
    """

    def __init__(
        self,
        ranks: int,
        steps: int,
        crashes: int = 0,
        alarms: int = 0,
        returns: int = 0,
        remirror: bool = True,
        drain: bool = False,
    ):
        if not 2 <= ranks <= 6:
            raise ValueError(f"ranks ({ranks}) must be 2 to 6; more worlds than memory otherwise")
        if steps < 1:
            raise ValueError(f"steps ({steps}) must be at least 1")
        if min(crashes, alarms, returns) < 0:
            budgets = f"crashes ({crashes}), alarms ({alarms}) and returns ({returns})"
            raise ValueError(f"{budgets} must not be negative")
        if drain and returns:
            raise ValueError(f"returns ({returns}) must be 0 with drain: the drained slot would be drained again")
        self.ranks, self.steps, self.remirror, self.drain = ranks, steps, remirror, drain
        self.crashes, self.alarms, self.returns = crashes, alarms, returns
        self._decisions: dict[object, Decision] = {}

    def initial(self) -> World:
        """Step 1 of generation 1, nothing sent."""
        members = tuple(range(self.ranks))
        digest = first_layout(self.ranks)
        decision = replace(NO_DECISION, generation=1, members=members, layout=1, layout_digest=digest, plan=digest)
        slots = tuple(
            GONE._replace(
                alive=True,
                decision=decision,
                at=(1, SYNC, 0),
                progress=Progress(slot=slot, layout=1, layout_digest=digest),
                versions=(0,) * self.ranks,
            )
            for slot in members
        )
        records = (None,) * self.ranks
        return World(slots, Store(decision, records, False, self.crashes, self.alarms, self.returns))

    def is_over(self, world: World) -> bool:
        """Whether every live slot has finished the last step (that each has all of it, `begin_step` checks).

        Raises:
            Violation: they have, but not with the same training.
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
                if self.may_fail(world, slot):
                    yield self.fail(world, r, slot)
            if store.crashes:
                after = store._replace(crashes=store.crashes - 1)
                where = "recovery" if slot.posted else f"{STAGES[slot.at[1]]} of {slot.at[0]}"
                yield move(r, slot.dead(), f"crashes in {where}")._replace(store=after, progress=False)
        if store.alarms and not store.flagged and not all(slot.at[1] == DONE for _, slot in live):
            after = store._replace(flagged=True, alarms=store.alarms - 1)
            yield Event("false alarm", store=after, progress=False)
        if store.returns and live:
            for r, slot in enumerate(world.slots):
                if not slot.alive and r not in store.decision.members:
                    yield self.come_back(world, r)

    # RECOVER.

    def may_fail(self, world: World, slot: Slot) -> bool:
        """Whether a wait of this slot can end with an error: the flag is raised, or a member is dead."""
        broken = world.store.flagged or slot.at[1] == LEAVE
        return broken or not all(world.slots[q].alive for q in slot.decision.members)

    def fail(self, world: World, r: int, slot: Slot) -> Event:
        """RECOVER 1 to 2: a wait ends with an error; the slot raises the flag and posts what it can prove."""
        records = list(world.store.records)
        records[r] = slot.progress
        store = world.store._replace(records=tuple(records), flagged=True)
        known = f"tx {slot.progress.tx}, applied {slot.progress.applied}, layout {slot.progress.layout}"
        label = f"fails in {STAGES[slot.at[1]]} of {slot.at[0]} and posts: {known}"
        return move(r, slot._replace(posted=True), label)._replace(store=store)

    def come_back(self, world: World, r: int) -> Event:
        """A dead slot registers for the next generation, with empty memory."""
        store = world.store._replace(flagged=True, returns=world.store.returns - 1)
        progress = Progress(slot=r, layout=NO_LAYOUT, layout_digest="", params_version=None)
        slot = GONE._replace(alive=True, posted=True, decision=store.decision, progress=progress)
        return move(r, slot, "comes back")._replace(store=store, progress=False)

    def recover(self, world: World, r: int, slot: Slot) -> Iterator[Event]:
        """RECOVER 3 to 7: propose a decision, or read the one that stands and obey it."""
        store, generation = world.store, slot.decision.generation
        if store.decision.generation > generation:
            for decision in (store.decision, store.rival) if store.rival else (store.decision,):
                yield self.obey(world, r, slot, self.as_read(decision, slot))
        elif not any(world.slots[q].alive for q in store.decision.members):
            yield Event("checkpoint: only returners live", checkpoint=True)
        elif r == next((q for q in store.decision.members if world.slots[q].posted), None):
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
        returners = {q for q, slot in enumerate(world.slots) if slot.alive and q not in before.members}
        for unknown in chain.from_iterable(combinations(late, k) for k in range(len(late) + 1)):
            yield self.write(world, self.decision(before, posted, dead - set(unknown), returners))

    def write(self, world: World, decision: Decision) -> Event:
        """RECOVER 3: the compare-and-set. What the dead had sent in the old generation no longer matters."""
        if decision.action == "checkpoint":
            check_lost(world, decision)
            return Event(f"checkpoint: {decision.reason}", checkpoint=True)
        gone = tuple((q, GONE) for q, slot in enumerate(world.slots) if not slot.alive)
        store = world.store._replace(decision=decision, records=(None,) * self.ranks, flagged=False)
        what = f"members {list(decision.members)}, C = {decision.committed}, LN = {decision.layout}"
        return Event(f"generation {decision.generation}: {what}", gone, store)

    def decision(self, before: Decision, records: dict[int, Progress], dead: set[int], returners: set[int]) -> Decision:
        """RECOVER 3: `transaction.decide`, remembered."""
        key = before, tuple(records.items()), frozenset(dead), frozenset(returners)
        if key not in self._decisions:
            self._decisions[key] = transaction.decide(
                before.generation + 1,
                before.members,
                records,
                dead,
                lost=lost_intervals,
                plan=layout_after_failure,
                returners=returners,
                named=lambda digest: set(range(self.ranks)) - set(drained_of(digest)),
            )
        return self._decisions[key]

    def as_read(self, decision: Decision, slot: Slot) -> Decision:
        """RECOVER 4: everybody obeys the stored bytes."""
        return decision

    def obey(self, world: World, r: int, slot: Slot, decision: Decision) -> Event:
        """RECOVER 4 to 7: settle the layout, record C, roll forward."""
        if r in decision.leavers:
            return move(r, slot.dead(), f"leaves, as generation {decision.generation} says")
        if r in drained_of(decision.layout_digest) and r not in decision.returners:
            raise Violation(f"slot {r} was drained and is counted on in generation {decision.generation}")
        if r not in decision.members:
            raise Violation(f"slot {r} is alive but left out of generation {decision.generation}")
        after, rolls = slot, transaction.must_apply(slot.progress, decision)
        if transaction.settle_layout(slot.progress, decision) == "adopt":
            after = self.adopted(slot)
        if rolls:
            after = self.with_step(world, r, after, decision.result)
        if r in decision.returners:
            after = after._replace(history=(), versions=(-1,) * self.ranks)
        elif len(after.history) != decision.committed:
            raise Violation(f"slot {r} obeys C = {decision.committed} with state {after.history}")
        after = after._replace(
            posted=False,
            decision=decision,
            at=(decision.committed, TRANSFER, 0),
            progress=self.progress_after(slot.progress, decision),
            owned_sums=None,
            mirrored_sums=None,
            received=None,
        )
        what = "rolls forward in" if rolls else "obeys"
        return move(r, after, f"{what} generation {decision.generation}")

    def progress_after(self, progress: Progress, decision: Decision) -> Progress:
        """RECOVER 5 to 7: `transaction.after_decision`."""
        return transaction.after_decision(progress, decision)


def check_lost(world: World, decision: Decision) -> None:
    """A checkpoint must be needed: some interval is in no live slot's memory under layout LN.

    Raises:
        Violation: every interval could have been recovered.
    """
    live = [(q, slot.progress) for q, slot in enumerate(world.slots) if slot.alive]
    kept = [keeps(decision.layout_digest, q) for q, p in live if decision.layout in (p.layout, p.next_layout)]
    if all(any(column) for column in zip(*kept, strict=True)):
        raise Violation(f"a checkpoint although nothing is lost: {decision.reason}")
