"""Each slot's own log file, every line saying where it was: `[gen 3 | replica 1 | slot 12 | step 480]`."""

from __future__ import annotations

import logging
from pathlib import Path

_ROOT = "nep"


class _Place(logging.Filter):
    """Puts the place into every record."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        record.place = self.text
        return True


_place = _Place()


def log_to_file(path: Path) -> None:
    """Send this process's log to a file. Call once, in the trainer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.addFilter(_place)
    handler.setFormatter(logging.Formatter("%(asctime)s %(place)s %(levelname)s %(message)s"))
    logger = logging.getLogger(_ROOT)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def follow_generation(generation: int, replica: int, slot: int, step: int | None = None) -> None:
    """Where this slot is from now on."""
    where = f"gen {generation} | replica {replica} | slot {slot}"
    _place.text = f"[{where} | step {step}]" if step is not None else f"[{where}]"
