"""Emulated accelerators run the real code, and the planner predicts how long it takes."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from models.mixtral import build
from nep.distributed.groups import Communicator
from nep.testing.emulation import run as emulated_run
from nep.testing.emulation.cases import QUICK_CASES, Case, compare
from nep.testing.emulation.links import EmulatedCommunicator
from nep.testing.emulation.run import run_emulated
from nep.testing.emulation.setting import SlotFailure, SpeedChange

SMALL = replace(QUICK_CASES[0], slots=4, shape=replace(QUICK_CASES[0].shape, num_layers=1), sequences=2)


@pytest.mark.parametrize("case", QUICK_CASES, ids=lambda case: case.name)
def test_the_cost_model_predicts_a_step_within_5_percent(case: Case) -> None:
    """On the time lines, which the load of this machine does not change; the benchmark sleeps."""
    compared = compare(case, build, steps=3, pace=0.0)
    assert compared.timeline_ratio == pytest.approx(1.0, abs=0.05)
    parts, busy = compared.parts, compared.run.busy_s()
    for part, off in (("expert_gemm", 0.02), ("attention", 0.15), ("dispatch", 0.2)):
        assert max(kinds[part] for kinds in busy.values()) == pytest.approx(parts[part], rel=off), part


def test_lanes_and_their_collectives_are_predicted_too() -> None:
    case = replace(QUICK_CASES[0], lane_slots=2, micro_batch_size=16)
    compared = compare(case, build, steps=3, pace=0.0)
    assert compared.timeline_ratio == pytest.approx(1.0, abs=0.05)
    assert max(kinds["tensor_parallel"] for kinds in compared.run.busy_s().values()) > 0


def test_what_is_slept_is_the_time_line() -> None:
    run = run_emulated(SMALL.plan(), SMALL.emulation(build, 8.0), steps=3)
    assert run.label == "emulated"
    assert run.step_s() > 0.95 * run.timeline_s()  # later on a busy machine, never much earlier
    assert 0 < run.cpu_share <= emulated_run.MOST_CPU_SHARE


def test_a_busy_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated_run, "MOST_CPU_SHARE", 0.0)
    with pytest.raises(RuntimeError, match="raise pace"):
        run_emulated(SMALL.plan(), SMALL.emulation(build, 0.5), steps=2)


def test_time_lines_do_not_depend_on_the_machine() -> None:
    first, second = (run_emulated(SMALL.plan(), SMALL.emulation(build, 0.0), steps=3) for _ in range(2))
    assert [step.seconds for step in first.steps] == [step.seconds for step in second.steps]
    assert first.busy_s() == second.busy_s()


def test_slots_slow_down_and_fail_on_schedule() -> None:
    case = QUICK_CASES[0]
    schedule = [SpeedChange(3, 0, 0.5), SpeedChange(4, 0, 1.0), SlotFailure(6, 1)]
    run = run_emulated(case.plan(), case.emulation(build, 0.0), steps=7, schedule=schedule)
    seconds = [step.seconds for step in run.steps]
    assert seconds[2] > 1.3 * seconds[1]
    assert seconds[3] == pytest.approx(seconds[1], rel=0.02)
    assert seconds[6] > 1.1 * seconds[4]
    assert [len(step.slots) for step in run.steps] == [8] * 5 + [7] * 2
    (moved_s,) = run.moved_s.values()
    assert moved_s > 0


def test_messages_that_are_free_take_no_time() -> None:
    emulation = SMALL.emulation(build, 0.0)
    plan = SMALL.plan()
    dear, free = (
        run_emulated(plan, replace(emulation, free=frozenset(roles)), steps=3) for roles in ((), ("transfer",))
    )
    stalled = min(kinds["grad_sync"] + kinds["mirror"] for kinds in dear.stalled_s().values())
    returned = min(kinds["parameter_return"] for kinds in dear.stalled_s().values())
    assert dear.timeline_s() - free.timeline_s() == pytest.approx(stalled + returned, rel=0.05)
    assert free.overlap() is None


def test_every_launch_of_a_communicator_is_emulated() -> None:
    """One that is not would take no time, silently."""
    public = {name for name, _ in inspect.getmembers(Communicator, inspect.isfunction) if not name.startswith("_")}
    assert public <= vars(EmulatedCommunicator).keys()
