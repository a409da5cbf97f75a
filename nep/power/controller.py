"""Sets power limits of boards and puts them back: when asked, at exit, and (by `nep.power.restorer`) after a crash."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from nep.power.device import ErrorKind, PowerDevice, PowerError, PowerRange
from nep.power.restorer import Guard, Held, put_all_back
from nep.power.source import DeviceSource


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A limit that was not set.

    Attributes:
        slot: whose.
        limit_w: that was wanted.
        kind: why, see `PowerError`.
        text: a sentence with what to do.
        command: what an administrator would type.
    """

    slot: int
    limit_w: int
    kind: ErrorKind
    text: str
    command: str


@dataclass(frozen=True, kw_only=True)
class LimitsSet:
    """What became of a call.

    Attributes:
        set_w: slot -> limit that is in force now, of those that were asked for.
        refused: the others.
    """

    set_w: Mapping[int, int] = field(default_factory=dict)
    refused: tuple[Refusal, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.refused

    @property
    def commands(self) -> tuple[str, ...]:
        """What an administrator would type for the rest."""
        return tuple(refusal.command for refusal in self.refused)


class LimitSetter(Protocol):
    """Whoever sets limits of slots; used by one thread at a time."""

    def set_limits(self, limits_w: Mapping[int, int]) -> LimitsSet:
        """Set limits of slots; others keep theirs.

        Raises:
            ValueError: a slot that is not here, or a limit that its board does not have.
        """
        ...

    def restore(self) -> None:
        """Every limit as it was before the first call."""
        ...


class PowerController:
    """Power limits of this process's slots. A context manager: what was set is put back at its end.

    Limits that go down are set first, and if one of them cannot be, none goes up: together they are never above what
    the plan allows, not even in between. Slots of one domain under several controllers need the same order: all set
    what goes down, then (after a barrier) what goes up.

    Args:
        devices: slot -> its board. Nothing is read or changed yet.
        source: where another process finds the same boards, so that they are restored even if this one is killed; None
            for boards that live in this process only.
        boards: slot -> its board's number or UUID in the source; by default the slot itself.
    """

    def __init__(
        self,
        devices: Mapping[int, PowerDevice],
        *,
        source: DeviceSource | None = None,
        boards: Mapping[int, int | str] | None = None,
    ):
        self.devices = dict(sorted(devices.items()))
        self._source = source
        self._boards = {slot: (boards or {}).get(slot, slot) for slot in self.devices}
        self._held: dict[int, Held] = {}
        self._touched: set[int] = set()
        self._ranges: dict[int, PowerRange] = {}
        self._guard: Guard | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @property
    def guard_pid(self) -> int | None:
        """Of the process that restores after a crash, once there is one."""
        return self._guard.pid if self._guard is not None else None

    @property
    def original_w(self) -> dict[int, float]:
        """Slot -> limit that will be put back, of slots whose limit has been changed."""
        return {slot: held.original_w for slot, held in self._held.items()}

    def ranges_w(self) -> dict[int, PowerRange]:
        """Slot -> limits of its board.

        Raises:
            PowerError: a board does not say.
        """
        for slot, device in self.devices.items():
            if slot not in self._ranges:
                self._ranges[slot] = device.range_w()
        return dict(self._ranges)

    def commands(self, limits_w: Mapping[int, int]) -> tuple[str, ...]:
        """What an administrator would type for these limits; nothing is changed."""
        return tuple(self.devices[slot].command(limit) for slot, limit in sorted(limits_w.items()))

    def set_limits(self, limits_w: Mapping[int, int]) -> LimitsSet:
        """See `LimitSetter`."""
        strangers = sorted(set(limits_w) - set(self.devices))
        if strangers:
            raise ValueError(f"slots {strangers} are not of this controller; it has {list(self.devices)}")
        with self._lock:
            wanted: dict[int, int] = {}
            now: dict[int, float] = {}
            refused: list[Refusal] = []
            for slot, limit in sorted(limits_w.items()):
                try:
                    if slot not in self._ranges:
                        self._ranges[slot] = self.devices[slot].range_w()
                    now[slot] = self.devices[slot].limit_w()
                except PowerError as error:
                    refused.append(self._refusal(slot, limit, error))
                    continue
                self._ranges[slot].check(limit, self.devices[slot].name)
                wanted[slot] = limit
            changed = [slot for slot, limit in wanted.items() if limit != now[slot]]
            try:
                self._protect({slot: (now[slot], wanted[slot]) for slot in changed})
            except RuntimeError as error:
                self._drop_guard()
                for slot in changed:
                    refused.append(self._refusal(slot, wanted.pop(slot), PowerError(str(error), "world")))
            result = self._set(wanted, now, refused)
            self._touched.update(slot for slot in result.set_w if result.set_w[slot] != now[slot])
            if not self._touched:
                # Nothing that would have to be restored: no process need wait for that.
                self._held = {}
                self._drop_guard()
            return result

    def restore(self) -> None:
        """See `LimitSetter`. Limits that somebody else has set meanwhile stay.

        Raises:
            PowerError: a board does not obey; the others are restored.
        """
        if os.getpid() != self._owner:
            # A fork of the controller's process holds a copy of it, not the boards.
            return
        with self._lock:
            slots = {held.board: slot for slot, held in self._held.items()}
            devices = {board: self.devices[slot] for board, slot in slots.items()}
            trouble = put_all_back(devices, list(self._held.values()))
            self._held = {}
            self._touched.clear()
            self._drop_guard()
            atexit.unregister(self._at_exit)
        if trouble:
            raise PowerError("power limits were not all restored: " + "; ".join(trouble), "world")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def _set(self, wanted: Mapping[int, int], now: Mapping[int, float], refused: list[Refusal]) -> LimitsSet:
        done: dict[int, int] = {}
        # What goes down first; what stays counts as done.
        for slot in sorted(wanted, key=lambda slot: (wanted[slot] > now[slot], slot)):
            limit, device = wanted[slot], self.devices[slot]
            # A board of which not even the limit is known may have been meant to go down.
            blocked = [one.slot for one in refused if one.slot not in now or one.limit_w < now[one.slot]]
            if limit > now[slot] and blocked:
                text = f"{device.name}: not raised to {limit} W, since slots {blocked} could not be lowered first"
                refused.append(self._refusal(slot, limit, PowerError(text, "world")))
                continue
            try:
                if limit != now[slot]:
                    device.set_limit_w(limit)
                done[slot] = limit
            except PowerError as error:
                refused.append(self._refusal(slot, limit, error))
        return LimitsSet(set_w=done, refused=tuple(refused))

    def _protect(self, changed: Mapping[int, tuple[float, int]]) -> None:
        """Before anything is set, whoever restores it knows what it was.

        Args:
            changed: slot -> limit now and limit to come.
        """
        if not changed:
            return
        held = {slot: Held(one.board, one.original_w, list(one.set_w)) for slot, one in self._held.items()}
        for slot, (now, limit) in changed.items():
            one = held.setdefault(slot, Held(board=self._boards[slot], original_w=now))
            if limit not in one.set_w:
                one.set_w.append(limit)
        if self._source is not None:
            if self._guard is None:
                self._guard = Guard(self._source)
            self._guard.hold(list(held.values()))
        self._held = held
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def _drop_guard(self) -> None:
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _at_exit(self) -> None:
        try:
            self.restore()
        except PowerError as error:
            print(f"nep: {error}", file=sys.stderr, flush=True)

    def _refusal(self, slot: int, limit_w: int, error: PowerError) -> Refusal:
        return Refusal(
            slot=slot,
            limit_w=limit_w,
            kind=error.kind,
            text=str(error),
            command=self.devices[slot].command(limit_w),
        )
