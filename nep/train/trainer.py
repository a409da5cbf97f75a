"""The training loop of one slot: steps as transactions, recovery when a generation breaks, and the end."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

import torch
from torch import nn

from nep.checkpoint.subject import Subject
from nep.distributed.collectives import sum_exact
from nep.distributed.timeouts import Timeouts
from nep.distributed.waiting import Fault
from nep.fault_tolerance import transaction
from nep.fault_tolerance.arrival import wait_for_everybody
from nep.fault_tolerance.bulletin import StepBoard, follow_requests
from nep.fault_tolerance.commit import commit_step
from nep.fault_tolerance.control_store import FIRST_GENERATION, ControlStore, decision_key
from nep.fault_tolerance.ending import finish_together
from nep.fault_tolerance.injection import last_fired
from nep.fault_tolerance.job import Job
from nep.fault_tolerance.joining import NobodyLeft, first_decision, join_job
from nep.fault_tolerance.membership import Drained, JobEnded, LeftOut
from nep.fault_tolerance.records import NO_LAYOUT, Decision, Progress
from nep.fault_tolerance.recovery import CheckpointNeeded, enter_decided, enter_generation, recover
from nep.fault_tolerance.runtime import SlotRun
from nep.fault_tolerance.timeline import Recovery
from nep.parallel.grad_sync import Reduction
from nep.parallel.overlap import Overlap
from nep.parallel.parallelize import parallelize
from nep.parallel.state import SlotState
from nep.planning.layout import Lines
from nep.planning.plan import Plan
from nep.train.adjustments import Adjustment
from nep.train.agreement import agreed_settings
from nep.train.alerts import Alerts
from nep.train.boundary import Boundary
from nep.train.checkpoints import STOPPED, Checkpoints
from nep.train.config import TrainConfig
from nep.train.data import SampleSource
from nep.train.founding import founding_decision
from nep.train.hooks import Hooks
from nep.train.initialization import initial_units
from nep.train.log import follow_generation
from nep.train.make_run import cluster_of, make_run
from nep.train.preemption import Preemption
from nep.train.protection import Protection
from nep.train.resume import find_start, require_same_settings, subject_of
from nep.train.signals import StopSignals
from nep.train.state_guard import StateGuard
from nep.train.step import forward_backward, prepare_model
from nep.train.story import Story
from nep.train.validation import validation_loss

log = logging.getLogger(__name__)


class Trainer:
    """Trains one model on one slot of a job, together with the trainers of the other slots.

    Args:
        model: makes the single-device model on the meta device; called anew for every plan.
        data: the samples; the same on every slot.
        config: the same on every slot, checked before (`TrainConfig.check`).
        hooks: see `Hooks`.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        data: SampleSource,
        config: TrainConfig,
        hooks: Hooks | None = None,
    ):
        self._make_model = model
        self.data = data
        self.config = config
        self.hooks = hooks or Hooks()
        self._recovery: Recovery | None = None  # one that has not led to a committed step yet
        self.recoveries: list[Recovery] = []
        self.full_size_s: list[float] = []  # from a loss until all slots of the job trained again
        self.protection = Protection()
        self._short_since: float | None = None  # when the first slot was lost of those that are missing
        self._board: StepBoard
        self.generations: list[tuple[int, int, tuple[int, ...], str]] = []  # number, step, slots, reason
        self.plans: list[Plan] = []
        self.validation_losses: list[float] = []  # before the first step, after the last
        self.model: nn.Module
        self._overlap: Overlap
        self._boundary = Boundary(self, self._install, self._announce)
        self.balance = self._boundary.balance
        self._guard = StateGuard(self)
        self.run_state: SlotRun
        self.resumed_step = 0  # of the checkpoint that this run began with
        self._signals = StopSignals()
        self._subject: Subject
        self._checkpoints: Checkpoints
        self._alerts = Alerts(config.on_alert)
        self.preemption: Preemption | None = None

    # What hooks may read.

    @property
    def slot(self) -> int:
        return self.run_state.slot

    @property
    def step(self) -> int:
        """The last committed step."""
        return self.run_state.progress.tx

    @property
    def plan(self) -> Plan:
        return self.run_state.state.plan

    @property
    def members(self) -> tuple[int, ...]:
        return self.run_state.current.members

    @property
    def reports(self) -> bool:
        """Whether this slot speaks for the job: the lowest live one does."""
        return self.slot == self.plan.slots[0]

    # The life of a trainer.

    def run(self, job: Job) -> int:
        """Train to the last step and return the exit code.

        Returns:
            0: done; 3: a checkpoint is needed and none exists; 4: stopped, and the same command goes on from a
            checkpoint.

        Raises:
            CannotResume: the checkpoints of the config's folder are of something else, or cannot be loaded.
        """
        torch.set_num_threads(1 if job.slots_per_node > 1 else torch.get_num_threads())
        store = job.connect()
        in_reserve = job.slot >= job.num_slots - self.config.spares
        first = self._found(job, store) if job.incarnation == 1 and not in_reserve else None
        try:
            with self._signals.caught(stop=self.config.checkpoint_dir is not None):
                self._live(first or self._come_back(job, store))
            if not self.was_stopped:
                return 0
            return self._end_early(f"stopped after step {self.step}", self._remind)
        except CheckpointNeeded as lost:
            return self._end_early(str(lost), self._announce)
        except JobEnded as over:
            log.info("%s", over)
            return over.exit_code
        except Drained as left:
            self._checkpoints.leave()
            self._announce(str(left))
            return 0
        except (LeftOut, NobodyLeft) as left:
            self._announce(str(left))
            return 1
        finally:
            self.balance.power.finish()
            self._alerts.finish()
            if self.preemption is not None:
                self.preemption.finish()

    def _end_early(self, why: str, say: Callable[[str], None]) -> int:
        line, code = self._checkpoints.end(why)
        self._pass_messages()
        say(line)
        self._alerts.stopped(self.run_state, line, code)
        return code

    def _live(self, decision: Decision) -> None:
        """Go through generations until the last step is committed and everybody knows.

        Args:
            decision: the first that names this trainer.
        """
        run = self.run_state
        number, members = decision.generation, decision.members
        fault: Fault | None = None
        while True:
            try:
                if fault is None and number == FIRST_GENERATION:
                    run.generation = enter_generation(run, number, members, self.plan)
                    self._begin("start")
                elif fault is None:
                    self._recovery = Recovery()
                    enter_decided(run, decision, self._recovery)
                    self._begin(decision.reason)
                else:
                    self._recovery = self._recovery or Recovery()  # before: who comes back is told of it
                    recover(run, fault, number, members, self._recovery)
                    self._checkpoints.lose(self._recovery.failed_slots)
                    self._begin(self._recovery.take_news())
                    run.parking.reap()  # before its sockets cost time, see `Fault.without_frames`
                number, members = run.current.number, run.current.members
                self._train()
                finish_together(run, STOPPED if self.was_stopped else 0)
                return
            except Fault as broken:
                fault = broken.without_frames()

    def _found(self, job: Job, store: ControlStore) -> Decision:
        """Generation 1: the plan that one slot wrote and all read, and the state before the first step."""
        self._subject, start = find_start(store, job, self.config, self.data, self._make_model())
        step = 0 if start is None else start.step
        lines = self._make_model().parameter_lines()  # type: ignore[operator]
        cluster = cluster_of(job, self.config.spares)
        everybody = cluster.healthy
        decision = founding_decision(self.config.first_plan(cluster, lines), everybody, step)
        written = Decision.from_json(store.compare_and_set(decision_key(1), "", decision.to_json()))
        assert written.plan is not None
        plan = Plan.from_json(written.plan)
        if start is not None:
            state = start.state(plan, job.slot, lines, self.config.torch_dtype, self.config.device_of(job.local_index))
        else:
            state = SlotState.initial(
                plan,
                job.slot,
                lines,
                self.config.torch_dtype,
                lambda name, lo, hi: initial_units(self.config.seed, name, lines[name], lo, hi),
                self.config.optimizer.moments,
                self.config.device_of(job.local_index),
            )
        progress = Progress(slot=job.slot, layout=plan.number, layout_digest=plan.digest)
        self._prepare(job, store, lines, state, progress)
        if start is not None:
            start.restore(self.run_state)
            self.resumed_step, self.validation_losses = start.step, start.validation_losses
            if job.slot == 0:
                print("\n".join(start.text(self.config)), flush=True)
        wait_for_everybody(store, job.slot, len(everybody), self.run_state.recipe.timeouts.start_s, self._remind)
        return written

    def _come_back(self, job: Job, store: ControlStore) -> Decision:
        """A later trainer of this slot: the decision that makes it a member; it has nothing before."""
        config, model = self.config, self._make_model()
        lines = model.parameter_lines()  # type: ignore[operator]
        self._subject = subject_of(config, self.data, model, lines)
        require_same_settings(store, job.slot, agreed_settings(config, getattr(model, "shape", None), self.data))
        first = first_decision(store, Timeouts(base_s=config.timeout_base_s).start_s)
        assert first.plan is not None
        moments, device = config.optimizer.moments, config.device_of(job.local_index)
        state = SlotState.nothing(Plan.from_json(first.plan), job.slot, lines, config.torch_dtype, moments, device)
        self._prepare(job, store, lines, state, Progress(slot=job.slot, layout=NO_LAYOUT, layout_digest=""))
        run = self.run_state
        log.info("trainer %d of this slot is ready and waits to be a member", job.incarnation)
        decision = join_job(store, job.slot, job.incarnation, run.requests, first, run.wanted_members)
        # All that are in effect: with fewer in its votes, the others would fall back to what was asked before.
        run.requests.read(store)
        assert decision.origin is not None
        origin = Plan.from_json(decision.origin)
        run.state = SlotState.nothing(origin, job.slot, lines, config.torch_dtype, moments, device)
        run.progress = transaction.join(job.slot, decision)
        return decision

    def _tell(self) -> bytes:
        """For trainers that come back."""
        return Story(
            history=self.run_state.history,
            generations=self.generations,
            recoveries=self.recoveries,
            recovery=self._recovery,
            validation_losses=self.validation_losses,
            full_size_s=self.full_size_s,
            short_since=self._short_since,
            protection=self.protection,
            resumed_step=self.resumed_step,
            stopping=self.run_state.stopping,
            first_plan=self.plans[0].canonical_json() if self.plans else "",
            adjustments=[one.to_json() for one in self.balance.adjustments],
            condition=self._alerts.condition,
        ).to_bytes()

    def _take(self, told: bytes) -> None:
        story = Story.from_bytes(told)
        self.run_state.history = story.history
        self.generations, self.recoveries = story.generations, story.recoveries
        self.validation_losses, self.full_size_s = story.validation_losses, story.full_size_s
        self._short_since, self.resumed_step = story.short_since, story.resumed_step
        self.protection, self._alerts.condition = story.protection, story.condition
        self.run_state.stopping = story.stopping
        self.balance.adjustments = [Adjustment.from_json(one) for one in story.adjustments]
        self.plans = [Plan.from_json(story.first_plan)] if story.first_plan else []
        if story.recovery is not None and self._recovery is not None:
            for item in dataclasses.fields(Recovery):
                setattr(self._recovery, item.name, getattr(story.recovery, item.name))

    def _prepare(self, job: Job, store: ControlStore, lines: Lines, state: SlotState, progress: Progress) -> None:
        """Everything that stays over generations. Nothing travels."""
        config = self.config
        self.run_state = run = make_run(config, job, store, lines, state, progress, self._announce)
        run.story = (self._tell, self._take)
        can_stop, health = config.checkpoint_dir is not None, config.health_watch(job)
        self.preemption = notice = Preemption(self._signals, health, run, can_stop, self._announce)
        run.stop_requested = lambda: self._signals.received is not None or notice.ends_job()
        self._checkpoints = Checkpoints(config, self._subject, run, self._announce, lambda: self.validation_losses[:1])
        self._board = StepBoard(run.connections)
        if job.num_slots > 1:
            follow_requests(run.connections, run.requests)

    def _announce(self, line: str) -> None:
        log.warning("%s", line)
        print(f"slot {self.run_state.slot}: {line}", flush=True)

    def _remind(self, line: str) -> None:
        """Once for the job, and in every slot's log."""
        log.warning("%s", line)
        if self.reports:
            print(line, flush=True)

    def _begin(self, reason: str) -> None:
        """A new generation stands: build the model for its plan."""
        generation = self.run_state.current
        follow_generation(generation.number, self.plan.replica_of(self.slot), self.slot)
        log.info("members %s: %s", generation.members, reason)
        self.generations.append((generation.number, self.step, generation.members, reason))
        self._install()

    def _install(self) -> None:
        """Make the model that obeys the current plan."""
        run = self.run_state
        self.model = parallelize(
            self._make_model(),
            state=run.state,
            sync=run.sync,
            groups=run.current.groups,
            waiter=run.current.waiter,
            probe=lambda phase: run.probe(phase, self.step + 1),
        )
        prepare_model(self.model, self.config, run.routing, self._sum_over_job)
        self._overlap = Overlap(self.model, run.sync.grads)
        lost_at_s = self._recovery.started_at if self._recovery is not None else None
        line = self.protection.observe(self.plan, run.recipe.lines, step=self.step, lost_at_s=lost_at_s)
        if line is not None:
            self._remind(line)
        self.plans.append(self.plan)
        self._alerts.look(run, self.generations[-1][3])
        self.hooks.on_plan(self, self.plan)

    def _sum_over_job(self, counts: torch.Tensor) -> torch.Tensor:
        """Integers of a forward added over all members, who all call it at the same point."""
        current = self.run_state.current
        return sum_exact(current.groups.vote, counts, current.waiter, "the expert counts of a layer")

    # Steps.

    def _train(self) -> None:
        """From the last committed step to the end. What is done here follows from committed state alone, so
        all slots do the same, whenever they were interrupted."""
        run, config = self.run_state, self.config
        if self.step == 0:
            self.validation_losses = [validation_loss(run, self.model, self.data, config)]
        while self.step < config.steps and not run.stopping:
            step = self.step + 1
            self._guard.before_step(step)
            self._checkpoints.before_step(step)
            generation, probe = run.current, run.probe_at(step)
            reduction = Reduction(run.sync, generation.groups.transfer, generation.waiter, probe, self._overlap.collect)
            sums = forward_backward(
                self.model,
                self._overlap,
                run.sync,
                reduction,
                self.data,
                first_sample=self.step * config.global_batch_size,
                micro_batch_size=config.sequences_per_round(self.plan),
                probe=probe,
            )
            if not commit_step(run, step, sums, reduction):
                continue  # some state was wrong: it has been mended, and the step is run again
            del reduction  # it holds the state under the plan of now, which may change below
            self._overlap.returning = run.returning
            self._resumed()
            self._tell_step()
            self.hooks.on_commit(self, run.history.steps[-1])
            self._pass_messages()
            self._boundary.cross()
            run.parking.reap()
        self._resumed()
        if not self.was_stopped:
            self.validation_losses = [*self.validation_losses[:1], validation_loss(run, self.model, self.data, config)]
        self._checkpoints.finish()
        self._pass_messages()
        if not self.was_stopped:
            self.hooks.on_end(self)

    @property
    def was_stopped(self) -> bool:
        """Whether the job ends before its last step, since somebody wanted it to."""
        return self.run_state.stopping and self.step < self.config.steps

    def _pass_messages(self) -> None:
        for line in self._checkpoints.messages():
            self.hooks.on_message(self, line)

    def _tell_step(self) -> None:
        """For `nep status`."""
        if self.reports:
            last = self.run_state.history.steps[-1]
            unprotected = self.protection.since_step
            self._board.tell(
                step=last.step, steps=self.config.steps, loss=last.loss, time=time.time(), unprotected=unprotected
            )

    def _resumed(self) -> None:
        """The first step after a recovery is committed (or there is none left to do)."""
        if self._recovery is not None:
            recovery, self._recovery = self._recovery, None
            recovery.resumed_at = time.time()
            # An injected failure is known to the moment; a supervisor's report comes a few milliseconds later.
            injected = last_fired(self.config.failures, self.run_state.store)
            for slot in set(recovery.failed_slots) & injected.keys():
                if recovery.failed_at is not None:
                    recovery.failed_at = min(recovery.failed_at, injected[slot])
            if not recovery.planned:
                self.recoveries.append(recovery)
            if recovery.failed_slots and self._short_since is None:
                self._short_since = recovery.started_at
            if self._short_since is not None and len(self.members) == self.run_state.wanted_members:
                self.full_size_s.append(recovery.resumed_at - self._short_since)
                self._short_since = None
            self.hooks.on_recovery(self, recovery)
