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
from nep.fault_tolerance.leases import LeaseWatch
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
    store: ControlStore,
    slots: Iterable[int],
    incarnations: Mapping[int, int] | None = None,
    leases: LeaseWatch | None = None,
) -> None:
    """Write the exits of slots whose supervisors are gone: this process can see it, or their leases have expired.

    Args:
        store: the caller's connection.
        slots: which have neither answered nor ended.
        incarnations: which trainer of each is meant; the first where nothing is said.
        leases: of the same slots, as this process has watched them.
    """
    slots = tuple(slots)
    expired = leases.expired(slots) if leases is not None else set()
    for slot in slots:
        if slot in expired:
            log.warning("the supervisor of slot %d has not renewed its lease: it counts as dead", slot)
        elif supervisor_lives(store, slot) is False:
            log.warning("the supervisor of slot %d has been killed, and its trainer with it", slot)
        else:
            continue
        report_for(store, slot, incarnation_of(incarnations or {}, slot), "lease" if slot in expired else "a neighbour")


def report_for(store: ControlStore, slot: int, incarnation: int, by: str) -> None:
    """Write the exit of a trainer in place of its supervisor, unless that has done it.

    Args:
        by: how it is known.
    """
    reason = {
        "slot": slot,
        "incarnation": incarnation,
        "status": -9,
        "signal": "SIGKILL",
        "by": by,
        "time": time.time(),
        "log": "",
    }
    store.compare_and_set(exit_key(slot, incarnation), "", json.dumps(reason))


def supervisor_lives(store: ControlStore, slot: int) -> bool | None:
    """Whether the supervisor of a slot lives; None where this process cannot see it, or there never was one."""
    here, text = whereabouts(), store.get(supervisor_key(slot))
    found = json.loads(text) if text else {}
    if any(found.get(name) != here[name] for name in ("boot", "processes")):
        return None  # on another machine or in another container
    return _lives(found["pid"])


def _lives(pid: int) -> bool:
    """Whether there is such a process; one that has ended and is not reaped yet does not count."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
