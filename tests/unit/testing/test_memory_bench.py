"""What the memory benchmark rests on: an allocator that sees every storage, and a timeline that says what was alive."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import scripts.bench_memory as bench
from nep.planning.cluster import Cluster
from nep.planning.layout import Layout
from nep.planning.planner import plan_from_scratch
from nep.testing.jobs import REPOSITORY
from nep.testing.memory_bench.cases import CASES, Case, more_to_hold, num_parameters
from nep.testing.memory_bench.counting import EVENT, compile_allocator, find_compiler
from nep.testing.memory_bench.jobs import SlotMemory, measured_kinds
from nep.testing.memory_bench.timeline import Mark, Timeline

# In a process of its own, since an allocator stays: storages whose sizes and lives are known, one of them freed by
# another thread, and a matrix product's operands that live on in the graph until backward has run.
_KNOWN = """
import json, sys, threading
from pathlib import Path
import torch
from nep.testing.memory_bench.counting import CountingAllocator
from nep.testing.memory_bench.timeline import Mark, Timeline

allocator = CountingAllocator(Path(sys.argv[1]))
CountingAllocator(Path(sys.argv[1]))  # counts once
marks = []
def mark(name, kinds=None):
    marks.append(Mark(at=allocator.num_events, name=name, kinds=kinds or {}))

kept = torch.zeros(1000, dtype=torch.float64)                    # 8000 bytes, for good
mark("begin", {kept.data_ptr(): "kept"})
box = [torch.empty(500, dtype=torch.float32)]                    # 2000 bytes
mark("two")
thread = threading.Thread(target=box.clear)
thread.start(); thread.join()
mark("one")
x = torch.ones(10, 100, requires_grad=True)                      # 4000
w = torch.ones(100, 50, requires_grad=True)                      # 20000
y = x @ w                                                        # 2000
mark("product")
y.backward(torch.ones_like(y))
mark("gradients", {x.grad.data_ptr(): "x.grad", w.grad.data_ptr(): "w.grad"})
del y
kept.untyped_storage().resize_(0)
mark("end")
timeline = Timeline(allocator.events(), marks, {})
at = {mark.name: mark.at for mark in marks}
print(json.dumps({
    "begin to two": timeline.peak(at["begin"], at["two"]).total_bytes,
    "two to one": timeline.peak(at["two"], at["one"]).total_bytes,
    "one": timeline.peak(at["one"], at["one"]).total_bytes,
    "product": timeline.peak(at["product"], at["product"]).by_kind,
    "gradients": timeline.peak(at["gradients"], at["gradients"]).by_kind,
    "end": timeline.peak(at["end"], at["end"]).total_bytes,
}))
"""


@pytest.mark.skipif(find_compiler() is None, reason="counting storages needs a C++ compiler")
def test_every_storage_is_seen_whoever_frees_it(tmp_path: Path) -> None:
    library = compile_allocator(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _KNOWN, str(library)], cwd=REPOSITORY, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["begin to two"] == found["two to one"] == 8000 + 2000
    assert found["one"] == 8000
    assert found["product"] == {"": 4000 + 20_000 + 2000, "kept": 8000}
    assert found["gradients"] == {"": 4000 + 20_000 + 2000, "kept": 8000, "w.grad": 20_000, "x.grad": 4000}
    # The product and the storage that gave its memory back are gone.
    assert found["end"] == 2 * (4000 + 20_000)


def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"install g\+\+"):
        compile_allocator(tmp_path)


def _events(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(list(pairs), dtype=EVENT)


def test_kinds_follow_storages_and_not_addresses() -> None:
    # Address 1 is used twice; the mark at 4 names its second life only.
    events = _events((1, 10), (2, 5), (1, -10), (1, 7), (3, 100), (3, -100))
    timeline = Timeline(events, [Mark(at=4, name="now", kinds={1: "second", 9: "unknown"})], {})
    first, last = timeline.peak(0, 2), timeline.peak(2, 4)
    assert (first.total_bytes, first.at, first.by_kind) == (15, 2, {"": 15})
    assert last.total_bytes == 15  # what is alive when the stretch begins counts
    assert timeline.peak(3, 4).by_kind == {"": 5, "second": 7}
    whole = timeline.peak(0, 6)
    assert (whole.total_bytes, whole.at) == (112, 5)


def test_scopes_name_what_is_born_in_them_and_old_is_told_from_new() -> None:
    events = _events((1, 10), (2, 20), (3, 30), (4, 40))
    marks = [Mark(at=0, name="forward"), Mark(at=1, name="staging"), Mark(at=2, name="backward"), Mark(at=3, name="x")]
    timeline = Timeline(events, marks, {"forward": "activations", "staging": "staging", "backward": "workspace"})
    assert timeline.peak(0, 4).by_kind == {"activations": 10, "staging": 20, "workspace": 70}
    assert timeline.peak(0, 4, older=2).by_kind == {"activations (old)": 10, "staging (old)": 20, "workspace": 70}
    assert timeline.places("staging") == [1]
    assert [timeline.last_mark(at, ("forward", "backward")) for at in (0, 1, 2)] == ["forward", "forward", "backward"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_fewer_slots_must_hold_adds_up_to_what_was_lost(case: Case) -> None:
    lines = case.lines
    plan = plan_from_scratch(
        Cluster.uniform(case.num_slots, case.num_slots),
        lines,
        num_replicas=case.replicas,
        global_batch_size=case.global_batch_size,
        redundancy=case.redundancy,  # type: ignore[arg-type]
        lane_slots=case.tp,
    )
    live = [slot for slot in plan.slots if slot != case.failed]
    more = more_to_hold(case, plan, live)
    width = case.workload.accumulation_bytes
    total = num_parameters(lines) * (4 * width) * (1 if case.redundancy == "none" else 2)
    owned = total * (1 / len(live) - 1 / len(plan.slots))
    damaged = set(plan.replicas[plan.replica_of(case.failed)])
    assert set(more) == set(live)
    assert all(more[slot] == pytest.approx(owned, abs=1) for slot in live if slot not in damaged)
    # Every unit that is cut over a replica is held there as often as before.
    whole = Layout({axis: dict(plan.holders.by_slot(axis)) for axis in plan.holders.cuts if "experts" in axis})
    numel = {
        line.axis: sum(one.unit_numel for one in lines.values() if one.axis == line.axis) for line in lines.values()
    }
    lost = sum(whole.num_units(axis, case.failed) * numel[axis] for axis in whole.cuts)
    gained = sum(more[slot] - owned for slot in damaged & set(live))
    least = lost * (case.workload.parameter_bytes + width)
    assert gained > 0.999 * least if case.tp > 1 else gained == pytest.approx(least, rel=1e-3)


def test_cases_survive_the_way_to_a_worker_and_their_configs_hold_together() -> None:
    for case in CASES:
        assert Case.from_json(case.to_json()) == case
        case.config().check(case.shape, case.num_slots)
        plan = case.damaged_plan()
        assert plan.slots == tuple(range(case.num_slots - 1))


def _slot(slot: int, damaged: int, more: int = 50) -> SlotMemory:
    kinds = measured_kinds(
        {"parameters": 10, "gradients": 22, "state": 30, "mirrors": 6, "staging": 1, "activations": 2, "workspace": 3}
    )
    return SlotMemory(
        slot=slot,
        healthy=100,
        damaged=damaged,
        more_to_hold=more,
        healthy_kinds={"parameters": 100},
        damaged_kinds={"parameters": damaged},
        predicted_healthy=kinds,
        predicted_damaged=kinds,
        healthy_resident=200,
        damaged_resident=300,
        resident_before=50,
        changes=({"measured": 120, "left_over": 20, "predicted": 90, "received_only": 80, "resident": 1},),
    )


def test_the_summary_judges_the_worst_slot_of_all_cases() -> None:
    found = bench.summary({"a": [_slot(0, 140), _slot(1, 150)], "b": [_slot(0, 120, more=0)]})
    assert (found["memory_overhead"], found["case"], found["slot"]) == (pytest.approx(1.2), "b", 0)
    assert (found["raw"], found["raw_worst"], found["resident"]) == (pytest.approx(1.2), pytest.approx(1.5), 1.5)
    assert found["predicted_over_measured"] == [pytest.approx(74 / 150), pytest.approx(0.74)]
    assert found["change_predicted_over_measured"] == [pytest.approx(0.9)] * 2
    json.dumps(found, allow_nan=False)
    assert "memory_overhead 1.200 (target at most 1.10)" in bench.summary_text(found)
    text = bench.case_text(CASES[0], [_slot(0, 140), _slot(1, 150)])
    assert "slot 1" in text and "mirrored sums" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing like it"], "no case has 'nothing like it' in its name"),
        (["--timeout-s", "0"], "must be positive"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, capsys) -> None:
    assert bench.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
