"""The small parent between the launcher and a trainer.

A launcher such as torchrun stops every worker when one of them dies. So its worker is not the trainer but
this parent: it forks the trainer, outlives it, tells the others of its death within milliseconds, kills it
when it is frozen and somebody asks for that (a fence), and stays until the job has ended.

What keeps this safe (each rule has a hang or an orphan behind it):

* The parent may have imported torch, but has one thread and has run no tensor operation: a thread pool does
  not survive a fork, and the child would wait for it for ever.
* It opens its store connection after the fork; child and parent never share one.
* Its own death by SIGKILL takes the trainer along (SIGKILL from the kernel); the launcher's death reaches it
  as SIGTERM, so that it can still tidy up.
* The launcher signals the whole process group, the trainer included: nothing is forwarded, unless the
  launcher has died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable

from nep.distributed.timeouts import SupervisorTimeouts
from nep.fault_tolerance import processes
from nep.fault_tolerance.control_store import (
    FIRST_GENERATION,
    decision_key,
    end_key,
    exit_key,
    fence_key,
)
from nep.fault_tolerance.forking import Trainer, fork_trainer
from nep.fault_tolerance.job import (
    GenerationCell,
    Job,
    JobSpec,
    slot_log_path,
)
from nep.fault_tolerance.lost_launchers import answer_for_lost_agents, report_lost_launcher
from nep.fault_tolerance.requests import Request, Requests, drained, incarnation_of
from nep.fault_tolerance.supervisor_link import StoreLink
from nep.fault_tolerance.takeover import take_over

STORE_LOST = "it did not finish after the control store was lost"

# Exit codes with which a trainer leaves a job that has ended: done; no checkpoint; stopped with a checkpoint.
FINAL_CODES = (0, 3, 4)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # those torchrun passes on
_WATCHED = (signal.SIGCHLD, processes.NOTICE, *_STOP_SIGNALS)


def supervise(trainer: Trainer, *, spec: JobSpec) -> int:
    """Run `trainer` in a forked child and stay until the job has ended.

    Every slot's worker process calls it, single-threaded and before any tensor operation.

    Args:
        trainer: gets a `Job`, returns its exit code. It sets or awaits the end flag before it returns: an
            exit without the flag is an abnormal one, whatever its code (a library may call `os._exit(0)`).
        spec: this slot's place in the job, with a store address.

    Returns:
        The exit code for the launcher: the trainer's own, or the job's (the value of the end flag) if this
        slot's trainer died earlier, or 1 if the job was stopped or nobody is left to end it.

    Raises:
        RuntimeError: this process has more than one thread, or the platform is not Linux.
        ValueError: `spec` has no store address, or joins a job that it does not fit.
    """
    if spec.store_address is None:
        raise ValueError("spec.store_address (None) is needed to supervise; without a launcher use run_alone")
    if spec.joins:
        spec = dataclasses.replace(spec, incarnation=take_over(spec))
    spec.run_dir.mkdir(parents=True, exist_ok=True)
    launcher_pid = os.getppid()
    processes.become_subreaper()
    processes.set_parent_death_signal(signal.SIGTERM)
    # Blocked signals wait for sigtimedwait: no handlers, so no state that changes between two lines.
    inherited_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    timeouts = SupervisorTimeouts.from_base(spec.timeout_base_s)
    try:
        cell, address = GenerationCell(spec.first_generation), spec.store_address

        def start(incarnation: int) -> int:
            job = Job.from_spec(dataclasses.replace(spec, incarnation=incarnation), cell, address)
            return fork_trainer(trainer, job, inherited_mask)

        return _Supervisor(spec=spec, start=start, launcher_pid=launcher_pid, cell=cell, timeouts=timeouts).run()
    finally:
        processes.end_descendants(timeouts.helper_s)
        while signal.sigtimedwait(_WATCHED, 0) is not None:
            pass  # a SIGTERM that is still pending would be delivered below and replace the exit code
        signal.pthread_sigmask(signal.SIG_SETMASK, inherited_mask)


class _Supervisor:
    """The parent's part. Making one forks the first trainer.

    Args:
        spec: this slot's place in the job.
        start: forks the trainer of that incarnation and returns its pid.
        launcher_pid: this process's parent.
        cell: how a trainer tells its generation.
        timeouts: see there.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        start: Callable[[int], int],
        launcher_pid: int,
        cell: GenerationCell,
        timeouts: SupervisorTimeouts,
    ):
        self._spec = spec
        self._start = start
        self._incarnation = spec.incarnation
        self._respawns = spec.respawn  # left
        self._requests = Requests()
        self._answered = 0  # requests that were there when the trainer was started
        self._left_out = False
        self._pid = start(spec.incarnation)
        self._running = True
        self._launcher_pid = launcher_pid
        self._cell = cell
        self._timeouts = timeouts
        self._link = StoreLink(spec, timeouts, self._say)
        self._stopping = False
        self._orphaned_at: float | None = None  # when the launcher was found dead
        self._told = False  # the trainer, to stop
        self._drains = False  # as does the whole node
        self._fenced = False
        self._kill_at_s: float | None = None
        self._kill_reason = ""
        self._flagged: set[int] = set()  # generations whose fault flag this supervisor has raised
        self._members: tuple[int, ...] = tuple(range(spec.num_slots - spec.spares))  # of the newest decision
        self._incarnations: dict[int, int] = {}  # which trainer of each member
        self._decision = cell.get()  # its generation

    def run(self) -> int:
        code = self._run()
        if self._end_code() is not None:
            self._link.ask(lambda s: answer_for_lost_agents(s, self._spec), [])
        return code

    def _run(self) -> int:
        self._link.connect()
        while True:
            exit_code = self._wait_for_trainer()
            while True:
                end_code = self._end_code()
                if end_code is not None:
                    return self._leave_after_end(exit_code, end_code)
                if not self._link.away_s:
                    self._report_exit(exit_code)
                    if not self._link.away_s:
                        break
                elif exit_code in FINAL_CODES or self._stopping or self._link.is_gone:
                    # Nobody can tell whether the job has ended: the trainer's word counts.
                    return exit_code if exit_code in FINAL_CODES else 1
                self._pause()  # until it can be told that the trainer has died
            processes.end_descendants(self._timeouts.helper_s)  # what the trainer had started is adopted by now
            code = self._wait_for_end()
            if code is not None:
                return code
            self._respawn()

    def _end_code(self) -> int | None:
        """The job's exit code, or None while it runs."""
        text = self._link.ask(lambda s: s.get(end_key()), None)
        return None if text is None else int(text)

    # While the trainer runs.

    def _wait_for_trainer(self) -> int:
        """Watch the trainer until it is gone; return its exit code, negative for a signal."""
        next_slow_look_s = 0.0
        while True:
            self._pause()
            ended = processes.reap()
            if self._pid in ended:
                self._running = False  # its pid may belong to another process from now on
                return ended[self._pid]
            self._obey_fence()
            self._look_after_losses()
            now_s = time.monotonic()
            if now_s >= next_slow_look_s:
                next_slow_look_s = now_s + self._timeouts.slow_poll_s
                if self._kill_at_s is None and self._end_code() is not None:
                    self._limit(self._timeouts.leave_s, "it did not leave after the end of the job")
            if self._kill_at_s is not None and now_s >= self._kill_at_s:
                self._say(f"killing the trainer: {self._kill_reason}")
                processes.send_signal(self._pid, signal.SIGKILL)
                self._kill_at_s = now_s + self._timeouts.grace_s  # one stuck in the kernel is told again

    def _pause(self) -> None:
        """Sleep until a child changes, a signal arrives or the next look is due."""
        info = signal.sigtimedwait(_WATCHED, self._timeouts.poll_s)
        if info is not None and info.si_signo in _STOP_SIGNALS and not self._stopping:
            self._stopping = True
            self._limit(self._timeouts.grace_s, "it did not finish after the launcher's signal")
        elif info is not None and info.si_signo == processes.NOTICE and self._running:
            processes.send_signal(self._pid, processes.NOTICE)  # it may have come to this process alone
        # The kernel's signal for the launcher's death comes to this process alone. It is sent when the thread that
        # started this process ends, and for a moment another thread of a dying launcher may be the parent.
        if self._stopping and self._orphaned_at is None and os.getppid() != self._launcher_pid:
            self._orphaned_at = time.monotonic()
            self._link.ask(lambda s: report_lost_launcher(s, self._spec), None)  # if another one hosts the store
        self._link.renew()

    def _look_after_losses(self) -> None:
        """What the loss of the launcher or of the control store means for the trainer."""
        link, times, now_s = self._link, self._timeouts, time.monotonic()
        if link.is_refused:
            self._limit(times.grace_s, STORE_LOST)
        elif self._kill_reason == STORE_LOST:
            self._kill_at_s, self._kill_reason = None, ""
        if link.is_refused and not self._told and (self._orphaned_at is not None or link.away_s > times.grace_s * 0.4):
            self._told = True
            lost = "the control store is lost" if self._orphaned_at is None else "the launcher has died"
            self._say(f"{lost}; telling the trainer to stop")
            processes.send_signal(self._pid, signal.SIGTERM)
        elif self._orphaned_at is None or self._drains or link.away_s:
            return
        elif now_s - self._orphaned_at > 4 * times.poll_s:
            # Another launcher hosts the store, and the job goes on: this node leaves it as if it were drained.
            self._drains = True
            self._say("the launcher has died, and the job goes on without this node: its slots hand over and leave")
            mine = Request(kind="drain", slot=self._spec.slot, incarnation=self._incarnation)
            link.ask(lambda s: self._requests.post(s, mine), 0)
            self._kill_at_s, self._kill_reason = now_s + times.drain_s, "it did not leave after its launcher had died"

    def _limit(self, seconds: float, reason: str) -> None:
        """Let the trainer live `seconds` more; an earlier limit stays."""
        at_s = time.monotonic() + seconds
        if self._kill_at_s is None or at_s < self._kill_at_s:
            self._kill_at_s, self._kill_reason = at_s, reason

    def _obey_fence(self) -> None:
        # A fence names the trainer it means: it may be for an earlier one of this slot.
        wanted = self._link.ask(lambda s: s.get(fence_key(self._spec.slot)), None)
        if not self._fenced and wanted == str(self._incarnation):
            self._fenced = True
            self._say("killing the trainer: it was fenced")
            processes.send_signal(self._pid, signal.SIGKILL)  # ends a stopped process too

    # When it is gone.

    def _leave_after_end(self, exit_code: int, end_code: int) -> int:
        if exit_code in (*FINAL_CODES, end_code):
            return exit_code
        self._say(f"the trainer ended by {_describe(exit_code)} after the end of the job (exit code {end_code})")
        return end_code

    def _report_exit(self, exit_code: int) -> None:
        """Tell the others that this trainer is gone for good, whether or not another one comes."""
        spec, generation = self._spec, self._cell.get()
        self._decision = generation
        record = {
            "slot": spec.slot,
            "incarnation": self._incarnation,
            "status": exit_code,
            "signal": processes.signal_name(-exit_code) if exit_code < 0 else None,
            "fenced": self._fenced,
            "generation": generation,
            "time": time.time(),
            "log": str(slot_log_path(spec.run_dir, spec.slot)),
        }
        # Before any decision is read. A member reads the decision first and the exit keys afterwards, so
        # whatever the order, either it sees this key or this supervisor sees the decision.
        self._link.ask(lambda s: s.set_json(exit_key(spec.slot, self._incarnation), record), None)
        if generation >= FIRST_GENERATION:
            self._flag(generation)
        self._follow_decisions()
        self._say(f"the trainer ended by {_describe(exit_code)} in generation {generation}; its log is {record['log']}")

    def _flag(self, generation: int) -> None:
        if generation in self._flagged:
            return
        detail = f"the trainer of slot {self._spec.slot} has ended"
        reason = {"kind": "exit", "slot": self._spec.slot, "detail": detail, "time": time.time()}
        if self._link.ask(lambda s: s.raise_fault(generation, reason), None) is not None:
            self._flagged.add(generation)

    def _follow_decisions(self) -> None:
        """Find the newest decision and raise its fault flag if it counts on this slot."""
        decision = self._link.ask(lambda s: s.get_json(decision_key(self._decision)), None)
        while True:
            later = self._link.ask(lambda s: s.get_json(decision_key(self._decision + 1)), None)
            if later is None:
                break
            self._decision += 1
            decision = later
        if decision is not None:
            self._members = tuple(decision["members"])
            self._incarnations = {int(slot): one for slot, one in decision.get("incarnations", {}).items()}
            if self._spec.slot in self._members and self._counts_on(self._spec.slot) == self._incarnation:
                self._flag(self._decision)

    def _counts_on(self, slot: int) -> int:
        """Which trainer of a slot is a member of the newest decision."""
        return incarnation_of(self._incarnations, slot)

    def _nobody_is_left(self) -> bool:
        exits = [exit_key(slot, self._counts_on(slot)) for slot in self._members]
        # The last one to go may have set the end flag since the last look.
        return self._link.ask(lambda s: s.exists(exits), False) and self._end_code() is None

    def _wait_for_end(self) -> int | None:
        """Keep this worker alive, since the launcher would stop the others, until they have ended the job.

        Returns:
            The exit code, or None: another trainer is to be started.
        """
        next_slow_look_s = 0.0
        while True:
            end_code = self._end_code()
            if end_code is not None:
                return end_code
            if self._stopping or self._link.is_gone:
                return 1
            now_s = time.monotonic()
            if now_s >= next_slow_look_s:
                next_slow_look_s = now_s + self._timeouts.slow_poll_s
                self._follow_decisions()
                if self._nobody_is_left():
                    self._say(f"nobody is left: the trainers of slots {list(self._members)} have ended")
                    return 1
                if self._may_respawn():
                    return None
            self._pause()

    # Another trainer.

    def _may_respawn(self) -> bool:
        """Whether the slot is to be tried again: an operator says so, or it has died and the budget lasts."""
        slot, requests = self._spec.slot, self._requests
        self._link.ask(requests.read, 0)
        if self._stopping or self._link.away_s or slot in drained(requests.known):
            return False
        if any(one.kind == "undrain" and one.slot == slot for one in requests.known[self._answered :]):
            return True
        if self._respawns:
            self._respawns -= 1
            return True
        if not self._left_out and self._spec.respawn:
            self._left_out = True
            self._say(
                f"slot {slot} is left out: its trainer has died {self._spec.respawn + 1} times (--respawn "
                f"{self._spec.respawn}); find out why in its log, then try again with: nep undrain {slot}"
            )
        return False

    def _respawn(self) -> None:
        self._incarnation += 1
        self._answered, self._left_out = len(self._requests.known), False
        self._fenced, self._kill_at_s = False, None
        self._cell.set(FIRST_GENERATION - 1)  # in none, until a decision names it
        self._say(f"starting trainer {self._incarnation} of slot {self._spec.slot}")
        self._pid = self._start(self._incarnation)
        self._running = True

    def _say(self, text: str) -> None:
        place = f"[gen {self._cell.get()} | slot {self._spec.slot} | supervisor]"
        with contextlib.suppress(OSError, ValueError):
            print(f"{place} {text}", file=sys.stderr, flush=True)
        with (
            contextlib.suppress(OSError),
            slot_log_path(self._spec.run_dir, self._spec.slot).open("a") as log,
        ):
            log.write(f"{place} {text}\n")


def _describe(exit_code: int) -> str:
    return processes.signal_name(-exit_code) if exit_code < 0 else f"exit code {exit_code}"
