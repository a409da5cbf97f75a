"""Alerts: when they are sent, to commands and to webhooks, and what a bad target or a broken one does."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nep.planning.cluster import Cluster
from nep.planning.plan import Plan
from nep.planning.planner import plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.shapes import parameter_lines, preset
from nep.train import alerts
from nep.train.alerts import Alert, Alerts, deliver, target_problems

LINES = parameter_lines(preset("debug"))


def an_alert() -> Alert:
    return Alert(
        event="degraded",
        text="job x, step 3: 3 of 4 slots train",
        run_id="x",
        step=3,
        generation=2,
        live_slots=(0, 1, 3),
        missing_slots=(2,),
        unprotected_intervals=0,
    )


class _Store:
    """A control store of one connection."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def compare_and_set(self, key: str, expected: str, value: str) -> str:
        return self.values.setdefault(key, value)


def a_run(store: _Store, slot: int = 0) -> Any:
    """What alerts look at of a slot's run."""
    return SimpleNamespace(
        slot=slot,
        job=SimpleNamespace(num_slots=4, run_id="x"),
        wanted_members=4,
        connections=SimpleNamespace(take=lambda: store),
        recipe=SimpleNamespace(lines=LINES),
        progress=SimpleNamespace(tx=3),
        generation=SimpleNamespace(number=1),
        current=SimpleNamespace(number=1),
        state=SimpleNamespace(plan=None),
    )


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, Any]], list[int]]]:
    """URL, what it got, and the status codes to answer with (200 when there are none)."""
    got: list[dict[str, Any]] = []
    answers: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers.pop(0) if answers else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return None

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", got, answers
    server.shutdown()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "_RETRIES_S", (0.0, 0.0, 0.0))


def test_a_command_reads_the_alert(tmp_path: Path) -> None:
    assert deliver(f"tee {tmp_path / 'a b'!s}".replace("a b", "'a b'"), an_alert())
    found = json.loads((tmp_path / "a b").read_text())
    assert found["schema"] == 1 and found["event"] == "degraded" and found["missing_slots"] == [2]


def test_a_webhook_gets_the_alert_and_is_tried_again(webhook: tuple[str, list[dict[str, Any]], list[int]]) -> None:
    url, got, answers = webhook
    answers += [500, 503]
    assert deliver(url, an_alert())
    assert [one["step"] for one in got] == [3, 3, 3]


@pytest.mark.parametrize("target", ["false", "http://127.0.0.1:1/", "/nowhere/program"])
def test_what_cannot_be_told_is_logged_and_harms_nobody(target: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert not deliver(target, an_alert())
    assert f"could not tell {target}" in caplog.text and "3 of 4 slots train" in caplog.text


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("no-such-program --x", "there is no program 'no-such-program'"),
        ("", "there is no program ''"),
        ("tee 'x", "No closing quotation"),
        ("https:///path", "a URL without a host"),
    ],
)
def test_bad_targets_are_named(target: str, problem: str) -> None:
    (found,) = target_problems(target)
    assert problem in found
    assert target_problems("https://example.org/x") == target_problems("tee file") == []


def conditions(redundancy: str) -> tuple[list[Plan], list[str]]:
    """Plans of a job that loses slot 2, completes its mirrors and gets it back, and what happened."""
    cluster = Cluster.uniform(4, 4)
    whole = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=8, redundancy=redundancy)  # type: ignore[arg-type]
    after = plan_after_failure(whole, cluster.fail([2]), LINES)
    mirrored = plan_mirrors(after, cluster.fail([2]), LINES)
    return [whole, after, mirrored, whole], ["start", "slots [2] are dead", "slots [2] are dead", "slots [2] return"]


@pytest.mark.parametrize(
    ("redundancy", "events"), [("device", ["unprotected", "degraded", "whole"]), ("none", ["degraded", "whole"])]
)
def test_each_change_is_told_once_by_whoever_is_first(tmp_path: Path, redundancy: str, events: list[str]) -> None:
    store, file = _Store(), tmp_path / "told"
    for slot in (0, 1):
        run, mine = a_run(store, slot), Alerts(f"tee -a {file}")
        for number, (plan, reason) in enumerate(zip(*conditions(redundancy), strict=True), 1):
            run.state.plan, run.generation.number, run.current.number = plan, number, number
            mine.look(run, reason)
            mine.look(run, reason)  # the same plan again is no news
        mine.finish()
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["event"] for one in told] == events
    assert all((one["unprotected_intervals"] > 0) == (one["event"] == "unprotected") for one in told)
    assert told[0]["missing_slots"] == [2] and told[-1]["missing_slots"] == []
    assert "may need a checkpoint" in told[0]["text"] or redundancy == "none"


def test_who_comes_back_to_a_damaged_job_says_nothing_new(tmp_path: Path) -> None:
    """Its first look at a job that is whole again is the others' news, under the same key."""
    store, file = _Store(), tmp_path / "told"
    plans, _ = conditions("device")
    for slot in (0, 2):
        run, mine = a_run(store, slot), Alerts(f"tee -a {file}")
        run.state.plan, run.generation.number, run.current.number = plans[1], 2, 2
        if slot == 0:
            mine.look(run, "slots [2] are dead")
        run.state.plan, run.generation.number, run.current.number = plans[0], 3, 3
        mine.look(run, "slots [2] return")
        mine.finish()
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["unprotected", "whole"]


def test_a_job_that_stops_says_why_and_with_which_code(tmp_path: Path) -> None:
    run, mine = a_run(_Store()), Alerts(f"tee -a {tmp_path / 'told'}")
    run.state.plan, run.generation = conditions("device")[0][0], None
    mine.stopped(run, "no checkpoint", 3)
    mine.finish()
    told = json.loads((tmp_path / "told").read_text())
    assert (told["event"], told["exit_code"], told["text"]) == ("stopped", 3, "job x, step 3: no checkpoint")
