"""Writes checkpoints in the background: a thread of each slot, no collectives.

Every slot writes what it owns and reports each file. Whoever sees that all of them are reported first writes the
manifest. What a slot that died had not reported is written by its mirrors, from the same step: the copies that a saver
works on do not follow the generations.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

from torch.distributed import DistError

from nep.checkpoint.board import COMPLETE, Board, SaveKeys, end_save
from nep.checkpoint.folder_board import FolderBoard
from nep.checkpoint.folders import store_name
from nep.checkpoint.save import HAS_ONE, Abandoned, Save, SaverConfig
from nep.checkpoint.snapshot import Snapshot

log = logging.getLogger(__name__)

_POLL_S = 0.005


class Saver:
    """One slot's saver. Its methods are for the main thread.

    At most one save is in progress, with a copy of the slot's state.

    Args:
        slot: this one.
        board: a connection to the control store that nobody else uses.
        dead: which of some slots have ended for good; asked by the thread, which may use `board`.
        config: see there.

    Attributes:
        last_step: of the newest checkpoint that this slot knows to be complete, or None.
    """

    def __init__(self, slot: int, board: Board, dead: Callable[[Collection[int]], set[int]], config: SaverConfig):
        self._slot = slot
        self._board = board
        self._dead = dead
        self.config = config
        self._changed = threading.Condition()
        self._waiting: Snapshot | None = None
        self._unwanted: deque[SaveKeys] = deque()
        self._busy = False
        self._cancelled: str | None = None
        self._lost: set[int] = set()
        self._messages: deque[str] = deque()
        self._failing = False
        self._moved_at = time.monotonic()  # when the thread last showed that it gets on
        self._stuck_at: float | None = None  # what it showed last when it was given up
        self.last_step: int | None = None
        threading.Thread(target=self._work, name="checkpoint", daemon=True).start()

    # For the main thread.

    @property
    def is_idle(self) -> bool:
        return not self._busy

    def save(self, snapshot: Snapshot) -> None:
        """Begin to write a checkpoint; the saver is idle. All slots of its plan call it, or `refuse`."""
        with self._changed:
            assert not self._busy, "one at a time"
            self._busy, self._cancelled, self._waiting = True, None, snapshot
            self._moved_at = time.monotonic()
            self._lost = set()  # whoever is in its plan is here, even if it was lost once
            self._changed.notify_all()

    def refuse(self, step: int, layout: int) -> None:
        """This slot is busy and cannot take part in a save: it is abandoned for all."""
        with self._changed:
            self._unwanted.append(SaveKeys(step, layout))
            self._changed.notify_all()

    def withdraw(self, step: int, layout: int, board: Board) -> None:
        """The thread of this slot hangs: a save that the others may wait for ends here and now, for all of them.

        Args:
            board: another connection than the thread's.
        """
        try:
            end_save(board, SaveKeys(step, layout), self._slot, f"slot {self._slot} hangs while it writes")
        except RuntimeError as error:
            log.warning("no checkpoint of step %d, and the others cannot be told: %s", step, error)

    def cancel(self, why: str) -> None:
        """Abandon the save in progress, if any and not complete yet; `wait` tells when that is done."""
        with self._changed:
            self._cancelled = why

    def lose(self, slots: Collection[int]) -> None:
        """These slots are gone: others went on without them."""
        self._lost = self._lost | set(slots)

    def wait(self, timeout_s: float | None = None, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until no save is in progress, and say whether that is so.

        Args:
            timeout_s: longest time to wait; None: as long as it takes (a save ends by itself, see `stall_s`). But a
                thread that hangs, in a file system or elsewhere, is not waited for any longer than `stall_s`.
            stop: ends the wait early.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self._busy and not stop() and not self._hangs():
                if deadline is not None and time.monotonic() >= deadline:
                    break
                self._changed.wait(_POLL_S)
            return not self._busy

    def _hangs(self) -> bool:
        """Whether the thread has not moved for so long that nothing is expected of it; said once."""
        moved_at = self._moved_at
        if time.monotonic() - moved_at <= self.config.stall_s:
            return False
        if self._stuck_at != moved_at:
            self._stuck_at = moved_at
            self._messages.append(
                f"slot {self._slot} has been busy with one file of a checkpoint for more than "
                f"{self.config.stall_s:g} s and is not waited for; see whether its file system answers"
            )
        return True

    def messages(self) -> list[str]:
        """Lines for people since the last call."""
        found = []
        while self._messages:
            found.append(self._messages.popleft())
        return found

    # The thread.

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None and not self._unwanted:
                    self._changed.wait()
                snapshot, self._waiting = self._waiting, None
            try:
                if snapshot is not None and not self._save(snapshot, self._board):
                    # All slots that see the folder begin anew there, and without the others it ends as any save does.
                    # The next save asks the store again: it may have been out of reach, and not gone.
                    self._save(snapshot, FolderBoard(self.config.root / store_name(self.config.tag)))
            finally:
                snapshot = None  # its memory
                self._refuse_unwanted()
                with self._changed:
                    self._busy = self._waiting is not None
                    self._changed.notify_all()

    def _save(self, snapshot: Snapshot, board: Board) -> bool:
        """Save; False if the control store was lost and there is another way."""
        started = time.monotonic()
        save = Save(
            snapshot=snapshot,
            config=self.config,
            board=board,
            gone=lambda: self._gone(board, snapshot.plan.slots),
            cancelled=self._why_not,
        )
        try:
            manifest = save.run()
        except Abandoned as end:
            self._give_up(save, str(end))
            return True
        except DistError as error:
            log.warning("checkpoint of step %d: the control store is gone (%s)", snapshot.step, type(error).__name__)
            return isinstance(board, FolderBoard)
        except Exception as error:
            if not isinstance(error, OSError):
                log.exception("checkpoint of step %d", snapshot.step)
            self._give_up(save, f"slot {self._slot}: {error}")
            return True
        self._failing = False
        self.last_step = snapshot.step
        if manifest is not None:
            seconds = time.monotonic() - started
            size = f"{manifest.size / 1e6:.1f} MB" if manifest.size >= 1e5 else f"{manifest.size} bytes"
            self._messages.append(f"checkpoint of step {snapshot.step}: {save.folder} ({size} in {seconds:.2f} s)")
        return True

    def _gone(self, board: Board, slots: Collection[int]) -> set[int]:
        if isinstance(board, FolderBoard):
            return self._lost  # who else has ended is not known any more
        return self._lost | self._dead(slots)

    def _why_not(self) -> str | None:
        self._moved_at = time.monotonic()
        self._refuse_unwanted()
        return self._cancelled

    def _give_up(self, save: Save, why: str) -> None:
        """End a save without a checkpoint. Whoever ends it says so, and says it once while it goes on like that."""
        step = save.snapshot.step
        try:
            ended, mine = save.abandon(why)
        except RuntimeError as error:
            ended, mine = f"{why} ({error})", True
        if ended == COMPLETE:
            self.last_step = step
            return
        save.tidy_up()
        log.warning("no checkpoint of step %d: %s", step, ended)
        if ended in (HAS_ONE, self._cancelled):
            return
        if mine and not self._failing:
            self._messages.append(f"no checkpoint of step {step}: {ended}")
        self._failing = True

    def _refuse_unwanted(self) -> None:
        """Abandon saves that came while this slot was busy."""
        while self._unwanted:
            keys = self._unwanted.popleft()
            why = f"slot {self._slot} was still busy with the one before"
            try:
                if end_save(self._board, keys, self._slot, why)[1]:
                    self._messages.append(f"no checkpoint of step {keys.step}: {why}")
            except RuntimeError as error:
                log.warning("no checkpoint of step %d: %s (%s)", keys.step, why, error)
