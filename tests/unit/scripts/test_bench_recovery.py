"""The recovery benchmark's command line: bad options are refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench_recovery.py"


def test_bad_options_are_named_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = f"--kills 0 --ranks 4,3 --peers nep,other --keep {tmp_path} --out {tmp_path}/none/out.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options.split()], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2
    for message in (
        "kills (0) must be",
        "ranks (4,3) must be of 2, 4, 8",
        "peers (other)",
        "must be an empty folder",
        "none does not exist",
    ):
        assert message in done.stderr
