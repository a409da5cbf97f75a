"""The job that is measured: a real nep job that changes between plans and hands its turn to the peer.

A cycle has one block of steps of each kind; the order is the same in every cycle, and each kind is compared with the
peer's block of the same cycle, so that a machine that is slow for a while is slow for both.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from nep.distributed.collectives import all_gather_bytes
from nep.fault_tolerance.commit import settle
from nep.fault_tolerance.history import Committed
from nep.fault_tolerance.vote import RECORD_BYTES
from nep.planning.plan import Plan
from nep.testing.overhead.plain import PlainJob
from nep.train.trainer import Hooks, Trainer

PEER = "plain"
_VOTES = 50


@dataclass(kw_only=True)
class Turns:
    """Blocks of steps by turns, on one slot.

    Attributes:
        plans: kind -> plan of ours; the job begins with the first.
        peer: makes the peer, once the ranks are connected.
        rendezvous: a file through which the peer's ranks meet, not there yet.
        cycles: how often each kind has its turn; one more comes first and is not counted.
        steps: of a block.
        out: where the first slot writes seconds per step by kind and cycle, those of a vote, and by how much the
            losses of both differ at most (relative), since both train the same.
    """

    plans: Mapping[str, Plan]
    peer: Callable[[], PlainJob]
    rendezvous: Path
    cycles: int
    steps: int
    out: Path
    seconds: dict[str, list[float]] = field(default_factory=dict)
    _losses: list[float] = field(default_factory=list)
    _done: int = 0
    _block: int = 0
    _start: float = 0.0
    _job: PlainJob | None = None

    @property
    def total_steps(self) -> int:
        """Steps of ours in all."""
        return (self.cycles + 1) * len(self.plans) * self.steps

    def hooks(self) -> Hooks:
        """To give to the trainer."""
        return Hooks(on_plan=self._on_plan, on_commit=self._on_commit, next_plan=self._next_plan, on_end=self._on_end)

    def _on_plan(self, trainer: Trainer, plan: Plan) -> None:
        if self._job is None:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{self.rendezvous}",
                rank=trainer.members.index(trainer.slot),
                world_size=len(trainer.members),
            )
            self._job = self.peer()
        self._wind()

    def _on_commit(self, trainer: Trainer, committed: Committed) -> None:
        self._done += 1
        if self._done % self.steps:
            return
        settle(trainer.run_state)  # parameters that return are part of the step
        self._note(list(self.plans)[self._block % len(self.plans)])
        self._block += 1
        if self._block % len(self.plans) == 0:
            self._wind()
            assert self._job is not None
            for _ in range(self.steps):
                self._losses.append(self._job.step())
            self._note(PEER)
            if trainer.reports:
                print(f"cycle {self._block // len(self.plans)} of {self.cycles + 1}", file=sys.stderr, flush=True)
        self._wind()

    def _next_plan(self, trainer: Trainer) -> Plan | None:
        return list(self.plans.values())[self._block % len(self.plans)]

    def _wind(self) -> None:
        dist.barrier()
        self._start = time.perf_counter()

    def _note(self, kind: str) -> None:
        dist.barrier()
        seconds = (time.perf_counter() - self._start) / self.steps
        self.seconds.setdefault(kind, []).append(seconds)

    def _on_end(self, trainer: Trainer) -> None:
        run = trainer.run_state
        votes = []
        for _ in range(_VOTES):
            start = time.perf_counter()
            all_gather_bytes(run.current.groups.vote, bytes(RECORD_BYTES), run.current.waiter, "a vote that is timed")
            votes.append(time.perf_counter() - start)
        if trainer.reports:
            first_left = {kind: seconds[1:] for kind, seconds in self.seconds.items()}
            ours = [entry.loss for entry in run.history.steps]
            difference = max(abs(loss - own) / abs(loss) for loss, own in zip(self._losses, ours, strict=False))
            result = {"seconds": first_left, "vote_s": sorted(votes)[_VOTES // 2], "loss_difference": difference}
            self.out.write_text(json.dumps(result))
