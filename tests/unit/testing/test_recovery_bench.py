"""The recovery benchmark: what it reads off journals is what happened, and its plain job goes on from a checkpoint."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nep.fault_tolerance.timeline import PHASES
from nep.testing.recovery_bench.compare import NEP_SPREAD, NEP_WHOLE, RESTART, TORCHFT_TUNED, Case, cases_of, measure
from nep.testing.recovery_bench.figures import Figures, Kill, ledger
from nep.testing.recovery_bench.journal import Event, Journal, Mark, Marks, Reader
from nep.testing.recovery_bench.kills import Pace, redraw
from nep.testing.recovery_bench.markdown import BEGIN, END, replace_results
from nep.testing.recovery_bench.pages import broken_promises, picture, ratios, targets
from nep.testing.recovery_bench.restart_worker import load, plain_job, save
from nep.testing.recovery_bench.work import Work
from nep.train.data import expected_hash

BATCH = 16


def step(number: int, t: float, size: int = 2, generation: int = 1, **more: object) -> Event:
    used = {"samples": BATCH, "sample_hash": expected_hash((number - 1) * BATCH, BATCH)}
    return {"kind": "step", "t": t, "step": number, "size": size, "generation": generation, **used, **more}


def recovery(generation: int, entered: float, agreed: float, rebuilt: float, moved: float) -> Event:
    marks = {"entered_at": entered, "agreed_at": agreed, "rebuilt_at": rebuilt, "moved_at": moved}
    return {"kind": "recovery", "t": moved + 0.5, "generation": generation, **marks}


def killed(*, waiting: bool = True) -> Kill:
    return Kill(rank=1, at=10.0, generation=1, mark=Mark(waiting=waiting, what="tokens", phase="dispatch"))


def nep_events() -> dict[int, list[Event]]:
    """Rank 1 is killed at 10.0 in step 4, which rank 0 commits alone at 10.6; both train again from 11.5."""
    before = [step(number, 6.5 + number) for number in (1, 2, 3)]
    alone = [recovery(2, 10.1, 10.15, 10.2, 10.3), step(4, 10.6, 1, 2), step(5, 11.0, 1, 2)]
    return {0: [*before, *alone, step(6, 11.5, 2, 3)], 1: [*(dict(one) for one in before), step(6, 11.5, 2, 3)]}


def test_a_recovery_is_read_off_the_journals() -> None:
    summary = Figures.of(nep_events(), [killed()], 2).summary()
    assert summary["step_s"] == pytest.approx(1.0)
    assert summary["recovery_s"]["p50"] == summary["caught_up_s"]["p50"] == pytest.approx(0.6)
    assert summary["recovery_less_step_s"]["p50"] == pytest.approx(-0.4)
    assert summary["full_size_s"]["p50"] == pytest.approx(1.5)
    phases = [summary["phases_s"][phase]["p50"] for phase in PHASES]
    assert phases == pytest.approx([0.1, 0.05, 0.05, 0.1, 0.3])
    assert summary["undone_steps"] == summary["dropped_steps"] == 0
    assert summary["inside_collective"]["all"] == pytest.approx([0.6])
    assert summary["between_collectives"]["all"] == []


def test_a_step_of_the_old_membership_is_no_recovery() -> None:
    events = nep_events()
    events[0].insert(3, step(4, 10.05))  # the vote was complete before the kill; only rank 0 has written it down
    events[0][5] = step(5, 10.6, 1, 2)
    del events[0][6]
    assert Figures.of(events, [killed()], 2).summary()["recovery_s"]["p50"] == pytest.approx(0.6)


def test_a_step_that_is_rolled_forward_is_neither_recovery_nor_undone() -> None:
    events = nep_events()
    events[2] = [*(dict(one) for one in events[0])]
    for one in (*events[0], *events[1], *events[2]):
        one["size"] = one.get("size", 0) + 1
    events[0].insert(3, step(4, 10.05, 3))  # rank 0 saw the vote, rank 2 hears of it in the recovery
    events[2].insert(4, step(4, 10.25, 2, 2, rolled=True))
    for rank in (0, 2):
        del events[rank][5]  # step 4 in the new membership
    (outcome,) = Figures.of(events, [killed()], 3).outcomes
    assert outcome.undone_steps == 0 and outcome.recovery_s == pytest.approx(1.0)


def test_what_only_the_killed_rank_saw_committed_is_replayed_and_not_undone() -> None:
    events = nep_events()
    events[1].insert(3, step(4, 9.99))
    (outcome,) = Figures.of(events, [killed()], 2).outcomes
    assert outcome.undone_steps == 0 and outcome.recovery_s == pytest.approx(0.6)


def test_a_restart_undoes_steps_and_torchft_drops_one() -> None:
    undone = {rank: [*(step(n, 6.5 + n) for n in (1, 2, 3)), step(2, 15.0, 2, 2)] for rank in (0, 1)}
    for rank in undone:
        undone[rank] += [step(3, 16.0, 2, 2), step(4, 17.0, 2, 2)]
    (outcome,) = Figures.of(undone, [killed()], 2).outcomes
    assert outcome.undone_steps == 2 and outcome.phases_s is None
    assert (outcome.recovery_s, outcome.caught_up_s, outcome.full_size_s) == (5.0, 7.0, 5.0)
    dropped = nep_events()
    dropped[0].insert(3, {"kind": "dropped", "t": 10.2, "step": 4, "generation": 1, "samples": 8})
    assert Figures.of(dropped, [killed()], 2).outcomes[0].dropped_steps == 1


def test_kills_without_an_end_are_refused() -> None:
    events = {rank: one[:-1] for rank, one in nep_events().items()}
    with pytest.raises(ValueError, match="no step of all 2 ranks follows the kill of rank 1"):
        Figures.of(events, [killed()], 2)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda events: None, (0, 0, 0, 0)),
        (lambda events: events[0].pop(4), (1, BATCH, 0, 0)),  # step 4 is nowhere
        (lambda events: events[0].insert(5, step(4, 10.7, 1, 2)), (0, 0, BATCH, 0)),
        (lambda events: events[0][4].update(sample_hash=1), (0, BATCH, BATCH, 0)),
        (lambda events: events[0][0].update(samples=BATCH - 1), (0, 1, 0, 1)),
    ],
)
def test_the_ledger_finds_what_is_lost_and_repeated(change: object, found: tuple[int, ...]) -> None:
    events = nep_events()
    change(events)  # type: ignore[operator]
    assert tuple(ledger(events, BATCH).values()) == found


def test_journal_and_mark_outlive_a_kill(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        journal, marks = Journal(tmp_path, 3), Marks(tmp_path, 3)
        marks.come_by("dispatch")
        marks.enter("the token counts of a dispatch, which are longer than there is room")
        journal.write("step", step=1, size=1, generation=1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    reader = Reader(folder=tmp_path)
    assert [event["kind"] for event in reader.look()[3]] == ["up", "step"]
    assert reader.pid(3) == pid
    with (tmp_path / "events3.jsonl").open("a") as file:
        file.write('{"kind": "up", "t": 1, "pid": 7}\n{"kind": "st')
        file.flush()
        assert len(reader.look()[3]) == 3 and reader.pid(3) == 7, "half a line is read when it is whole"
        file.write('ep", "t": 2}\n')
    assert reader.look()[3][-1] == {"kind": "step", "t": 2}
    mark = Marks.read(tmp_path, 3)
    assert mark.waiting and mark.phase == "dispatch" and mark.what.startswith("the token counts of a dispatch")


def test_moments_are_drawn_until_the_rank_is_where_it_is_wanted(tmp_path: Path) -> None:
    marks, slept = Marks(tmp_path, 0), []

    class Draws(random.Random):
        def uniform(self, a: float, b: float) -> float:
            slept.append(b)
            if len(slept) == 3:
                marks.enter("tokens")
            return 0.0

    redraw(tmp_path, 0, True, Draws())
    assert len(slept) == 3
    redraw(tmp_path, 0, True, Draws())
    assert len(slept) == 3, "it is there already"
    redraw(tmp_path, 0, False, Draws())
    assert 3 < len(slept) < 100, "not for ever"
    redraw(tmp_path, 1, True, Draws())  # a peer that marks nothing


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_the_plain_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    work = Work(folder=tmp_path, batch=2, seq_len=16, steps=10)
    whole, first, second = (plain_job(work, 2) for _ in range(3))
    losses = [whole.step() for _ in range(4)]
    assert [first.step(), first.step()] == losses[:2]
    load(second, tmp_path, 0)
    assert second.steps_done == 0, "there is no checkpoint yet"
    save(first, tmp_path, 0)
    load(second, tmp_path, 0)
    assert [second.step(), second.step()] == losses[2:] and second.steps_done == 4
    states = whole.state(with_shared=True), second.state(with_shared=True)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def result(kind: str, ranks: int, seconds: float, **more: object) -> dict[str, object]:
    facts = {"machine": "a machine", "when": "2026-11-30 12:00"}
    facts |= {"lost_steps": 0, "lost_samples": 0, "repeated_samples": 0, "disagreements": 0}
    summary = Figures.of(nep_events(), [killed()], 2).summary()
    for name in ("recovery_s", "caught_up_s", "full_size_s"):
        summary[name] = {"p50": seconds, "p95": 2 * seconds, "all": [seconds]}
    return {**summary, **facts, "kind": kind, "ranks": ranks, **more}


def test_each_peer_is_compared_with_its_own_layout(tmp_path: Path) -> None:
    results = [result(NEP_SPREAD, 4, 0.2), result(NEP_WHOLE, 4, 0.1), result(RESTART, 4, 5.0)]
    failed = {"kind": RESTART, "ranks": 8, "failed": "it never came back", "machine": "another", "when": "2026-11-30"}
    results += [result(TORCHFT_TUNED, 4, 0.5), failed]
    assert [(one["kind"], one["recovery"]) for one in ratios(results)] == [(RESTART, 25.0), (TORCHFT_TUNED, 5.0)]
    assert all(one["met"] for one in targets(results))
    slow = {**results[0], "inside_collective": {"p50": 0.5}, "between_collectives": {"p50": 0.4}}
    (place,) = [one for one in targets([slow]) if "inside" in one["target"]]
    assert place["value"] == pytest.approx(1.25) and not place["met"]
    assert not broken_promises(results)
    text = picture(results, 140)
    page = tmp_path / "page.md"
    page.write_text("before")
    with pytest.raises(ValueError, match="has no lines"):
        replace_results(page, {})
    report = {
        "results": results,
        "ratios": ratios(results),
        "targets": targets(results),
        "broken": [],
        "commit": "c0ffee",
    }
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        replace_results(page, report)
    written = page.read_text()
    assert written.startswith("before") and written.endswith("after\n") and "old" not in written
    assert "| torchrun restart | nep, experts spread | 4 | 25.0 | 25.0 | 25.0 |" in written
    assert "it never came back" in text and "inside a collective" in text
    results[0]["lost_samples"] = 16
    results[1] = {"kind": NEP_WHOLE, "ranks": 4, "failed": "it hangs"}
    assert broken_promises(results) == [
        f"{NEP_SPREAD}, 4 ranks: lost_samples is 16, not 0",
        f"{NEP_WHOLE}, 4 ranks: it hangs",
    ]


def test_without_torchft_its_cases_are_left_out(tmp_path: Path) -> None:
    now, left_out = cases_of(["nep", "torchft"], [4], None)
    assert len(now) == len(left_out) == 2
    assert cases_of(["torchft"], [4], tmp_path) == (left_out, [])


@pytest.mark.soak
@pytest.mark.parametrize("kind", [NEP_WHOLE, RESTART])
def test_a_rank_is_killed_for_real(kind: str, tmp_path: Path) -> None:
    found = measure(Case(kind=kind, ranks=2), Pace(kills=1, seed=1), keep=tmp_path)
    assert "failed" not in found, found
    assert found["kills"] == 1 and found["lost_steps"] == found["lost_samples"] == 0
    assert 0 < found["recovery_s"]["p50"] <= found["full_size_s"]["p50"]
    assert kind == RESTART or not broken_promises([found])
