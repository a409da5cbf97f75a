"""scripts/train.py in which the cases of a series come true: `--chaos SERIES.json`, the rest as there.

Run by `nep.testing.chaos.play`. Beside the series every slot writes `events-slot<N>.jsonl`: failures just before they
happen, and recoveries. After a failure training waits at the end of a step until the slots that are missing have come
up again, so that the next one finds the job at full size however slow the machine is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from torch.distributed import DistError

from models.mixtral import build
from nep.fault_tolerance import runtime
from nep.fault_tolerance.control_store import ControlStore
from nep.fault_tolerance.injection import Failure, Slowness, fail
from nep.fault_tolerance.requests import returners
from nep.fault_tolerance.runtime import SlotRun
from nep.fault_tolerance.timeline import Recovery
from nep.testing.chaos.cases import PHASES, SLOW, SPACING, STORE, SUPERVISOR, Case, Series
from nep.testing.chaos.victims import choose, companion_for
from nep.testing.launch import STORE_PID_KEY
from nep.train import checkpoints, main, make_run, trainer

_TOGETHER_S = 0.3  # a victim waits so long for the others to come to the same place
_RETURN_S = 40.0
_LONG_S = 1_000.0


class Chaos:
    """The failures of one slot.

    Args:
        cases: of this job, by step.
        folder: for the events.
    """

    def __init__(self, cases: dict[int, Case], folder: Path):
        self._cases = cases
        self._folder = folder
        self.run: SlotRun

    def note(self, event: str, **more: Any) -> None:
        """Write a line that survives whatever comes next."""
        line = json.dumps({"event": event, "slot": self.run.slot, "time": time.time(), **more})
        with (self._folder / f"events-slot{self.run.slot}.jsonl").open("a") as file:
            file.write(line + "\n")

    def injector(self, failures: Sequence[Failure], slot: int, store: ControlStore, announce: Any) -> _Injector:
        """In place of `nep.fault_tolerance.injection.Injector`."""
        return _Injector(self, store)

    def roles(self, case: Case, store: ControlStore) -> dict[int, tuple[str, str]]:
        """Slot -> kind and phase of its failure. Decided once for a case, in the forward of its step."""
        key = f"chaos/{case.step}"
        text = store.get(key)
        if text is None:
            text = store.compare_and_set(key, "", json.dumps(self._decide(case)))
        return {int(slot): (kind, phase) for slot, (kind, phase) in json.loads(text).items()}

    def _decide(self, case: Case) -> dict[int, tuple[str, str]]:
        plan, lines = self.run.state.plan, self.run.recipe.lines
        if len(plan.slots) < self.run.job.num_slots or plan.unprotected(lines):
            self.note("refused", case=case.name, why=f"slots {plan.slots}, not protected {plan.unprotected(lines)[:1]}")
            return {}
        number, phase = case.step // SPACING, PHASES[case.phase]
        victims = choose(plan, lines, case.victims, number)
        if not victims:
            self.note("nobody", case=case.name)
            return {}
        roles = dict.fromkeys(victims, (case.kind, phase))
        if phase == "recover":
            # Something must fail to be recovered from.
            if len(victims) > 1 and case.kind not in (SLOW, SUPERVISOR):
                roles[victims[0]] = (case.kind, "forward")
            else:
                companion = companion_for(plan, lines, victims, number)
                if companion is None:
                    self.note("refused", case=case.name, why="nobody can be lost beside them")
                    return {}
                roles[companion] = ("kill", "forward")
        self.note("chosen", case=case.name, victims=list(victims), roles=roles, replicas=plan.replicas)
        return roles

    def is_whole(self) -> bool:
        """Whether every slot trains or waits to be let in; nobody is waited for when the job is to stop."""
        run = self.run
        if run.stop_requested():
            return True
        run.requests.read(run.store)
        waiting = returners(run.requests.known, run.considered)
        return len({*run.current.members, *waiting}) == run.job.num_slots


class _Injector:
    """Fails where the case of the step wants it; each slot once for a case."""

    def __init__(self, chaos: Chaos, store: ControlStore):
        self._chaos = chaos
        self._store = store
        self._slowness = Slowness()
        self._store_lost = False

    def at(self, phase: str, step: int) -> None:
        self._slowness.pause(step)
        if self._store_lost:
            return
        try:
            self._at(phase, step)
        except DistError:
            self._store_lost = True  # that was the failure: nothing more is injected

    def _at(self, phase: str, step: int) -> None:
        case = self._chaos._cases.get(step)
        if case is None or (phase != "forward" and not self._store.exists(f"chaos/{step}")):
            return
        slot, roles = self._chaos.run.slot, self._chaos.roles(case, self._store)
        kind, where = roles.get(slot, ("", ""))
        if where != phase or self._store.add(f"chaos/{step}/{slot}", 1) > 1:
            return
        self._wait_for_others(step, sum(one == (kind, where) for one in roles.values()))
        self._chaos.note("failure", case=case.name, kind=kind, phase=phase, step=step)
        if kind == SLOW:
            self._slowness.begin(step)
        elif kind == STORE:
            pid = self._store.at_prefix("").get(STORE_PID_KEY)
            assert pid is not None
            os.kill(int(pid), signal.SIGKILL)
        elif kind == SUPERVISOR:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(_LONG_S)  # the kernel ends it
        else:
            fail(Failure(slot=slot, step=step, kind=kind, phase=phase))

    def _wait_for_others(self, step: int, number: int) -> None:
        """Two that fail together do so in the same moment, if the step lets both come so far."""
        key, deadline = f"chaos/{step}/ready", time.monotonic() + _TOGETHER_S
        self._store.add(key, 1)
        while number > 1 and self._store.add(key, 0) < number and time.monotonic() < deadline:
            time.sleep(0.002)


class _Whole:
    """All slots are there, as something to wait for."""

    def __init__(self, chaos: Chaos):
        self._chaos = chaos

    def done(self) -> bool:
        time.sleep(0.002)
        return self._chaos.is_whole()

    def check(self) -> None:
        return None

    def ended(self) -> bool:
        return True


def install(chaos: Chaos, holds: Callable[[int], bool]) -> None:
    """Put the failures, the waits and the notes into the trainer.

    Args:
        chaos: of this slot.
        holds: whether a step waits for slots that are missing.
    """
    commit_step, init, recovered = trainer.commit_step, runtime.SlotRun.__init__, main._View._recovery

    def held(run: SlotRun, step: int, *rest: Any) -> bool:
        if holds(step) and not chaos.is_whole():
            run.current.waiter.wait(_Whole(chaos), f"all slots, in step {step}", _RETURN_S)
        return commit_step(run, step, *rest)

    def noted(run: Any, **fields: Any) -> None:
        init(run, **fields)
        chaos.run = run

    def recovery_noted(view: Any, which: trainer.Trainer, recovery: Recovery) -> None:
        recovered(view, which, recovery)
        chaos.note(
            "recovery", phases=recovery.phases_s(), size=len(which.members), in_step=which.step, **asdict(recovery)
        )

    trainer.commit_step = held  # type: ignore[assignment]
    runtime.SlotRun.__init__ = noted  # type: ignore[method-assign]
    main._View._recovery = recovery_noted  # type: ignore[method-assign]
    make_run.Injector = chaos.injector  # type: ignore[misc, assignment]
    checkpoints.Injector = chaos.injector  # type: ignore[misc, assignment]


def run(arguments: list[str]) -> int:
    """The command line."""
    place = arguments.index("--chaos")
    path = Path(arguments[place + 1])
    cases = {case.step: case for case in Series.read(path).cases}
    last = max(cases, default=0) + SPACING
    chaos = Chaos(cases, path.parent)
    # Not in the step that fails nor in the one before: what is measured is training that does not wait.
    install(chaos, lambda step: step < last and 0 < step % SPACING < SPACING - 1 and step > min(cases, default=last))
    return main.main(build, arguments[:place] + arguments[place + 2 :])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
