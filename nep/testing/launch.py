"""A fast stand-in for torchrun in tests.

    python -m nep.testing.launch --nproc-per-node 4 [--log-dir DIR] [--timeout S] [--json] SCRIPT.py ARGS...

It imports torch and the trainer once and forks its workers, so four of them start in about two seconds. To a worker
it looks like torchrun: the same environment variables, a session of its own, a control store that outlives every
worker, and when a worker fails SIGTERM for the process groups of the others and SIGKILL after a grace. In addition it
finds every process that outlives its worker (an orphan), ends it and counts it.

Exit code: 0 if all workers exit with 0; else that of the first one to fail (128 + n for signal n); 124 after
a time-out; 1 when the launcher itself was told to stop. With --json the last line of stdout is
{"schema", "exit_codes" (by rank, negative for a signal), "orphans", "timed_out", "seconds"}.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from nep.fault_tolerance import processes

STORE_PID_KEY = "nep.testing/store_pid"  # in the control store: which process hosts it, for tests that end it
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_WATCHED = (signal.SIGCHLD, *_STOP_SIGNALS)
_SETTLE_S = 2.0  # what a dead worker's processes get to follow it before they are called orphans
_POLL_S = 0.1


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun; libraries read it when they are loaded
    # Once, for all workers: that is the point of this launcher.
    import torch.distributed  # noqa: F401

    import nep.train.main  # noqa: F401

    start_s = time.monotonic()
    processes.look_up_hosts_in_files()
    processes.become_subreaper()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    store_pid, port = _fork_store(mask)
    launch = _Launch(arguments=arguments, store_pid=store_pid, port=port)
    try:
        launch.start_workers(mask)
        code = launch.watch()
    finally:
        orphans = launch.end_orphans()
        processes.send_signal(store_pid, signal.SIGKILL)
        processes.end_descendants(0.0)
    if arguments.json:
        report = {
            "schema": 1,
            "exit_codes": [launch.exit_codes.get(rank) for rank in range(launch.num_workers)],
            "orphans": orphans,
            "timed_out": code == 124,
            "seconds": round(time.monotonic() - start_s, 3),
        }
        print(json.dumps(report), flush=True)
    return code


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nep.testing.launch", description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc-per-node", type=int, required=True, metavar="N")
    parser.add_argument("--nnodes", type=int, default=1, metavar="N", help="pretend that this host is N nodes")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="output of each worker to DIR/worker<rank>.log")
    parser.add_argument("--timeout", type=float, metavar="S", help="kill everything after S seconds, exit code 124")
    parser.add_argument("--grace", type=float, default=30.0, metavar="S", help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("--json", action="store_true", help="report as the last line of stdout")
    parser.add_argument("script", type=Path, metavar="SCRIPT.py")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="ARGS")
    arguments = parser.parse_args(argv)
    if arguments.nproc_per_node < 1 or arguments.nnodes < 1:
        parser.error("--nproc-per-node and --nnodes must be at least 1")
    if not arguments.script.is_file():
        parser.error(f"{arguments.script} is not a file")
    return arguments


def _fork_store(mask: Iterable[int]) -> tuple[int, int]:
    """Host the store in a process of its own; return its pid and port.

    The server runs in a thread, and workers must be forked from a process that has only one.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()  # Ctrl-C is the launcher's business
            processes.set_parent_death_signal(signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            import torch.distributed as dist

            server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            server.set(STORE_PID_KEY, str(os.getpid()))
            os.write(writing, str(server.port).encode())
            os.close(writing)
            while True:
                signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    port = os.read(reading, 16)
    os.close(reading)
    if not port:
        raise RuntimeError("the process that hosts the control store ended before it listened on 127.0.0.1")
    return pid, int(port)


@dataclass
class _Launch:
    arguments: argparse.Namespace
    store_pid: int
    port: int
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    pids: dict[int, int] = field(default_factory=dict)  # rank -> pid of the workers that run
    exit_codes: dict[int, int] = field(default_factory=dict)  # rank -> exit code of those that have ended
    failed: list[int] = field(default_factory=list)  # ranks, in the order in which they failed

    @property
    def num_workers(self) -> int:
        return int(self.arguments.nnodes * self.arguments.nproc_per_node)

    def start_workers(self, mask: Iterable[int]) -> None:
        if self.arguments.log_dir is not None:
            self.arguments.log_dir.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(self.num_workers):
            pid = os.fork()
            if pid == 0:
                self._run_worker(rank, mask)
            self.pids[rank] = pid

    def _environment(self, rank: int) -> dict[str, str]:
        local_size = self.arguments.nproc_per_node
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % local_size),
            "GROUP_RANK": str(rank // local_size),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "WORLD_SIZE": str(self.num_workers),
            "LOCAL_WORLD_SIZE": str(local_size),
            "GROUP_WORLD_SIZE": str(self.arguments.nnodes),
            "ROLE_WORLD_SIZE": str(self.num_workers),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def _run_worker(self, rank: int, mask: Iterable[int]) -> NoReturn:
        """The forked worker: becomes `python SCRIPT.py ARGS...` as far as the script can see."""
        code = 1
        try:
            os.setsid()
            processes.set_parent_death_signal(signal.SIGKILL)  # a supervisor replaces it by SIGTERM
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.environ.update(self._environment(rank))
            random.seed()  # a forked generator would give every worker the same "random" numbers
            if self.arguments.log_dir is not None:
                log = os.open(self.arguments.log_dir / f"worker{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.close(log)
            script = str(self.arguments.script.resolve())
            sys.argv = [script, *self.arguments.script_arguments]
            sys.path[0] = os.path.dirname(script)
            runpy.run_path(script, run_name="__main__")
            code = 0
        except SystemExit as leaving:
            if leaving.code is None or isinstance(leaving.code, int):
                code = leaving.code or 0
            else:
                print(leaving.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def watch(self) -> int:
        """Wait until all workers have ended, as torchrun's agent does; return the launcher's exit code."""
        timeout_s = self.arguments.timeout
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        kill_at_s: float | None = None
        stopped = False
        while self.pids:
            info = signal.sigtimedwait(_WATCHED, _POLL_S)
            stopped |= info is not None and info.si_signo in _STOP_SIGNALS
            self._collect()
            now_s = time.monotonic()
            if deadline_s is not None and now_s >= deadline_s:
                return self._give_up()
            if kill_at_s is None and (stopped or self.failed):
                self._signal_groups(signal.SIGTERM)
                kill_at_s = now_s + self.arguments.grace
            elif kill_at_s is not None and now_s >= kill_at_s:
                self._signal_groups(signal.SIGKILL)
        if stopped:
            return 1
        first = self.exit_codes[self.failed[0]] if self.failed else 0
        return 128 - first if first < 0 else first

    def _collect(self) -> None:
        """Take down the exit codes of workers that have ended."""
        ended = processes.reap()
        for rank, pid in list(self.pids.items()):
            if pid in ended:
                del self.pids[rank]
                self.exit_codes[rank] = ended[pid]
                if ended[pid] != 0:
                    self.failed.append(rank)
        if self.store_pid in ended:
            # As if it were on another node, whose launcher has died: the workers find out for themselves.
            print("the process that hosts the control store has ended", file=sys.stderr, flush=True)

    def _give_up(self) -> int:
        print(f"time-out after {self.arguments.timeout:g} s: killing ranks {sorted(self.pids)}", file=sys.stderr)
        while self.pids:
            self._signal_groups(signal.SIGKILL)
            signal.sigtimedwait(_WATCHED, _POLL_S)
            self._collect()
        return 124

    def _signal_groups(self, signum: int) -> None:
        for pid in self.pids.values():
            try:
                os.killpg(pid, signum)
            except ProcessLookupError:
                processes.send_signal(pid, signum)  # forked, but not yet in a session of its own

    def end_orphans(self) -> int:
        """End what is still below this process when the workers are gone; return how many that were."""
        for pid in self.pids.values():  # only if an exception ended the watch
            processes.send_signal(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline_s:
            processes.reap()
            if not processes.descendants(os.getpid()) - {self.store_pid}:
                return 0
            time.sleep(0.01)
        return processes.end_descendants(0.0, spare={self.store_pid})


if __name__ == "__main__":
    sys.exit(main())
