"""The line that says what planning is at."""

import io
import time

import pytest
from rich.console import Console

from nep.report.plan_status import PlanStatus


def _console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=terminal, width=80), written


def test_short_plans_are_made_in_silence() -> None:
    console, written = _console(terminal=True)
    with PlanStatus(console, silent_s=60.0) as status:
        status.tell("repair")
    assert "repair" not in written.getvalue()


def test_long_ones_say_what_they_are_at_and_leave_nothing_behind() -> None:
    console, written = _console(terminal=True)
    with PlanStatus(console, silent_s=0.0) as status:
        status.tell("whole experts")
        deadline = time.monotonic() + 10
        while "planning: whole experts" not in written.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "planning: whole experts" in written.getvalue()
    assert written.getvalue().endswith("\x1b[2K")  # the line is erased


def test_a_log_has_no_such_line_and_errors_pass_through() -> None:
    console, written = _console(terminal=False)
    status = PlanStatus(console, silent_s=0.0)
    status.tell("repair")

    def fails() -> None:
        with status:
            raise ValueError("memory")

    with pytest.raises(ValueError, match="memory"):
        fails()
    assert written.getvalue() == ""
