"""The emulation benchmark: what it prints is labelled, predicted, and not about this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench_emulated.py"


def run(arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments.split()],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_quick_slept_case_is_labelled_and_predicted() -> None:
    done = run("--quick --only failed --json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (case,) = found["cases"].values()
    assert found["label"] == case["label"] == "emulated"
    assert case["timeline_ratio"] == pytest.approx(1.0, abs=0.05)
    # A busy machine makes it longer, nothing makes it shorter.
    assert case["emulated_s"] > 0.99 * case["timeline_s"]
    assert case["cpu_share"] < 0.5
    assert 0 < found["overlap"] < 1


@pytest.mark.parametrize(("arguments", "what"), [("--only nobody", "no case"), ("--steps 2", "at least 3")])
def test_bad_options_are_refused(arguments: str, what: str) -> None:
    done = run(arguments)
    assert done.returncode == 2
    assert what in done.stderr
