"""What was alive when: storages with their kinds, from allocation events and marks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment in the order of the events.

    Attributes:
        at: how many events came before it.
        name: what happens.
        kinds: kind by address, of storages that are alive; holds for their whole life.
    """

    at: int
    name: str
    kinds: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment in a stretch at which most bytes were alive, the first of equals.

    Attributes:
        total_bytes: how many.
        at: number of events before it.
        by_kind: the same by kind of storage.
    """

    total_bytes: int
    at: int
    by_kind: dict[str, int]


class Timeline:
    """Storages of one process.

    Args:
        events: of `CountingAllocator`, from its installation on.
        marks: in order of time.
        scopes: mark name -> kind of every storage without one that is born between it and the next scope's mark.
    """

    def __init__(self, events: NDArray[np.void], marks: Sequence[Mark], scopes: Mapping[str, str]):
        self.marks = marks
        count = len(events)
        self._live = np.cumsum(events["bytes"])
        born: list[int] = []
        died: list[int] = []
        sizes: list[int] = []
        kinds: list[str] = []
        alive: dict[int, int] = {}
        pending = iter(marks)
        mark = next(pending, None)
        scope = ""
        for index, (pointer, size) in enumerate(events.tolist()):
            while mark is not None and mark.at <= index:
                scope = self._pass(mark, alive, kinds, scopes, scope)
                mark = next(pending, None)
            if size < 0:
                died[alive.pop(pointer)] = index
            else:
                alive[pointer] = len(born)
                born.append(index)
                died.append(count)
                sizes.append(size)
                kinds.append(scope)
        while mark is not None:
            scope = self._pass(mark, alive, kinds, scopes, scope)
            mark = next(pending, None)
        self._born, self._died, self._sizes = np.array(born), np.array(died), np.array(sizes)
        self._kinds = kinds

    @staticmethod
    def _pass(mark: Mark, alive: Mapping[int, int], kinds: list[str], scopes: Mapping[str, str], scope: str) -> str:
        for pointer, kind in mark.kinds.items():
            if pointer in alive:
                kinds[alive[pointer]] = kind
        return scopes.get(mark.name, scope)

    def peak(self, start: int, stop: int, *, older: int | None = None) -> Peak:
        """The peak among the moments after `start` up to `stop` events.

        Args:
            start, stop: numbers of events.
            older: if given, kinds of storages that were born before it get a ` (old)`.
        """
        before = int(self._live[start - 1]) if start else 0
        stretch = self._live[start:stop]
        highest = int(stretch.argmax()) if len(stretch) else 0
        at, total = start, before
        if len(stretch) and stretch[highest] > before:
            at, total = start + highest + 1, int(stretch[highest])
        by_kind: dict[str, int] = {}
        for index in np.flatnonzero((self._born < at) & (self._died >= at)).tolist():
            kind = self._kinds[index]
            if older is not None and self._born[index] < older:
                kind += " (old)"
            by_kind[kind] = by_kind.get(kind, 0) + int(self._sizes[index])
        assert sum(by_kind.values()) == total
        return Peak(total_bytes=total, at=at, by_kind=dict(sorted(by_kind.items())))

    def places(self, name: str) -> list[int]:
        """Where marks of this name are."""
        return [mark.at for mark in self.marks if mark.name == name]

    def last_mark(self, at: int, names: Iterable[str]) -> str:
        """The latest of these marks before a moment, or nothing."""
        wanted = set(names)
        found = [mark.name for mark in self.marks if mark.at <= at and mark.name in wanted]
        return found[-1] if found else ""
