"""The overhead benchmark: the peer trains what nep trains, and bad options are refused before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench_overhead.py"
SMALL = "--layers 1 --hidden-size 16 --ffn-hidden-size 32 --seq-len 16 --sequences-per-slot 3 --steps 1 --cycles 2"


def run(arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments.split()],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_peer_trains_the_same_model_on_the_same_samples() -> None:
    done = run(f"{SMALL} --dtype float64 --json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert 0 <= result["loss_difference"] < 1e-12
    assert set(result["seconds"]) == {"uniform", "mirrored", "uneven", "plain"}
    assert all(seconds > 0 for seconds in result["seconds"].values())
    assert result["nonuniform_work"] == pytest.approx(4 / 3, rel=0.05)
    low, high = result["interval_95"]["healthy_overhead"]
    assert low <= result["healthy_overhead"] <= high


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--slots 3", "slots (3) must be 2, 4 or 8"),
        ("--cycles 0", "cycles (0) must be at least 1"),
        ("--hidden-size 20", "hidden_size (20) must be a multiple of 16"),
        ("--dtype int8", "dtype ('int8') must be one of"),
    ],
)
def test_bad_options_are_named(arguments: str, message: str) -> None:
    done = run(arguments)
    assert done.returncode == 2 and message in done.stderr
