"""Slots whose supervisor has been killed: nobody reports the end of their trainers, so neighbours do.

A trainer dies with its supervisor (the kernel kills it), and the launcher then stops the job. The others have half a
minute to agree on the last step and to write a checkpoint, and must not spend it waiting.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nep.fault_tolerance.control_store import ControlStore, exit_key, supervisor_key
from nep.fault_tolerance.requests import incarnation_of

log = logging.getLogger(__name__)


def whereabouts() -> dict[str, Any]:
    """How processes that share this one's table of processes can see whether it lives."""
    return {
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "processes": os.readlink("/proc/self/ns/pid"),
        "time": time.time(),
    }


def report_unsupervised(
    store: ControlStore, slots: Iterable[int], incarnations: Mapping[int, int] | None = None
) -> None:
    """Write the exits of slots whose supervisors are gone, as far as this process can see them.

    Args:
        store: the caller's connection.
        slots: which have neither answered nor ended.
        incarnations: which trainer of each is meant; the first where nothing is said.
    """
    here = whereabouts()
    for slot in slots:
        text = store.get(supervisor_key(slot))
        found = json.loads(text) if text else {}
        if any(found.get(name) != here[name] for name in ("boot", "processes")):
            continue  # on another machine or in another container
        if _lives(found["pid"]):
            continue
        log.warning("the supervisor of slot %d has been killed, and its trainer with it", slot)
        reason = {"slot": slot, "status": -9, "signal": "SIGKILL", "by": "a neighbour", "time": time.time()}
        store.compare_and_set(exit_key(slot, incarnation_of(incarnations or {}, slot)), "", json.dumps(reason))


def _lives(pid: int) -> bool:
    """Whether there is such a process; one that has ended and is not reaped yet does not count."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
