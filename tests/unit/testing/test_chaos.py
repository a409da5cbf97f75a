"""The chaos suite itself: that the matrix is complete, victims are what they are called, and verdicts can be bad."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from nep.planning.cluster import Cluster
from nep.planning.planner import lost_intervals, plan_after_failure, plan_from_scratch, plan_mirrors
from nep.planning.shapes import parameter_lines, preset
from nep.testing.chaos.__main__ import main
from nep.testing.chaos.cases import KINDS, LOSSES, PAIR, PHASES, REPLICA, STORE, VICTIMS, Case, Series, matrix, series
from nep.testing.chaos.page import Result, page, results_in
from nep.testing.chaos.play import Played, Twin
from nep.testing.chaos.verdict import judge
from nep.testing.chaos.victims import choose, companion_for
from nep.testing.jobs import JobOutcome

LINES = parameter_lines(preset("debug"))
TWIN = Twin(data=Path("none"), losses=[5.0 - 0.1 * step for step in range(11)], params={"w": torch.ones(3).double()})


def test_the_matrix_is_whole() -> None:
    cells = {(case.kind, case.phase, case.victims) for one in matrix() for case in one.cases}
    expected = set(itertools.product([kind for kind in KINDS if kind != STORE], PHASES, VICTIMS))
    assert cells >= expected | {(STORE, phase, "one") for phase in PHASES} | {("kill", phase, PAIR) for phase in PHASES}
    assert {kind for kind, _, victims in cells if victims == PAIR} == set(LOSSES)
    assert len({one.name for one in matrix()}) == len(matrix())
    for one in matrix():
        assert len({case.ends_job for case in one.cases}) == 1, "a job that ends cannot go on to the next case"


def test_bad_options_are_named_before_anything_is_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--base-s", "0", "--slack-s", "-1", "--page", "/nonexistent/page.md"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ("base_s (0.0)", "slack_s (-1.0)", "page (/nonexistent/page.md)"))


def test_a_series_is_read_as_it_was_written(tmp_path: Path) -> None:
    for one in matrix():
        one.write(tmp_path / "series.json")
        assert Series.read(tmp_path / "series.json") == one
    with pytest.raises(ValueError, match="kill, lunch, one must be of kinds kill, "):
        Case(kind="kill", phase="lunch")


@pytest.mark.parametrize("num_slots", [4, 6])
@pytest.mark.parametrize("victims", [*VICTIMS, PAIR])
def test_victims_are_what_they_are_called(num_slots: int, victims: str) -> None:
    cluster = Cluster.uniform(num_slots, num_slots // 2)
    plan = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=8)
    found = {choose(plan, LINES, victims, number) for number in range(40)}
    assert () not in found
    for slots in found:
        left = [slot for slot in plan.slots if slot not in slots]
        assert bool(lost_intervals(plan, left, LINES)) == (victims == PAIR)
        assert (slots in plan.replicas) == (victims == REPLICA) or num_slots == 4
    assert {slot for slots in found for slot in slots} == set(range(num_slots)), "everybody gets a turn"
    one = choose(plan, LINES, "one", 3)
    companion = companion_for(plan, LINES, one, 0)
    assert companion is not None and companion not in one
    assert not lost_intervals(plan, [slot for slot in plan.slots if slot not in (*one, companion)], LINES)


def test_nobody_qualifies_where_a_loss_has_not_been_made_good() -> None:
    cluster = Cluster.uniform(2, 1)
    plan = plan_from_scratch(cluster, LINES, num_replicas=2, global_batch_size=8)
    alone = plan_after_failure(plan, cluster.fail([1]), LINES)
    assert choose(alone, LINES, "one", 0) == ()
    assert choose(plan_mirrors(alone, cluster.fail([1]), LINES), LINES, "two of two replicas", 0) == ()


def played(events: list[dict[str, Any]], **changes: Any) -> Played:
    """A job of four slots that trained to the end, and saw these events."""
    result = {"loss": TWIN.losses, "lost_steps": 0, "lost_samples": 0, "repeated_samples": 0}
    result |= {"unprotected_intervals": 0} | changes.pop("result", {})
    fields = {"returncode": 0, "result": result, "params": TWIN.params, "output": "", "seconds": 1.0, "orphans": 0}
    return Played(outcome=JobOutcome(**{**fields, **changes}), events=events, newest_step=0, ended_at=200.0)


def events_of(kind: str, *, answered_s: float = 0.3, lost: tuple[int, ...] = (2,)) -> list[dict[str, Any]]:
    name = f"{kind}, vote, one"
    recovery = {"event": "recovery", "entered_at": 100.1}
    return [
        {
            "event": "chosen",
            "case": name,
            "time": 99.0,
            "victims": [2],
            "roles": {"2": []},
            "replicas": [[0, 1], [2, 3]],
        },
        {"event": "failure", "case": name, "slot": 2, "time": 100.0, "kind": kind},
        {**recovery, "resumed_at": 100.0 + answered_s, "failed_slots": list(lost), "size": 3, "time": 101},
        {**recovery, "entered_at": 101.0, "resumed_at": 106.0, "failed_slots": [], "size": 4, "time": 106},
    ]


def wrong_with(kind: str, job: Played) -> list[str]:
    (verdict,) = judge(series("s", [(kind, "vote", "one")]), [job], TWIN)
    return verdict.wrong


def test_a_job_that_kept_its_promises() -> None:
    (verdict,) = judge(series("s", [("kill", "vote", "one")]), [played(events_of("kill"))], TWIN)
    assert verdict.wrong == [] and verdict.slots == [2]
    assert verdict.answered_s == pytest.approx(0.3) and verdict.full_size_s == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("kind", "events", "changes", "says"),
    [
        ("kill", events_of("kill", answered_s=2.1), {}, "answered after 2.10 s, 2 s allowed"),
        ("stop", events_of("stop", answered_s=2.9), {}, ""),
        ("stop", events_of("stop", answered_s=3.1), {}, "answered after 3.10 s, 3 s allowed"),
        ("kill", events_of("kill", lost=(1, 2)), {}, "slots [1] were lost, too"),
        ("kill", events_of("kill", lost=()), {}, "slots [2] were not found to be lost"),
        ("slow", events_of("slow"), {}, "slots [2] were lost, too"),
        ("slow", events_of("slow")[:2], {}, ""),
        ("kill", events_of("kill")[:3], {}, "the job did not come back to full size"),
        ("kill", events_of("kill")[:1], {}, "the failure of slots [2] did not fire"),
        ("kill", [], {}, "it was not come to"),
        ("kill", events_of("kill"), {"orphans": 1}, "1 processes were left behind"),
        ("kill", events_of("kill"), {"returncode": 3}, "the last job ended with exit code 3"),
        ("kill", events_of("kill"), {"result": {"repeated_samples": 8}}, "repeated_samples: 8"),
        ("kill", events_of("kill"), {"result": {"loss": TWIN.losses[:-1]}}, "there are no losses of steps 11 to 11"),
        ("kill", events_of("kill"), {"params": {"w": torch.ones(3).double() + 1e-9}}, "w differs from the twin's"),
    ],
)
def test_a_broken_promise_is_named(kind: str, events: list[dict[str, Any]], changes: dict[str, Any], says: str) -> None:
    wrong = wrong_with(kind, played(events, **changes))
    assert wrong[0] == says if says else wrong == []


def test_a_case_for_which_nobody_qualifies_is_no_success(tmp_path: Path) -> None:
    job = played([{"event": "nobody", "case": "kill, vote, one", "time": 99.0}])
    (verdict,) = judge(series("s", [("kill", "vote", "one")]), [job], TWIN)
    assert verdict.not_played and not verdict.wrong


def test_a_loss_that_differs_in_the_thirteenth_digit_is_found() -> None:
    losses = list(TWIN.losses)
    losses[6] *= 1 + 3e-12
    assert wrong_with("kill", played(events_of("kill"), result={"loss": losses})) == [
        "loss of steps [7] differs from the twin's"
    ]


def test_the_page_has_what_was_played_and_what_went_wrong(tmp_path: Path) -> None:
    verdicts = judge(series("s", [("kill", "vote", "one")]), [played(events_of("kill", answered_s=2.5))], TWIN)
    common = {"date": "2026-01-02 03:04", "machine": "a machine", "commit": "abc", "jobs": 1, "seconds": 9.0}
    common |= {"base_s": 1.0, "slack_s": 0.0}
    Result(series="kill, one", verdicts=verdicts, **common).write(tmp_path)
    text = page(results_in(tmp_path))
    assert "**2.50** (!)" in text and "answered after 2.50 s, 2 s allowed" in text and "2026-01-02 03:04" in text
    assert "0 of 1 cases played" in text
    assert "Not played: kill, two of a replica; " in text and "Not played: kill, one" not in text
