"""Keeps a running job balanced: measures, proposes plans, and walks to them between steps.

Every slot keeps the same books from committed state. The slot that speaks for the job asks the planner now and then and
proposes what pays (`nep.fault_tolerance.proposals`); all slots turn to it at the same boundary, in stages if it is
large. A new generation drops whatever was under way: the plan in force is complete at any time.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nep.fault_tolerance.control_store import FIRST_GENERATION
from nep.fault_tolerance.proposals import Proposal, newest, read_plan
from nep.fault_tolerance.vote import unpack_records
from nep.planning.cost.work import WorkOfSlots
from nep.planning.cost.workload import Workload
from nep.planning.pace import PaceMeter
from nep.planning.plan import Plan
from nep.planning.router_statistics import RouterStatistics
from nep.planning.stages import next_stage, reached
from nep.train.adjustments import Adjustment, Kind, StepSeconds
from nep.train.power_lever import PowerLever, advice
from nep.train.proposals import Proposals, Situation
from nep.train.thinking import Ask, Thinker, Thought

if TYPE_CHECKING:
    from nep.train.trainer import Trainer

log = logging.getLogger(__name__)

_EQUALLY_FAST = 0.05
"""Slots that differ by less count as equally fast."""

_SPEED_GRAIN = 10_000
"""Speeds are rounded to so many parts per million: what is measured is no more exact."""

_NEWS = 0.08
"""Logarithm by which a speed must differ from the plan's to be thought about."""

_MOMENT_S = 0.2
"""What the store may take to hear of a plan before the next step, with which the plan then is usually in effect."""

_FIRST_STEPS = 2
"""Steps of a generation before a plan is proposed: loads and speeds must have been seen."""


class Balance:
    """The balance of one trainer's job.

    Args:
        trainer: whose.
        announce: says a line to people, from the slot that speaks for the job.

    Attributes:
        power: watts as one of its levers.
    """

    def __init__(self, trainer: Trainer, announce: Callable[[str], None]) -> None:
        self._trainer, self._announce = trainer, announce
        self._config = trainer.config.balance
        self.statistics = RouterStatistics(self._config.half_life_steps)
        self.adjustments: list[Adjustment] = []
        self.imbalance: dict[int, float] = {}  # step -> see `WorkOfSlots.imbalance`
        self.goal: Plan | None = None
        self.power = PowerLever(trainer, announce)
        self._thinker = Thinker()
        self.meter = PaceMeter(self._config.pace)
        self._seconds: dict[int, float] = {}
        self._work: tuple[int, WorkOfSlots] | None = None
        self._generation = 0
        self._first_step = 0
        self._handled = 0  # number of the last request that was looked at
        self.proposal: Proposal | None = None  # this slot's last one of the generation
        self._unmeasured: Adjustment | None = None  # done, and nothing else has changed the plan since
        self._asked_from = -1  # number of the plan in force when the last stage was asked for
        self._changed_at = 0  # the step after which the plan last changed
        self._news = False
        self._due = False
        self._thought: dict[int, int] = {}  # speeds that nothing could be done about
        self._walls = StepSeconds(self._config.measured_steps)
        self._began: float | None = None
        self._moving: float | None = None

    # At a boundary, in this order; all slots alike.

    def observe(self) -> None:
        """A step is committed: measure."""
        trainer, run = self._trainer, self._trainer.run_state
        now = time.perf_counter()
        if run.current.number != self._generation:
            self._begin(run.current.number)
        self.power.poll()
        if self._began is not None:
            self._walls.add(now - self._began)
        self._began = None
        if run.routing is None or run.progress.result is None or run.history.steps[-1].skipped:
            return
        counts = run.routing.counts_le.cpu().numpy()
        self.statistics.update(counts)
        work = self._work_under(trainer.plan)
        self.imbalance[trainer.step] = work.imbalance(counts)
        seconds = {record.slot: record.seconds for record in unpack_records(run.progress.result)}
        if set(seconds) != set(trainer.plan.slots):
            return
        self._seconds = {
            slot: value if slot not in self._seconds else 0.7 * self._seconds[slot] + 0.3 * value
            for slot, value in seconds.items()
        }
        if not (self._config.acts or trainer.reports):
            return  # nothing will come of it, and one slot that measures is enough
        for change in self.meter.observe(seconds, work.of(counts)):
            self._news = True
            self._say(f"pace after step {trainer.step}: {change}")
        self._measure()

    def next_plan(self) -> Plan | None:
        """The plan to change to at this boundary, or None."""
        trainer, run = self._trainer, self._trainer.run_state
        plan = trainer.plan
        effective = run.history.request
        fresh = run.requests.known[self._handled : effective]
        self._handled = max(self._handled, effective)
        if self.goal is not None and self._asked_from == plan.number:
            self.forget()  # it was refused
        proposal = newest(fresh, plan.number)
        if proposal is not None and self.goal is None and not run.stopping and trainer.step < trainer.config.steps:
            self.goal = read_plan(run, proposal)
            self._start(Adjustment.from_json(json.loads(proposal.why)))
        if self.goal is None:
            return None
        stage = next_stage(
            plan,
            self.goal,
            run.recipe.lines,
            most_bytes=self._config.bytes_per_boundary,
            parameter_bytes=run.recipe.dtype.itemsize,
        )
        self._asked_from, self._moving = plan.number, time.perf_counter()
        return stage

    def forget(self) -> None:
        """Somebody else has changed the plan, or it cannot be reached."""
        self.goal, self._moving = None, None

    def crossed(self) -> None:
        """The boundary is crossed: the next step begins, after this slot has thought if it is its turn."""
        trainer = self._trainer
        if self._moving is not None and trainer.plan.number == self._asked_from:
            self._moving = None  # it was refused, and will be forgotten
        elif self._moving is not None:
            current = self.adjustments[-1]
            current.boundaries += 1
            current.move_s += time.perf_counter() - self._moving
            self._moving, self._changed_at, self._work = None, trainer.step, None
            self.meter.restart()
            self._walls.clear()
            if self.goal is not None and reached(trainer.plan, self.goal):
                self.goal, current.done_step, self._unmeasured = None, trainer.step, current
                self.power.adopt(current)
        elif self._work is not None and self._work[0] != trainer.plan.number:
            self._unmeasured = None
            self.meter.restart()
            self._walls.clear()
        if trainer.reports:
            self._think()
        self._began = time.perf_counter()

    # Books.

    def _begin(self, generation: int) -> None:
        """A new generation: nothing is under way in it."""
        run = self._trainer.run_state
        self._generation, self._handled = generation, run.history.request
        self.proposal = self._unmeasured = None
        self._first_step, self._changed_at, self._thought = self._trainer.step, self._trainer.step, {}
        self.forget()
        self._seconds, self._work, self._began = {}, None, None
        self.meter = PaceMeter(self._config.pace)
        self._walls.clear()
        self._due = generation > FIRST_GENERATION and self._config.rebalance_every > 0
        self.power.begin()

    def _start(self, adjustment: Adjustment) -> None:
        adjustment.step, adjustment.before_s = self._trainer.step, self._walls.median()
        self.adjustments.append(adjustment)
        self._news, self._unmeasured = False, None
        self._say(adjustment.announcement)

    def _measure(self) -> None:
        """What came of the last change, once there are enough steps after it."""
        last = self._unmeasured
        if last is None or not self._walls.is_full:
            return
        last.after_s, self._unmeasured = self._walls.median(), None
        self._say(last.result)

    def _say(self, line: str) -> None:
        """Once to people, and in every slot's log."""
        if self._trainer.reports:
            self._announce(line)
        else:
            log.info("%s", line)

    def _work_under(self, plan: Plan) -> WorkOfSlots:
        if self._work is None or self._work[0] != plan.number:
            config = self._trainer.config
            work = WorkOfSlots(
                plan,
                self._trainer.run_state.recipe.lines,
                tokens_per_sequence=config.seq_len,
                micro_batch_size=config.sequences_per_round(plan),
            )
            self._work = plan.number, work
        return self._work[1]

    # Thinking, on the slot that speaks for the job.

    def _think(self) -> None:
        """Ask the planner if there is a reason to, and propose what pays. If it takes long, steps go on meanwhile."""
        trainer, config = self._trainer, self._config
        step, run = trainer.step, trainer.run_state
        if self._thinker.is_busy:
            self._use(self._thinker.take())
            return
        if not config.acts or len(trainer.members) < 2 or run.stopping or step >= trainer.config.steps - 1:
            return
        every = config.rebalance_every
        due = bool(every) and (step % every == 0 or self._due)
        under_way = self.proposal is not None and self.proposal.is_open(run.history.request)
        if self.goal is not None or under_way or self.statistics.num_steps == 0:
            return
        if step - self._first_step < _FIRST_STEPS:
            return
        rests = step - self._changed_at < config.cooldown_steps and self._changed_at > self._first_step
        questions = [] if rests else self._questions(due)
        if questions:
            self._news = False
            self._thinker.begin(Thought(base=(self._generation, trainer.plan.number), step=step, questions=questions))
            # A short thought is used at once; a long one must not make the others wait until they give this slot up.
            self._use(self._thinker.take(min(config.patience_s, trainer.config.timeout_base_s / 3)))

    def _questions(self, due: bool) -> list[tuple[Kind, Ask]]:
        """What is to be asked now.

        Args:
            due: it is time to look at the router's loads.
        """
        questions: list[tuple[Kind, Ask]] = []
        speeds, flagged = self._speeds(), self.meter.flagged
        watts = self.power.wants_thought(flagged) and set(speeds) == set(self._trainer.plan.slots)
        try:
            if self._config.compensate == "auto" and (watts or self._is_news(speeds)):
                self._thought = speeds
                if watts:
                    self.power.thought(flagged)
                questions.append(("compensation", self._ask_compensation(speeds, watts)))
            if due:
                log.info("router over the last steps: %s", self.statistics.imbalance())
                known = dict(zip(self._trainer.plan.slots, self._trainer.plan.speeds_ppm, strict=True))
                proposals, situation = self._proposals(), self._situation(known)
                questions.append(("rebalance", lambda: (*proposals.rebalance(situation), ())))
        except ValueError as error:
            self._due = False
            self._announce(f"balance after step {self._trainer.step}: skip: {error}")
        return questions

    def _ask_compensation(self, speeds: Mapping[int, int], watts: bool) -> Ask:
        """How to ask what to do about speeds; all that the thread needs is taken now.

        Args:
            speeds: as measured.
            watts: whether power may be a lever this time.
        """
        plan, situation, proposals = self._trainer.plan, self._situation(speeds), self._proposals()
        if not self.power.is_on:
            return lambda: (*proposals.compensation(situation), ())
        look, advises = self.power.asker(situation.cluster, plan), self.power.only_advises

        def ask() -> tuple[Plan | None, Adjustment, Sequence[str]]:
            try:
                offer = look()
            except (ValueError, RuntimeError) as error:
                lines = [f"power after step {situation.step}: {error}"] if watts else []
                return *proposals.compensation(situation), lines
            at_first = offer.speeds_at_first(speeds)
            now = replace(situation, cluster=situation.cluster.with_speeds(at_first))
            if not watts or advises:
                lines = advice(offer, plan, at_first, situation.step) if watts else ()
                return *proposals.compensation(now), lines
            return *proposals.with_power(offer).compensation(now), ()

        return ask

    def _use(self, thought: Thought | None) -> None:
        """Say and propose what was found, if it is still of use. A store that is away costs no step."""
        trainer, run = self._trainer, self._trainer.run_state
        if thought is None:
            return
        if (
            thought.base != (self._generation, trainer.plan.number)
            or run.stopping
            or trainer.step >= trainer.config.steps - 1
        ):
            log.info("planned in %.3f s for plan %d, which is not in force any more", thought.spent_s, thought.base[1])
            self._thought = {}
            self.power.missed()
            return
        for answer in thought.answers:
            self._due = self._due and answer.kind != "rebalance"
            for line in answer.lines:
                self._announce(line)
            if answer.adjustment is None:
                self._announce(f"{answer.kind} after step {thought.step}: skip: {answer.problem}")
            elif answer.plan is None:
                self._announce(answer.adjustment.announcement)
            else:
                self._propose(answer.plan, answer.adjustment, thought.spent_s)

    def _propose(self, plan: Plan, adjustment: Adjustment, spent_s: float) -> None:
        self.proposal = Proposal(self._trainer.run_state, plan, adjustment.why_json())
        self.proposal.wait(_MOMENT_S)
        log.info("planned in %.3f s: %s", spent_s, adjustment.why)

    def _speeds(self) -> dict[int, int]:
        """Speeds as a plan should know them."""
        measured = self.meter.speeds_ppm(least_change=_EQUALLY_FAST)
        return {slot: max(_SPEED_GRAIN, round(speed / _SPEED_GRAIN) * _SPEED_GRAIN) for slot, speed in measured.items()}

    def _is_news(self, speeds: Mapping[int, int]) -> bool:
        """Whether speeds differ from what the plan goes by, and from what was thought about in vain."""
        plan = self._trainer.plan
        if set(speeds) != set(plan.slots):
            return False
        planned = dict(zip(plan.slots, plan.speeds_ppm, strict=True))
        if not self._news and not self.meter.is_settled:
            return False  # an average on its way to something
        least = _NEWS if self._news else max(_NEWS, 3 * self.meter.noise)

        def differs(others: Mapping[int, int]) -> bool:
            return any(abs(math.log(speeds[slot] / others.get(slot, 1_000_000))) > least for slot in speeds)

        return differs(planned) and (not self._thought or differs(self._thought) or self._news)

    def _situation(self, speeds: Mapping[int, int]) -> Situation:
        trainer = self._trainer
        return Situation(
            step=trainer.step,
            steps_left=trainer.config.steps - trainer.step,
            plan=trainer.plan,
            cluster=trainer.run_state.cluster.with_speeds(speeds),
            loads=self.statistics.loads(),
            seconds=self._seconds,
            prices=self.meter.prices,
        )

    def _proposals(self) -> Proposals:
        trainer, config = self._trainer, self._trainer.config
        shape = getattr(trainer.model, "shape", None)
        if shape is None:
            raise ValueError("model has no shape, which predictions need; give it one, or leave balance alone")
        workload = Workload(
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.sequences_per_round(trainer.plan),
            seq_len=config.seq_len,
            parameter_bytes=config.torch_dtype.itemsize,
            recompute=config.recompute,
            grad_sync="point_to_point",
            overlap=True,
        )
        return Proposals(config.balance, shape, trainer.run_state.recipe.lines, workload)
