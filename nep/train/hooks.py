"""What a caller may add to a trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nep.fault_tolerance.corruption import Corruption
from nep.fault_tolerance.history import Committed
from nep.fault_tolerance.timeline import Recovery
from nep.planning.plan import Plan

if TYPE_CHECKING:
    from nep.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a caller may add. Each is called on every slot; none may communicate or change the model.

    Attributes:
        on_commit: after a step is committed, while its parameters may still return: (trainer, committed step).
        on_recovery: when the first step after a recovery is committed, also a planned one: (trainer, recovery).
        on_plan: when a plan becomes the current one: (trainer, plan).
        next_plan: after every committed step, also the last: the plan to go on with, or None for the one in force. All
            slots must answer alike, from committed state alone; lanes and replicas may differ, slots and global batch
            not. One that no longer fits, since a slot has failed, is named and left.
        on_end: after the last step, while all slots are still there: (trainer).
        on_corruption: wrong bits were found in somebody's memory, before the step is run again: (trainer, corruption).
        on_message: a line for people from the background: of checkpoints, from whichever slot has one: (trainer, line).
    """

    on_commit: Callable[[Trainer, Committed], None] = lambda trainer, committed: None
    on_recovery: Callable[[Trainer, Recovery], None] = lambda trainer, recovery: None
    on_plan: Callable[[Trainer, Plan], None] = lambda trainer, plan: None
    next_plan: Callable[[Trainer], Plan | None] = lambda trainer: None
    on_end: Callable[[Trainer], None] = lambda trainer: None
    on_corruption: Callable[[Trainer, Corruption], None] = lambda trainer, corruption: None
    on_message: Callable[[Trainer, str], None] = lambda trainer, line: None
