"""Whether copies of the same units still have the same bits: a sum per slot in the vote, and a seal to tell whose not.

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
from nep.parallel.state_hash import UnitHasher, units_of
from nep.planning.layout import Layout, Lines
from nep.planning.plan import Plan

if TYPE_CHECKING:
    from nep.fault_tolerance.runtime import SlotRun

log = logging.getLogger(__name__)

_TRIES = 2  # refusals of one step; copies that differ again after that are memory that cannot be mended


@dataclass(frozen=True)
class Hashers:
    """Of the three layouts of a plan, for one slot.

    Attributes:
        num_mirrors, num_holders: of each owned unit, as its hasher orders them.
    """

    plan: Plan
    owned: UnitHasher
    mirrored: UnitHasher
    held: UnitHasher
    num_mirrors: torch.Tensor
    num_holders: torch.Tensor

    @classmethod
    def of(cls, plan: Plan, slot: int, lines: Lines) -> Hashers:
        """Of one slot."""
        owned = UnitHasher(plan.owners, slot, lines)
        return cls(
            plan=plan,
            owned=owned,
            mirrored=UnitHasher(plan.mirrors, slot, lines),
            held=UnitHasher(plan.holders, slot, lines),
            num_mirrors=owned.join(_copies(plan, plan.mirrors, slot, lines)),
            num_holders=owned.join(_copies(plan, plan.holders, slot, lines)),
        )


@dataclass(frozen=True, kw_only=True)
class StateHashes:
    """Hashes of one slot's state: vectors in the order of the hashers.

    Attributes:
        owned, mirrored: by kind (master, moments).
        held: of the parameters it computes with; None where they were not looked at.
        rounded: of its master weights in the parameters' dtype: what holders ought to have.
    """

    owned: dict[str, torch.Tensor]
    mirrored: dict[str, torch.Tensor]
    held: torch.Tensor | None = None
    rounded: torch.Tensor | None = None


class Integrity:
    """The checks of one slot.

    Args:
        every: check in the vote of each step that is a multiple of this; 0 for never.
        action: what is done about what is found.

    Attributes:
        last: hashes that the last vote was about, or None.
        checks, seconds: how many, and the time that they and the seals took.
    """

    def __init__(self, every: int = 0, action: Action = "drain"):
        self.every, self.action = every, action
        self.last: StateHashes | None = None
        self.checks, self.seconds = 0, 0.0
        self._seal: tuple[SlotState, StateHashes] | None = None
        self._refused = (0, 0)  # step, how often
        self._given_up: Plan | None = None  # copies are known to differ under it, and to stay so
        self._hashers: Hashers | None = None

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
        state, dtype, hashers = run.state, run.recipe.dtype, self.hashers(run)
        digests = _digests(hashers.owned, state.owned)
        # Where parameters are not narrower, they are the master weights, bit by bit.
        same = all(tensor.dtype == dtype for tensor in state.owned.master.values())
        rounded = digests["master"] if same else hashers.owned.digest(state.owned.master, dtype)
        self.last = last = StateHashes(
            owned={kind: hashers.owned.key(values, kind) for kind, values in digests.items()},
            mirrored=_shard_hashes(hashers.mirrored, state.mirrored),
            held=hashers.held.hash(state.params, PARAMS),
            rounded=hashers.owned.key(rounded, PARAMS),
        )
        assert last.held is not None and last.rounded is not None
        found = int(last.held.sum()) - int((last.rounded * hashers.num_holders).sum())
        for kind, owned in last.owned.items():
            found += int((owned * hashers.num_mirrors).sum()) - int(last.mirrored[kind].sum())
        self.checks += 1
        self.seconds += time.perf_counter() - start
        return found % 2**64

    def seal_for(self, run: SlotRun, step: int) -> None:
        """Remember the state as it is, if the vote of `step` will check it and it is not sealed yet."""
        if not self.is_due(run, step) or (self._seal is not None and self._seal[0] is run.state):
            return
        start = time.perf_counter()
        hashers = self.hashers(run)
        self._seal = (
            run.state,
            StateHashes(
                owned=_shard_hashes(hashers.owned, run.state.owned),
                mirrored=_shard_hashes(hashers.mirrored, run.state.mirrored),
            ),
        )
        self.seconds += time.perf_counter() - start

    def break_seal(self) -> None:
        """The state is about to change."""
        self._seal = None

    def refuse(self, step: int) -> None:
        """The vote of a step was refused."""
        self._refused = (step, self._refused[1] + 1 if self._refused[0] == step else 1)
        if self._refused[1] == _TRIES:
            log.error("step %d was refused %d times; it is not checked again", step, _TRIES)

    def give_up(self, plan: Plan) -> None:
        """Copies differ and are to be left so: no more checks under this plan."""
        self._given_up = plan

    def kept(self, run: SlotRun, part: str, kind: str) -> torch.Tensor:
        """For each unit of the last vote: 1 as sealed, 0 not so, -1 unknown; int64, in the order of the hasher."""
        assert self.last is not None
        now: torch.Tensor = getattr(self.last, part)[kind]
        if self._seal is None or self._seal[0] is not run.state:
            return torch.full_like(now, -1)
        return (now == getattr(self._seal[1], part)[kind]).to(torch.int64)

    def hashers(self, run: SlotRun) -> Hashers:
        """Of the plan in force."""
        if self._hashers is None or self._hashers.plan is not run.state.plan:
            self._hashers = Hashers.of(run.state.plan, run.slot, run.recipe.lines)
        return self._hashers


def _digests(hasher: UnitHasher, shard: OptimizerShard) -> dict[str, torch.Tensor]:
    return {kind: hasher.digest(tensors) for kind, tensors in shard.kinds.items()}


def _shard_hashes(hasher: UnitHasher, shard: OptimizerShard) -> dict[str, torch.Tensor]:
    return {kind: hasher.key(values, kind) for kind, values in _digests(hasher, shard).items()}


def _copies(plan: Plan, layout: Layout, slot: int, lines: Lines) -> dict[str, torch.Tensor]:
    """How many slots have each unit that this one owns: axis -> int64 [owned units]."""
    found: dict[str, torch.Tensor] = {}
    for line in lines.values():
        if line.axis not in found:
            steps = torch.zeros(line.num_units + 1, dtype=torch.int64)
            for intervals in layout.by_slot(line.axis).values():
                for lo, hi in intervals:
                    steps[lo] += 1
                    steps[hi] -= 1
            found[line.axis] = steps.cumsum(0)[units_of(plan.owners, line.axis, slot)]
    return found
