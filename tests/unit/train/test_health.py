"""Health checks: what a command says, and that a broken one harms nobody."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nep.train.health import HealthWatch, command_probe, command_problems


def until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("exit 0", None),
        ("echo XID 79 on $1; echo more; exit 1", "XID 79 on 5"),
        ("echo local $2 >&2; exit 2", "local 1"),
        ("exit 3", "ended with code 3"),
    ],
)
def test_a_command_says_what_is_wrong(tmp_path: Path, script: str, complaint: str | None) -> None:
    file = tmp_path / "check"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    found = command_probe(f"{file} {{slot}} {{local}}", slot=5, local_index=1)()
    assert found is complaint if complaint is None else found is not None and complaint in found


def test_it_is_asked_until_it_complains_and_an_error_is_no_complaint() -> None:
    answers: list[str | Exception | None] = [None, OSError("no such file"), None, "hot"]
    asked = []

    def probe() -> str | None:
        asked.append(1)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch = HealthWatch(probe, 0.001)
    until(lambda: watch.complaint is not None)
    assert watch.complaint == "hot" and len(asked) == 4


def test_it_can_be_stopped() -> None:
    asked: list[int] = []
    watch = HealthWatch(lambda: asked.append(1), 0.001)
    until(lambda: len(asked) > 2)
    watch.stop()
    time.sleep(0.05)
    before = len(asked)
    time.sleep(0.05)
    assert len(asked) == before and watch.complaint is None


def test_a_command_that_cannot_be_run_is_named() -> None:
    (problem,) = command_problems("no-such-check {slot}")
    assert "no program 'no-such-check'" in problem
    (problem,) = command_problems("true 'x")
    assert "is no command" in problem
    assert command_problems("true {slot}") == []
