"""Breadth-first search through all reachable worlds; the first violation found has a shortest trace."""

import time
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from nep.fault_tolerance.transaction import ProtocolViolation
from nep.testing.step_model.model import StepModel
from nep.testing.step_model.world import Event, Violation, World

_State = tuple[int, ...]  # one number per slot, one for the store


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an exploration found.

    Attributes:
        states: distinct worlds reached.
        transitions: events between them.
        ends: worlds in which every live slot has finished the last step.
        checkpoints: events that decide for a checkpoint.
        violation: what broke, or None.
        trace: the events that lead there; empty without a violation.
        complete: nothing was left unexplored.
        seconds: wall time.
    """

    states: int
    transitions: int
    ends: int
    checkpoints: int
    violation: str | None
    trace: tuple[str, ...]
    complete: bool
    seconds: float


class _Numbering:
    """Numbers for equal objects: worlds share almost all of their parts."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.objects: list[Any] = []

    def __call__(self, item: Hashable) -> int:
        number = self.numbers.setdefault(item, len(self.objects))
        if number == len(self.objects):
            self.objects.append(item)
        return number


class _Explorer:
    def __init__(self, model: StepModel):
        self.model = model
        self.slots = _Numbering()
        self.stores = _Numbering()

    def pack(self, world: World) -> _State:
        return (*map(self.slots, world.slots), self.stores(world.store))

    def unpack(self, state: _State) -> World:
        return World(tuple(self.slots.objects[i] for i in state[:-1]), self.stores.objects[state[-1]])

    def following(self, state: _State, world: World) -> Iterator[tuple[Event, _State]]:
        for event in self.model.events(world):
            after = list(state)
            for index, slot in event.slots:
                after[index] = self.slots(slot)
            if event.store is not None:
                after[-1] = self.stores(event.store)
            yield event, tuple(after)

    def trace(self, parents: dict[_State, _State | None], state: _State) -> tuple[str, ...]:
        labels = []
        while (parent := parents[state]) is not None:
            steps = self.following(parent, self.unpack(parent))
            labels.append(next(event.label for event, after in steps if after == state and not event.checkpoint))
            state = parent
        return tuple(reversed(labels))


def explore(model: StepModel, max_states: int | None = None) -> Outcome:
    """Visits every reachable world, up to the first violation or the limit of states."""
    began = time.monotonic()
    explorer = _Explorer(model)
    start = explorer.pack(model.initial())
    parents: dict[_State, _State | None] = {start: None}
    queue = deque([start])
    transitions = ends = checkpoints = 0
    violation: str | None = None
    trace: tuple[str, ...] = ()
    while queue and (max_states is None or len(parents) <= max_states):
        state = queue.popleft()
        world, goes_on = explorer.unpack(state), False
        try:
            end = model.is_over(world)
            for event, after in explorer.following(state, world):
                transitions += 1
                goes_on |= event.progress
                if event.checkpoint:
                    checkpoints += 1
                elif after not in parents:
                    parents[after] = state
                    queue.append(after)
            if not (goes_on or end):
                raise Violation("deadlock: some slots live, none can go on, and the last step is not done")
        except (Violation, ProtocolViolation) as error:
            violation, trace = str(error), explorer.trace(parents, state)
            break
        ends += end
    return Outcome(
        states=len(parents),
        transitions=transitions,
        ends=ends,
        checkpoints=checkpoints,
        violation=violation,
        trace=trace,
        complete=not queue,
        seconds=time.monotonic() - began,
    )
