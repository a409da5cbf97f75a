"""Each slot's log: every line says when and where."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nep.train.log import follow_generation, log_to_file


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The project's logger, put back as it was: a trainer changes it for its whole process."""
    root = logging.getLogger("nep")
    handlers, level, propagate = list(root.handlers), root.level, root.propagate
    yield logging.getLogger("nep.fault_tolerance.commit")
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    root.propagate = propagate


LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\[.*\] )? ?(INFO|WARNING) (.*)")


def test_every_line_has_its_place(logger: logging.Logger, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "slot12.log"
    log_to_file(path)
    follow_generation(3, 1, 12, 480)
    logger.warning("step %d was committed", 480)
    follow_generation(4, 0, 12)
    logger.info("members %s", (0, 12))
    logger.debug("too fine")
    places = [LINE.fullmatch(line) for line in path.read_text().splitlines()]
    assert [match and match.groups() for match in places] == [
        ("[gen 3 | replica 1 | slot 12 | step 480] ", "WARNING", "step 480 was committed"),
        ("[gen 4 | replica 0 | slot 12] ", "INFO", "members (0, 12)"),
    ]


def test_lines_go_to_the_file_alone(
    logger: logging.Logger, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Under a launcher all slots share one standard error, where a handler of the root logger may write."""
    log_to_file(tmp_path / "slot0.log")
    logger.warning("quiet")
    logging.getLogger("somebody.else").info("not ours")
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.name.startswith("nep")] == []
    assert (tmp_path / "slot0.log").read_text().count("\n") == 1
