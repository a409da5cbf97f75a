"""Measured speed-power curves: CSV of limits and speeds, also as Zeus writes them, or JSON with knots."""

import csv
import io
import json
import re
from pathlib import Path

from nep.planning.speed_curve import SpeedCurve
from nep.report.readers.files import read_text

_FORMS = (
    "columns limit_w,speed; Zeus' power_limit,time_per_epoch or window_name,elapsed_time; or JSON with knots "
    "[[watts, speed], ...]"
)


def read_curve(path: Path) -> SpeedCurve:
    """The curve in a file; samples are fitted (`SpeedCurve.fit`).

    Raises:
        ValueError: it cannot be read, or says nothing about power and speed.
    """
    text = read_text(path, "a speed-power curve")
    try:
        if text.lstrip().startswith("{"):
            value = json.loads(text)
            knots = tuple((float(watts), float(speed)) for watts, speed in value["knots"])
            return SpeedCurve(knots, str(value.get("source", path)))
        return SpeedCurve.fit(_samples(text), source=str(path))
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: {problem}; a curve is {_FORMS}") from error


def _samples(text: str) -> list[tuple[float, float]]:
    rows = list(csv.DictReader(io.StringIO(text)))
    columns = set(rows[0]) if rows else set()
    if {"limit_w", "speed"} <= columns:
        return [(float(row["limit_w"]), float(row["speed"])) for row in rows]
    if {"power_limit", "time_per_epoch"} <= columns:
        jobs = {tuple(row[name] for name in ("dataset", "network", "batch_size") if name in row) for row in rows}
        if len(jobs) > 1:
            raise ValueError(f"times of {len(jobs)} jobs do not compare; leave one dataset, network and batch size")
        return [(float(row["power_limit"]), 1 / float(row["time_per_epoch"])) for row in rows]
    if {"window_name", "elapsed_time"} <= columns:
        found = []
        for row in rows:
            if limit := re.search(r"_(\d+)$", row["window_name"]):
                found.append((float(limit[1]), 1 / float(row["elapsed_time"])))
        return found
    raise ValueError(f"columns {sorted(map(str, columns))} say nothing about power and speed")
