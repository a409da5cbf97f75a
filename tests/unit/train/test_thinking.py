"""The planner thinks beside the steps: nobody waits long for it, and what it says too late is not heard."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from nep.train import proposals
from nep.train.adjustments import Adjustment
from nep.train.balance_config import BalanceConfig
from nep.train.thinking import Thinker, Thought
from tests.unit.train.test_rebalance import PROFILE, Job


def adjustment(kind: Any = "rebalance") -> Adjustment:
    return Adjustment(
        kind=kind, step=1, what="", why="", predicted_gain=0.0, predicted_move_s=0.0, moved_bytes=0, speeds_ppm={}
    )  # fmt: skip


def test_one_thought_at_a_time_and_the_first_plan_ends_it() -> None:
    plan, go, asked = Job(BalanceConfig()).plan, threading.Event(), list[str]()

    def none() -> Any:
        go.wait(20)
        asked.append("none")
        return None, adjustment(), ("a line",)

    def some() -> Any:
        asked.append("some")
        return plan, adjustment(), ()

    def fails() -> Any:
        raise ValueError("does not fit")

    thinker = Thinker()
    thought = Thought(
        base=(1, 1), step=4,
        questions=[("rebalance", fails), ("compensation", none), ("rebalance", some), ("rebalance", fails)],
    )  # fmt: skip
    thinker.begin(thought)
    start = time.monotonic()
    assert thinker.take(0.05) is None and thinker.is_busy and time.monotonic() - start < 5
    with pytest.raises(RuntimeError, match="one thought at a time"):
        thinker.begin(thought)
    go.set()
    done = thinker.take(20)
    assert done is thought and not thinker.is_busy and thinker.take() is None
    assert asked == ["none", "some"]
    assert [answer.problem for answer in done.answers] == ["does not fit", "", ""]
    assert done.answers[1].lines == ("a line",) and done.answers[2].plan is plan


@pytest.mark.parametrize("over", [False, True], ids=["plan still in force", "plan not in force any more"])
def test_a_slow_planner_holds_up_no_step(monkeypatch: pytest.MonkeyPatch, over: bool) -> None:
    go, begun, make = threading.Event(), threading.Event(), proposals.make_plan

    def slow(request: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return make(request)

    monkeypatch.setattr(proposals, "make_plan", slow)
    job = Job(BalanceConfig(rebalance_every=6, hardware=PROFILE), patience_s=0.0)
    job.counts[:, 0] *= 12
    job.run(20)
    assert begun.is_set() and not job.plans and not job.said, "it went on for 14 steps"
    if over:
        job.plan = replace(job.plan, number=job.plan.number + 1)
    go.set()
    balance = job.balances[0]
    deadline = time.monotonic() + 60
    while balance._thinker.is_busy and time.monotonic() < deadline:
        job.run(1)
        time.sleep(0.05)
    job.run(2)
    assert bool(job.plans) != over


def test_a_planner_that_breaks_is_heard_of_and_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(request: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(proposals, "make_plan", breaks)
    job = Job(BalanceConfig(rebalance_every=6, hardware=PROFILE))
    job.run(7)
    assert not job.plans and any("skip: 'a bug'" in line for line in job.said)
    assert "the planner failed" in caplog.text and "Traceback" in caplog.text
