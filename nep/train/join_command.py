"""`nep join`: a node that was lost brings its slots back, with this process as its launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from nep.fault_tolerance.environment import environment_to_join
from nep.fault_tolerance.running_job import JobAddress, RunningJob, find_job
from nep.report.command_line import parse_options
from nep.report.terminal import print_text
from nep.train.agreement import ALERT_OPTION, recorded_command
from nep.train.alerts import target_problems

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.2
_KILL_S = 30.0  # after a signal, as torchrun


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Bring the slots of a lost node back to a running job. Run it on that node: nep join [OPTIONS] [-- SCRIPT ARGS].

    It starts the job's own command for each slot that is down and whose supervisor is gone, and stays until they end.
    The slots train again after the next step.
    """

    job: Annotated[str | None, tyro.conf.arg(metavar="FILE|HOST:PORT")] = None
    """The job.json in a run folder, or the address of the control store; by default the newest under ./runs."""
    slots: tuple[int, ...] = ()
    """Which slots; by default those that ran on this host, or all that are lost if they were of one node."""
    on_alert: str | None = None
    """Command or http(s) URL to tell of alerts, as with scripts/train.py; the job does not pass on its own."""


def main(arguments: Sequence[str]) -> int:
    """`nep join`.

    Returns:
        0 if every process it started has ended with 0, else the first other exit code.
    """
    arguments, given = list(arguments), ()
    if "--" in arguments:
        place = arguments.index("--")
        arguments, given = arguments[:place], tuple(arguments[place + 1 :])
    options = parse_options(JoinOptions, prog="nep join", arguments=arguments)
    job = RunningJob(find_job(options.job))
    if job.exit_code is not None:
        raise RuntimeError(f"job {job.address.run_id} is over (exit code {job.exit_code}); there is nothing to join")
    command, folder = _command(job.address, given)
    told = _alert_options(options.on_alert, command)
    slots = _slots(job, options.slots)
    for slot, who in job.kept_away().items():
        if job.host_of(slot) == os.uname().nodename:
            print_text(f"slot {slot} stays away (asked for by {who}); let it come back with: nep undrain {slot}")
    shown = recorded_command(command[0], command[1:])  # the given one may have a secret, too
    print_text(f"job {job.address.run_id}: bringing back slots {slots} with {' '.join(shown)}")
    return _run(job.address, slots, (*command, *told), folder)


def _command(address: JobAddress, given: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """What to run, and where."""
    folder = "." if given or not os.path.isdir(address.folder) else address.folder
    command = given or address.command
    if not command:
        raise ValueError("the job has not said how it was started; say it: nep join -- SCRIPT.py ARGS")
    if not os.path.isfile(os.path.join(folder, command[0])):
        raise ValueError(f"the job's script ({command[0]}) is not on this host; name it: nep join -- SCRIPT.py ARGS")
    return command, folder


def _alert_options(target: str | None, command: Sequence[str]) -> tuple[str, ...]:
    """What to add to the command so that its trainers tell of alerts. It may be a secret, so it is not printed.

    Raises:
        ValueError: nobody can be told so, or the command says already whom to tell.
    """
    if target is None:
        return ()
    if problems := target_problems(target):
        raise ValueError("; ".join(problems))
    if any(word.partition("=")[0].replace("_", "-") == ALERT_OPTION for word in command):
        raise ValueError(f"{ALERT_OPTION} is given twice; leave it out before or after the --")
    return (ALERT_OPTION, target)


def _slots(job: RunningJob, wanted: tuple[int, ...]) -> list[int]:
    """The slots to start.

    Raises:
        ValueError: none, or not clear which.
    """
    states = {one.slot: one.state for one in job.slots()}
    if unknown := sorted(set(wanted) - states.keys()):
        raise ValueError(f"slots {unknown} are none of this job's, 0 to {len(states) - 1}")
    absent = job.absent()
    if wanted:
        if refused := sorted(set(wanted) - set(absent)):
            kept = {slot: f" (asked for by {who})" for slot, who in job.kept_away().items()}
            how = ", ".join(f"slot {slot} is {states[slot]}{kept.get(slot, '')}" for slot in refused)
            raise ValueError(f"{how}; only slots that are lost with their supervisor can join, for others: nep undrain")
        return sorted(set(wanted))
    if not absent:
        raise ValueError("no slot of this job is lost with its supervisor; nep status says how each is")
    here = [slot for slot in absent if job.host_of(slot) == os.uname().nodename]
    nodes = {slot // job.address.slots_per_node for slot in absent}
    if not here and len(nodes) > 1:
        raise ValueError(f"slots {absent} are lost, of nodes {sorted(nodes)}; say which this node brings: --slots")
    return here or absent


def _run(address: JobAddress, slots: Sequence[int], command: Sequence[str], folder: str) -> int:
    """Start a process for each slot, pass signals on, and wait for all. One that ends leaves the others alone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    workers = {
        slot: subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment_to_join(
                slot,
                num_slots=address.num_slots,
                slots_per_node=address.slots_per_node,
                run_id=address.run_id,
                attempt=_attempt(address),
                address=address.store_address,
            ),
            start_new_session=True,
            preexec_fn=_unblock,
        )
        for slot in slots
    }
    code, kill_at = 0, None
    try:
        while workers:
            info = signal.sigtimedwait(_SIGNALS, _POLL_S)
            if info is not None:
                _tell(workers.values(), info.si_signo)
                kill_at = kill_at or time.monotonic() + _KILL_S
            if kill_at is not None and time.monotonic() > kill_at:
                _tell(workers.values(), signal.SIGKILL)
            for slot, worker in list(workers.items()):
                ended = worker.poll()
                if ended is not None:
                    del workers[slot]
                    print_text(f"slot {slot} has left with exit code {ended}")
                    code = code or abs(ended)
    finally:
        _tell(workers.values(), signal.SIGKILL)
    return code


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _tell(workers: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, number)


def _attempt(address: JobAddress) -> int:
    """How often the first launcher had started the job anew: the number at the end of the prefix."""
    return int(address.prefix.rstrip("/").rpartition("attempt")[2] or 0)
