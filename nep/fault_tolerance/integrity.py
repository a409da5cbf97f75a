"""Whether copies of the same units still have the same bits: a sum per slot in the vote, and a seal to tell who changed.

Summed over all slots, hashes of the owned minus those of the mirrored state are zero, and so are hashes of the
parameters that slots hold minus those of their owners' rounded master weights. Each slot also seals its state: it
remembers the hashes of what the last update left. Nothing writes to it until the next update, so bits that have changed
against the seal have changed by themselves, and the side that they are on is wrong.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nep.fault_tolerance.corruption import PARAMS, Action
from nep.parallel.state import OptimizerShard, SlotState
from nep.parallel.state_hash import UnitHashes, total, unit_hashes, units_of
from nep.planning.layout import Layout, Lines
from nep.planning.plan import Plan

if TYPE_CHECKING:
    from nep.fault_tolerance.runtime import SlotRun

log = logging.getLogger(__name__)

_TRIES = 2  # refusals of one step; copies that differ again after that are memory that cannot be mended


@dataclass(frozen=True, kw_only=True)
class StateHashes:
    """Hashes of one slot's state, unit by unit.

    Attributes:
        owned, mirrored: by kind (master, moments).
        held: of the parameters it computes with.
        rounded: of its master weights in the parameters' dtype: what holders ought to have.
    """

    owned: dict[str, UnitHashes]
    mirrored: dict[str, UnitHashes]
    held: UnitHashes
    rounded: UnitHashes


class Integrity:
    """The checks of one slot.

    Args:
        every: check in the vote of each step that is a multiple of this; 0 for never.
        action: what is done about what is found.

    Attributes:
        last: hashes that the last vote was about, or None.
        seal: the state that was sealed, and its hashes by part; None before.
        checks, seconds: how many, and the time that they and the seals took.
    """

    def __init__(self, every: int = 0, action: Action = "drain"):
        self.every, self.action = every, action
        self.last: StateHashes | None = None
        self.seal: tuple[SlotState, dict[str, dict[str, UnitHashes]]] | None = None
        self.checks, self.seconds = 0, 0.0
        self._refused = (0, 0)  # step, how often
        self._given_up: Plan | None = None  # copies are known to differ under it, and to stay so
        self._times: tuple[Plan, dict[str, UnitHashes]] | None = None

    def is_due(self, run: SlotRun, step: int) -> bool:
        """Whether this slot wants the vote of a step to check; it does if all slots want it."""
        if not self.every or step % self.every or self._given_up is run.state.plan:
            return False
        return self._refused[0] != step or self._refused[1] < _TRIES

    def summarize(self, run: SlotRun, step: int) -> int | None:
        """What this slot's record says of its state after the step before, or None without a check."""
        self.last = None
        if not self.is_due(run, step):
            return None
        start = time.perf_counter()
        state, lines, times = run.state, run.recipe.lines, self._counts(run)
        self.last = last = hashes_of(state, lines, run.recipe.dtype)
        found = total(last.held) - total(last.rounded, times[PARAMS])
        for kind in last.owned:
            found += total(last.owned[kind], times["mirrored"]) - total(last.mirrored[kind])
        self.checks += 1
        self.seconds += time.perf_counter() - start
        return found % 2**64

    def seal_for(self, run: SlotRun, step: int) -> None:
        """Remember the state as it is, if the vote of `step` will check it and it is not sealed yet."""
        if not self.is_due(run, step) or (self.seal is not None and self.seal[0] is run.state):
            return
        start = time.perf_counter()
        state, lines = run.state, run.recipe.lines
        self.seal = state, {
            "owned": shard_hashes(state.owned, lines),
            "mirrored": shard_hashes(state.mirrored, lines),
        }
        self.seconds += time.perf_counter() - start

    def break_seal(self) -> None:
        """The state is about to change."""
        self.seal = None

    def refuse(self, step: int) -> None:
        """The vote of a step was refused."""
        self._refused = (step, self._refused[1] + 1 if self._refused[0] == step else 1)
        if self._refused[1] == _TRIES:
            log.error("step %d was refused %d times; it is not checked again", step, _TRIES)

    def give_up(self, plan: Plan) -> None:
        """Copies differ and are to be left so: no more checks under this plan."""
        self._given_up = plan

    def kept(self, run: SlotRun, part: str, kind: str, name: str) -> torch.Tensor:
        """For each unit of the last vote: 1 as sealed, 0 not so, -1 unknown; int64 [units]."""
        assert self.last is not None
        now = getattr(self.last, part)[kind][name]
        if self.seal is None or self.seal[0] is not run.state:
            return torch.full_like(now, -1)
        return (now == self.seal[1][part][kind][name]).to(torch.int64)

    def _counts(self, run: SlotRun) -> dict[str, UnitHashes]:
        """How many mirrors, and how many holders, each owned unit has."""
        plan, lines = run.state.plan, run.recipe.lines
        if self._times is None or self._times[0] is not plan:
            self._times = plan, {
                "mirrored": _copies(plan, plan.mirrors, run.slot, lines),
                PARAMS: _copies(plan, plan.holders, run.slot, lines),
            }
        return self._times[1]


def hashes_of(state: SlotState, lines: Lines, dtype: torch.dtype) -> StateHashes:
    """All hashes of a slot's state.

    Args:
        dtype: of the parameters.
    """
    return StateHashes(
        owned=shard_hashes(state.owned, lines),
        mirrored=shard_hashes(state.mirrored, lines),
        held=unit_hashes(state.params, PARAMS, state.plan.holders, state.slot, lines),
        rounded=rounded_hashes(state.owned, lines, dtype),
    )


def shard_hashes(shard: OptimizerShard, lines: Lines) -> dict[str, UnitHashes]:
    """By kind."""
    return {
        kind: unit_hashes(tensors, kind, shard.layout, shard.slot, lines) for kind, tensors in shard.kinds.items()
    }


def rounded_hashes(shard: OptimizerShard, lines: Lines, dtype: torch.dtype) -> UnitHashes:
    """Of the parameters that a shard's master weights make."""
    rounded = {name: tensor.to(dtype) for name, tensor in shard.master.items()}
    return unit_hashes(rounded, PARAMS, shard.layout, shard.slot, lines)


def _copies(plan: Plan, layout: Layout, slot: int, lines: Lines) -> UnitHashes:
    """How many slots have each unit that this one owns, int64 [owned units]."""
    by_axis: dict[str, torch.Tensor] = {}
    for line in lines.values():
        if line.axis not in by_axis:
            steps = torch.zeros(line.num_units + 1, dtype=torch.int64)
            for intervals in layout.by_slot(line.axis).values():
                for lo, hi in intervals:
                    steps[lo] += 1
                    steps[hi] -= 1
            by_axis[line.axis] = steps.cumsum(0)[units_of(plan.owners, line.axis, slot)]
    return {name: by_axis[line.axis] for name, line in lines.items()}
