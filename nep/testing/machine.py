"""Where a benchmark's figures are from."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def machine_text(*packages: str) -> str:
    """Processor, cores that this process may use, load of the last minute, and releases.

    Args:
        packages: to name beside Python.
    """
    releases = ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)])
    return f"{_processor()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; {releases}"


def _processor() -> str:
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        rows = []
    named = [row.partition(":")[2].strip() for row in rows if row.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
