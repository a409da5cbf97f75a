from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from nep.fault_tolerance.control_store import exit_key, supervisor_key
from nep.fault_tolerance.unsupervised import report_unsupervised, whereabouts
from nep.testing.memory_board import MemoryBoard


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def zombie() -> subprocess.Popen[bytes]:
    """Has ended, and nobody has asked how."""
    process = subprocess.Popen([sys.executable, "-c", "print(1, flush=True)"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process


@pytest.mark.parametrize(
    ("change", "is_reported"),
    [
        ({}, False),
        ({"pid": "dead"}, True),
        ({"pid": "zombie"}, True),
        ({"pid": "dead", "boot": "another machine"}, False),
        ({"pid": "dead", "processes": "pid:[1]"}, False),  # another container: its numbers mean nothing here
    ],
)
def test_whose_supervisor_is_gone(change: dict[str, Any], is_reported: bool) -> None:
    ended = zombie()
    pids = {"dead": dead_pid(), "zombie": ended.pid}
    place = whereabouts() | change
    store: Any = MemoryBoard()
    store.set(supervisor_key(1), json.dumps(place | {"pid": pids.get(place["pid"], place["pid"])}))
    report_unsupervised(store, [1, 2])
    assert store.exists(exit_key(1)) == is_reported
    assert not store.exists(exit_key(2)), "it has never had one"
    ended.wait()


def test_what_a_supervisor_has_reported_stays() -> None:
    store: Any = MemoryBoard()
    store.set(supervisor_key(1), json.dumps(whereabouts() | {"pid": dead_pid()}))
    store.set(exit_key(1), '{"status": 3}')
    report_unsupervised(store, [1])
    assert store.get(exit_key(1)) == '{"status": 3}'
