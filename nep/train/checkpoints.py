"""When a trainer writes checkpoints, and what it does about them when slots are lost or told to stop."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection

from torch.distributed import DistError

from nep.checkpoint.folders import newest_in
from nep.checkpoint.manifest import BadCheckpoint, Contents
from nep.checkpoint.save import SaverConfig
from nep.checkpoint.saver import Saver
from nep.checkpoint.snapshot import Snapshot
from nep.checkpoint.subject import Subject
from nep.fault_tolerance.control_store import end_key
from nep.fault_tolerance.injection import Injector
from nep.fault_tolerance.membership import dead_members
from nep.fault_tolerance.runtime import SlotRun
from nep.train.config import TrainConfig
from nep.train.resume import settings_of, small_tensors

log = logging.getLogger(__name__)

_TAG_KEY = "checkpoint/tag"

# Exit codes of a job that does not reach its last step.
NO_CHECKPOINT = 3
STOPPED = 4


class Checkpoints:
    """Saves of one trainer; without a `checkpoint_dir` there are none.

    Regular saves are taken when a step is applied, wherever that happens (a recovery may roll forward), so that every
    survivor takes part under the plan in which the step was committed. The last one is taken when state no longer
    changes.

    Args:
        config: has the folder and how often.
        subject: of the checkpoints.
        run: this slot's.
        announce: what an injected failure says.
        validation_losses: before the first step.
    """

    def __init__(
        self,
        config: TrainConfig,
        subject: Subject,
        run: SlotRun,
        announce: Callable[[str], None],
        validation_losses: Callable[[], Collection[float]],
    ):
        self._config = config
        self._subject = subject
        self._run = run
        self._validation_losses = validation_losses
        self._saving: tuple[int, int] | None = None  # step and layout of the save begun last
        self._saver: Saver | None = None
        self._snapshot: Snapshot | None = None  # its memory is used again
        if config.checkpoint_dir is not None:
            self._board = board = run.store.clone()
            injector = Injector(config.failures, run.slot, board, announce)
            timeouts = run.recipe.timeouts
            saver_config = SaverConfig(
                root=config.checkpoint_dir,
                keep=config.checkpoint_keep,
                tag=run.store.compare_and_set(_TAG_KEY, "", secrets.token_hex(4)),
                stall_s=timeouts.agree_s,
                on_file=lambda step: injector.at("checkpoint", step),
            )
            self._saver = Saver(run.slot, board, self._dead, saver_config)
            run.on_applied = self._applied

    def _is_due(self, step: int) -> bool:
        return step % self._config.save_every == 0 and step < self._config.steps

    def _applied(self) -> None:
        """A step is in the owned and mirrored state."""
        if self._is_due(self._run.progress.tx) and not self._run.stopping:
            self._save()

    def _save(self) -> None:
        assert self._saver is not None
        run = self._run
        plan, last = run.state.plan, run.history.steps[-1]
        contents = Contents(
            step=run.progress.tx,
            subject=self._subject,
            num_updates=run.history.num_updates,
            settings=settings_of(self._config),
            plan_digest=plan.digest,
            layout=plan.number,
            slots=plan.slots,
            loss=last.loss,
            validation_losses=tuple(self._validation_losses()),
        )
        self._saving = contents.step, plan.number
        if self._saver.is_idle:
            small = small_tensors(run.history, run.routing)
            self._snapshot = Snapshot.take(run.state, run.recipe.lines, contents, small, self._snapshot)
            self._saver.save(self._snapshot)
        else:
            self._saver.refuse(contents.step, plan.number)

    def before_step(self, step: int) -> None:
        """Give the save in progress a little time if the step is to be saved, too. Waits less than others would."""
        if self._saver is not None and self._is_due(step) and not self._saver.is_idle:
            self._saver.wait(self._run.recipe.timeouts.wait_s / 4, self._is_broken)

    def _is_broken(self) -> bool:
        return self._run.current.waiter.fault is not None

    def finish(self) -> None:
        """Save the last committed step, which no other will follow. All members call it; ends early at a fault."""
        if self._saver is None or self._run.progress.tx == 0:
            return
        wanted = self._run.progress.tx, self._run.state.plan.number
        if self._saving is not None and self._saving[0] == wanted[0] and self._saving != wanted:
            # Not all survivors may have begun it before the plan changed.
            self._saver.cancel("the members have changed")
        if self._saver.wait(stop=self._is_broken) and self._saving != wanted and self._saver.last_step != wanted[0]:
            self._save()
            self._saver.wait(stop=self._is_broken)
        if not self._saver.is_idle and not self._is_broken():
            # The others would wait for this slot's part for longer than it may wait for them in what comes next.
            self._saver.withdraw(*wanted, self._run.store)

    def _dead(self, slots: Collection[int]) -> set[int]:
        return dead_members(self._board, tuple(slots), self._run.incarnations)

    def leave(self) -> None:
        """This slot is drained: what it has begun to write is needed by the others."""
        if self._saver is not None:
            self._saver.wait(self._run.recipe.timeouts.agree_s)

    def lose(self, slots: Collection[int]) -> None:
        """Others went on without these slots."""
        if self._saver is not None:
            self._saver.lose(slots)

    def end(self, why: str) -> tuple[str, int]:
        """The job ends before its last step: what there is to say, and its exit code."""
        step = self._newest_step()
        if step is None:
            line, code = f"{why}; there is no checkpoint", NO_CHECKPOINT
        else:
            folder = self._config.checkpoint_dir
            line, code = f"{why}; the same command goes on from step {step}, in {folder}", STOPPED
        try:
            return line, int(self._run.store.compare_and_set(end_key(), "", str(code)))
        except DistError:
            return line, code

    def _newest_step(self) -> int | None:
        """The step that the same command would go on from, once what is being written is done."""
        if self._saver is None:
            return None
        self._saver.wait()
        try:
            newest = newest_in(self._saver.config.root)
        except BadCheckpoint as error:
            log.warning("%s", error)
            return None
        return None if newest is None else newest[1].contents.step

    def messages(self) -> list[str]:
        """Lines for people since the last call."""
        return [] if self._saver is None else self._saver.messages()
