"""The fork between a supervisor and its trainer."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from nep.fault_tolerance import processes
from nep.fault_tolerance.job import Job

Trainer = Callable[[Job], int]

# How long a thread may keep the interpreter while another waits for it (Python's default is ten times that). The thread
# that trains gives it up in each operation of torch and has to wait for it again, if another one only computes.
_SWITCH_INTERVAL_S = 5e-4


def fork_trainer(trainer: Trainer, job: Job, mask: Iterable[int]) -> int:
    """Run a trainer in a child of this process, which has one thread. Returns the child's pid.

    Args:
        trainer: gets the job, returns the exit code.
        job: what it belongs to.
        mask: signals that it blocks.

    Raises:
        RuntimeError: this process has more than one thread.
    """
    sys.stdout.flush()  # what is buffered now would be written twice
    sys.stderr.flush()
    parent_pid = os.getpid()
    # What has been imported is no garbage: looking through it (180,000 objects) would stop a trainer for some .1 s, now
    # and then and at any time, and all others with it.
    gc.freeze()
    pid = os.fork()
    if pid == 0:
        _run_trainer(trainer, job, mask, parent_pid)
    # Counted after the fork: OpenBLAS has threads that it stops before and restarts after one, harmlessly.
    threads = processes.num_threads()
    if threads != 1:
        processes.send_signal(pid, signal.SIGKILL)
        raise RuntimeError(
            f"the supervisor has {threads} threads at the fork, so its trainer could hang in the first "
            "parallel operation; call supervise before any tensor operation, thread or device is used"
        )
    return pid


def _run_trainer(trainer: Trainer, job: Job, mask: Iterable[int], parent_pid: int) -> NoReturn:
    """The child. It leaves by `os._exit`: it must not unwind into the parent's frames or exit handlers."""
    code: Any = 1
    try:
        processes.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)  # the parent died before the line above, which then sends nothing
        # A preemption notice waits until the trainer can hear it; by default it would end the process.
        signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, processes.NOTICE})
        # Whoever reads the output of a job may leave before it ends (`| head`, a lost terminal).
        sys.stdout, sys.stderr = processes.LastingStream(sys.stdout), processes.LastingStream(sys.stderr)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be no file
            faulthandler.enable()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        code = trainer(job)
    except SystemExit as leaving:
        code = 0 if leaving.code is None else leaving.code
    except BaseException:
        text = traceback.format_exc()
        with contextlib.suppress(OSError), job.log_path.open("a") as log:
            log.write(text)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)
