"""The fork between a supervisor and its trainer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]

FORK = """
import gc, os, sys
from unittest.mock import Mock
from nep.fault_tolerance.forking import fork_trainer

before = len(gc.get_objects())

def trainer(job):
    ring = []
    ring.append(ring)
    del ring
    print(gc.get_freeze_count() > before / 2, len(gc.get_objects()) < before / 2, gc.collect() > 0, flush=True)
    return 5

pid = fork_trainer(trainer, Mock(), ())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_trainer_does_not_look_for_garbage_in_what_was_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 5, done.stderr
    assert done.stdout.split() == ["True", "True", "True"]
