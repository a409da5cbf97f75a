"""The power limit of one slot's own board, in a running job.

A thread of its own opens the board and sets it: neither a driver that takes its time nor the start of the process that
restores limits after a crash holds up a step. A limit changes nothing that is computed, so slots need not set theirs at
the same boundary; but one that goes up waits until those of its node that go down have said that they have.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue

from torch.distributed import DistError

from nep.fault_tolerance.control_store import ControlStore, power_board_key, power_limit_key
from nep.power.controller import PowerController
from nep.power.device import PowerError
from nep.train.power_config import PowerConfig
from nep.train.power_facts import BoardFacts, LimitTold

log = logging.getLogger(__name__)

# At the end, for limits to be put back; the restoring process does it if that takes longer.
_END_S = 20.0


@dataclass
class _Order:
    """A limit that is to be set.

    Attributes:
        name: tells orders apart.
        limit_w: wanted.
        first: slots whose limit goes down before.
    """

    name: str
    limit_w: int
    first: tuple[int, ...]


class SlotPower:
    """The power of one slot; used by the trainer's main thread.

    Args:
        config: of the job.
        slot: whose.
        local_index: its number on its node.
        board: number or UUID of its board, for NVML.
        announce: says a line to people.
    """

    def __init__(
        self, config: PowerConfig, *, slot: int, local_index: int, board: int | str, announce: Callable[[str], None]
    ) -> None:
        self._config, self._slot, self._announce = config, slot, announce
        self._local_index, self._board = local_index, board
        self._controller: PowerController | None = None  # of the thread
        self._to_do: SimpleQueue[Callable[[], BoardFacts | LimitTold | None] | None] = SimpleQueue()
        self._done: deque[BoardFacts | LimitTold] = deque()
        self._order: _Order | None = None
        self._ordered = False
        self.facts: BoardFacts | None = None
        self._thread = threading.Thread(target=self._work, name="nep-power", daemon=True)
        self._to_do.put(self._open)
        self._thread.start()

    # Main thread.

    def order(self, name: str, limits_w: Mapping[int, int], before_w: Mapping[int, int], node: frozenset[int]) -> None:
        """Set this slot's limit, of those that have been decided.

        Args:
            name: tells orders apart.
            limits_w: slot -> limit, of all slots of the plan.
            before_w: slot -> limit before.
            node: slots that share this one's budget.
        """
        limit = limits_w.get(self._slot)
        if limit is None or self._config.mode != "apply":
            return
        down = tuple(slot for slot in sorted(node) if slot in limits_w and limits_w[slot] < before_w[slot])
        self._order = _Order(name, limit, down if limit > before_w[self._slot] else ())

    def poll(self, store: ControlStore) -> None:
        """Between two steps: tell what has been done, and do what can be done now. Waits for the store only."""
        try:
            while self._done:
                self._tell(store, self._done[0])
                self._done.popleft()
            if self._order is not None:
                self._advance(store, self._order)
        except DistError as error:
            log.warning("power: the control store does not answer (%s); tried again after the next step", error)

    def release(self) -> None:
        """The limit of before is the right one again."""
        self._order = None
        if self._ordered:
            self._ordered = False
            self._to_do.put(self._restore)

    def finish(self) -> None:
        """The trainer ends: everything as it was."""
        self.release()
        self._to_do.put(None)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            log.warning("power: the limit was not put back within %g s; the restoring process will", _END_S)

    def _tell(self, store: ControlStore, what: BoardFacts | LimitTold) -> None:
        if isinstance(what, LimitTold):
            if what.refused:
                self._announce(f"power: {what.refused}; training goes on at the speed that is measured")
            else:
                log.info("power: limit is %s W now", what.limit_w)
            store.set(power_limit_key(self._slot), what.to_json())
            return
        text = store.compare_and_set(power_board_key(self._slot), "", what.to_json())
        self.facts = BoardFacts.from_json(text)
        if what.problem:
            self._announce(f"power: {what.problem}; this job goes on without watts as a lever")

    def _advance(self, store: ControlStore, order: _Order) -> None:
        for slot in order.first:
            text = store.get(power_limit_key(slot))
            told = None if text is None else LimitTold.from_json(text)
            if told is None or told.order != order.name:
                return
            if told.refused:
                self._order = None
                self._announce(f"power: not raised to {order.limit_w} W, since slot {slot} could not be lowered first")
                return
        self._order, self._ordered = None, True
        self._to_do.put(lambda: self._set(order))

    # The thread.

    def _work(self) -> None:
        while (act := self._to_do.get()) is not None:
            done = act()
            if done is not None:
                self._done.append(done)

    def _open(self) -> BoardFacts | LimitTold:
        try:
            device = self._config.open(self._board, self._local_index)
            facts = BoardFacts.read(self._slot, device)
        except (PowerError, ValueError) as error:
            return BoardFacts(slot=self._slot, problem=str(error))
        board = self._board if self._config.source == "nvml" else self._local_index
        self._controller = PowerController(
            {self._slot: device}, source=self._config.devices, boards={self._slot: board}
        )
        self._done.append(facts)
        # An earlier trainer of this slot may have told of another limit.
        return LimitTold(order="", limit_w=self._limit_w())

    def _set(self, order: _Order) -> LimitTold | None:
        if self._controller is None:
            return None
        try:
            result = self._controller.set_limits({self._slot: order.limit_w})
        except ValueError as error:
            return LimitTold(order=order.name, limit_w=self._limit_w(), refused=str(error))
        refused = "; ".join(one.text for one in result.refused)
        return LimitTold(order=order.name, limit_w=self._limit_w(), refused=refused)

    def _restore(self) -> LimitTold | None:
        if self._controller is None:
            return None
        refused = ""
        try:
            self._controller.restore()
        except PowerError as error:
            refused = str(error)
        return LimitTold(order="", limit_w=self._limit_w(), refused=refused)

    def _limit_w(self) -> float | None:
        assert self._controller is not None
        try:
            return self._controller.devices[self._slot].limit_w()
        except PowerError:
            return None
