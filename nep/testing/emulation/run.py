"""Runs training steps of a plan on emulated accelerators: threads are ranks, everything else is what training runs.

The model is cut by `parallelize`, rows go through the dispatcher, gradients through the overlapped sums, votes through
the transaction, parameters come back beside the next forward. What takes time is the time line of
`nep.testing.emulation.accelerator`.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nep.fault_tolerance.runtime import SlotRun
from nep.fault_tolerance.vote import unpack_records
from nep.planning.cluster import Cluster
from nep.planning.plan import Plan
from nep.planning.planner import plan_after_failure, plan_mirrors
from nep.planning.shapes import parameter_lines
from nep.testing.emulation.accelerator import Accounts, Speed, WallClock
from nep.testing.emulation.links import Board
from nep.testing.emulation.scaling import Scale
from nep.testing.emulation.setting import LABEL, Emulation, SlotFailure, SpeedChange, num_cpus
from nep.testing.emulation.slot import EmulatedSlot, Marker, Stretch
from nep.testing.threads import ThreadSlot, run_slots

MOST_CPU_SHARE = 0.5
_DEADLINE_S = 120.0

Replan = Callable[[Plan, Cluster], Plan]
"""(plan in force, cluster with the failure) -> plan for the survivors, with the next number."""


@dataclass(frozen=True, kw_only=True)
class EmulatedVote:
    """What all slots know of a committed step.

    Attributes:
        step: its number.
        plan: that it ran under.
        seconds: slot -> compute seconds, as voted.
        counts_le: [layers, experts], tokens of the full model.
    """

    step: int
    plan: Plan
    seconds: Mapping[int, float]
    counts_le: npt.NDArray[np.float64]


Steer = Callable[[EmulatedVote], Plan | None]
"""Called once per committed step; the plan to change to before the next one, or None."""


class _Helm:
    """Asks `steer` once per step, whichever slot gets there first, and tells all slots the same."""

    def __init__(self, steer: Steer, tokens: float):
        self._steer, self._tokens = steer, tokens
        self._lock = threading.Lock()
        self._decided: dict[int, Plan | None] = {}

    def goes_on(self, run: SlotRun) -> bool:
        """Whether the plan in force stays after the step that `run` has committed."""
        step = run.progress.tx
        with self._lock:
            if step not in self._decided:
                assert run.progress.result is not None
                vote = EmulatedVote(
                    step=step,
                    plan=run.state.plan,
                    seconds={record.slot: record.seconds for record in unpack_records(run.progress.result)},
                    counts_le=run.history.counts_le[-1].numpy() * self._tokens,
                )
                self._decided[step] = self._steer(vote)
            return self._decided[step] is None

    def plan_after(self, step: int) -> Plan | None:
        """What was decided."""
        return self._decided.get(step)


@dataclass(frozen=True, kw_only=True)
class EmulatedStep:
    """One committed step, from the vote before to its own.

    Attributes:
        number: of the step.
        plan: number of the plan it ran under.
        wall_s: on the wall clock, in emulated seconds.
        seconds: on the time lines.
        slots: slot -> what it did.
    """

    number: int
    plan: int
    wall_s: float
    seconds: float
    slots: Mapping[int, Accounts]


@dataclass(frozen=True, kw_only=True)
class EmulatedRun:
    """What was measured. All seconds are emulated ones.

    Attributes:
        label: "emulated".
        steps: in order.
        moved_s: change of layout before the first step of each plan but the first: plan number -> seconds.
        cpu_share: processor time of this process over wall time and processors, while steps ran.
        behind_s: how far the host was behind a time line at most, in wall seconds.
        pace: wall seconds of an emulated second; 0: nothing was slept.
    """

    label: str
    steps: tuple[EmulatedStep, ...]
    moved_s: Mapping[int, float]
    cpu_share: float
    behind_s: float
    pace: float

    def steady(self, plan: int | None = None) -> list[EmulatedStep]:
        """Steps of a plan (by default the last) without its first, which has no parameters to wait for."""
        number = self.steps[-1].plan if plan is None else plan
        return [step for step in self.steps if step.plan == number][1:]

    def step_s(self, plan: int | None = None) -> float:
        """Mean of the steady steps, as slept: longer than on the time lines by as much as the wall clock was for all
        steps together. (A delay that hits a single step's end makes the next one shorter.)"""
        if not self.pace:
            return self.timeline_s(plan)
        slept = sum(step.wall_s for step in self.steps) / sum(step.seconds for step in self.steps)
        return slept * self.timeline_s(plan)

    def timeline_s(self, plan: int | None = None) -> float:
        """Mean of the steady steps on the time lines, which delays of the host do not change."""
        return statistics.fmean(step.seconds for step in self.steady(plan))

    def busy_s(self, plan: int | None = None) -> dict[int, dict[str, float]]:
        """Slot -> kind -> mean seconds of a steady step that its kernels and links are busy."""
        return self._means(plan, lambda accounts: accounts.busy)

    def stalled_s(self, plan: int | None = None) -> dict[int, dict[str, float]]:
        """Slot -> kind -> mean seconds of a steady step that it waits for messages without computing."""
        return self._means(plan, lambda accounts: accounts.stalled)

    def overlap(self, plan: int | None = None) -> float | None:
        """Share of the gradients' way to owners and mirrors that is hidden behind backward; None if there is none.

        Who comes last waits for the links only, others for it too: so the shortest wait is what sticks out.
        """
        busy, stalled = self.busy_s(plan), self.stalled_s(plan)
        total = max(_sync(kinds) for kinds in busy.values())
        return 1 - min(_sync(kinds) for kinds in stalled.values()) / total if total else None

    def _means(
        self, plan: int | None, kinds_of: Callable[[Accounts], Mapping[str, float]]
    ) -> dict[int, dict[str, float]]:
        steps = self.steady(plan)
        kinds = sorted({kind for step in steps for accounts in step.slots.values() for kind in kinds_of(accounts)})
        return {
            slot: {
                kind: statistics.fmean(kinds_of(step.slots[slot]).get(kind, 0.0) for step in steps) for kind in kinds
            }
            for slot in steps[0].slots
        }


def _sync(kinds: Mapping[str, float]) -> float:
    return kinds.get("grad_sync", 0.0) + kinds.get("mirror", 0.0)


def run_emulated(
    plan: Plan,
    emulation: Emulation,
    *,
    steps: int = 3,
    schedule: Sequence[SpeedChange | SlotFailure] = (),
    replan: Replan | None = None,
    steer: Steer | None = None,
) -> EmulatedRun:
    """Train some steps.

    Args:
        plan: to begin with; of the full model.
        emulation: what is emulated.
        steps: how many.
        schedule: slots that change their speed or fail.
        replan: after a failure; by default the plan that recovery makes, with mirrors completed.
        steer: may change the plan after any step.

    Raises:
        ValueError: plan, workload and schedule do not fit each other.
        RuntimeError: the host needed so much processor time that what was measured is no accelerator's.
    """
    _check(plan, emulation, steps, schedule)
    changes = tuple(event for event in schedule if isinstance(event, SpeedChange))
    cluster, runs = emulation.cluster, dict[int, SlotRun]()
    result: list[EmulatedStep] = []
    moved: dict[int, float] = {}
    used, passed, behind = 0.0, 0.0, 0.0
    speed = emulation.speed_under(plan, changes)
    helm = None
    if steer is not None:
        helm = _Helm(steer, Scale.of(emulation.shape, emulation.workload, emulation.seq_len).tokens)
    bounds = sorted({event.step for event in schedule if isinstance(event, SlotFailure)} | {1})
    for first, following in zip(bounds, [*bounds[1:], steps + 1], strict=True):
        failed = [event.slot for event in schedule if isinstance(event, SlotFailure) and event.step == first]
        if failed:
            cluster = cluster.fail(failed)
            plan = (replan or _recovered(emulation))(plan, cluster)
        changed = bool(failed)
        while first < following:
            clock = WallClock(emulation.pace)
            slots = _stretch(plan, emulation, speed, first, following - 1, runs, clock, helm)
            used, passed = used + clock.used_s()[0], passed + clock.used_s()[1]
            runs = {slot: one.run for slot, one in slots.items()}
            behind = max(behind, *(one.behind_s for one in slots.values()))
            if changed:
                moved[plan.number] = max(one.moved_s for one in slots.values())
            done = _steps(plan, first, {slot: one.markers for slot, one in slots.items()})
            result, first = result + done, first + len(done)
            wanted = helm.plan_after(first - 1) if helm is not None else None
            plan, changed = (plan, False) if wanted is None else (wanted, True)
    share = used / passed / num_cpus()
    if emulation.pace and share > MOST_CPU_SHARE:
        raise RuntimeError(
            f"the host used {share:.0%} of its processors, more than {MOST_CPU_SHARE:.0%}: this measures Python, not "
            f"accelerators; raise pace ({emulation.pace})"
        )
    return EmulatedRun(
        label=LABEL, steps=tuple(result), moved_s=moved, cpu_share=share, behind_s=behind, pace=emulation.pace
    )


def _stretch(
    plan: Plan,
    emulation: Emulation,
    speed: Speed,
    first: int,
    last: int,
    runs: Mapping[int, SlotRun],
    clock: WallClock,
    helm: _Helm | None,
) -> dict[int, EmulatedSlot]:
    """Steps under one plan, on fresh threads and groups."""
    barrier = threading.Barrier(len(plan.slots), action=clock.start, timeout=_DEADLINE_S)
    stretch = Stretch(
        emulation=emulation,
        plan=plan,
        first=first,
        last=last,
        speed=speed,
        clock=clock,
        start=barrier.wait,
        board=Board(),
        goes_on=helm.goes_on if helm is not None else lambda run: True,
    )

    def act(me: ThreadSlot) -> EmulatedSlot:
        try:
            slot = EmulatedSlot(me, stretch, runs.get(me.slot))
            slot.act()
            return slot
        except BaseException:
            barrier.abort()
            raise

    lanes = [lane.slots for lane in plan.lanes]
    return run_slots(plan.replicas, act, lanes=lanes, deadline_s=_DEADLINE_S, group_timeout_s=_DEADLINE_S)


def _steps(plan: Plan, first: int, markers: Mapping[int, Sequence[Marker]]) -> list[EmulatedStep]:
    """A step ends when its last slot has seen the vote."""
    found = []
    for index in range(1, len(next(iter(markers.values())))):
        before = [row[index - 1] for row in markers.values()]
        after = [row[index] for row in markers.values()]
        found.append(
            EmulatedStep(
                number=first + index - 1,
                plan=plan.number,
                wall_s=max(one.wall for one in after) - max(one.wall for one in before),
                seconds=max(one.moment for one in after) - max(one.moment for one in before),
                slots={slot: row[index].accounts.minus(row[index - 1].accounts) for slot, row in markers.items()},
            )
        )
    return found


def _recovered(emulation: Emulation) -> Replan:
    lines = parameter_lines(emulation.shape)
    return lambda plan, cluster: plan_mirrors(plan_after_failure(plan, cluster, lines), cluster, lines)


def _check(plan: Plan, emulation: Emulation, steps: int, schedule: Sequence[SpeedChange | SlotFailure]) -> None:
    errors = []
    if plan.global_batch_size != emulation.workload.global_batch_size:
        errors.append(
            f"global_batch_size ({emulation.workload.global_batch_size}) of the workload must be the plan's "
            f"({plan.global_batch_size})"
        )
    if steps < 2:
        errors.append(f"steps ({steps}) must be at least 2: the first has no parameters to wait for")
    for event in schedule:
        if event.slot not in plan.slots:
            errors.append(f"{event}: the plan has no such slot; it has {list(plan.slots)}")
        if not 1 <= event.step <= steps:
            errors.append(f"{event}: step must be 1 to {steps}")
        if isinstance(event, SlotFailure) and event.step == 1:
            errors.append(f"{event}: a slot cannot fail before step 1; plan without it")
    if errors:
        raise ValueError("emulation: " + "; ".join(errors))
