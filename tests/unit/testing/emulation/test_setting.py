"""What an emulation refuses, and how speeds change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from nep.testing.emulation.cases import QUICK_CASES
from nep.testing.emulation.run import run_emulated
from nep.testing.emulation.setting import SlotFailure, SpeedChange


def _build(shape: object, dtype: object) -> nn.Module:
    raise AssertionError("nothing is to be built")


def test_bad_schedules_are_named_all_at_once() -> None:
    case = QUICK_CASES[0]
    with pytest.raises(ValueError, match=r"slot=99.*step must be 1 to 3.*before step 1"):
        run_emulated(
            case.plan(),
            case.emulation(_build, 0.0),
            steps=3,
            schedule=[SpeedChange(1, 99, 0.5), SpeedChange(7, 0, 0.5), SlotFailure(1, 0)],
        )
    with pytest.raises(ValueError, match="steps"):
        run_emulated(case.plan(), case.emulation(_build, 0.0), steps=1)


def test_recomputation_and_negative_paces_are_refused() -> None:
    emulation = QUICK_CASES[0].emulation(_build, 0.0)
    with pytest.raises(ValueError, match="recompute"):
        replace(emulation, workload=replace(emulation.workload, recompute=True))
    with pytest.raises(ValueError, match="num_dense_layers"):
        replace(emulation, shape=replace(emulation.shape, num_dense_layers=1, dense_ffn_hidden_size=64, num_layers=2))
    with pytest.raises(ValueError, match="pace"):
        replace(emulation, pace=-1.0)


def test_the_last_change_of_speed_counts() -> None:
    case = QUICK_CASES[2]
    plan, (slow, planned) = case.plan(), next(iter(case.slow.items()))
    changes = (SpeedChange(4, slow, 1.0), SpeedChange(2, slow, 0.5))
    speed = case.emulation(_build, 0.0).speed_under(plan, changes)
    assert [speed(slow, step, 0.0) / planned for step in (1, 2, 3, 4)] == [1.0, 0.5, 0.5, 1.0]
    assert speed(0, 3, 0.0) == 1.0
    as_planned = replace(case.emulation(_build, 0.0), speed=None).speed_under(plan, ())
    assert as_planned(slow, 1, 0.0) == pytest.approx(planned, abs=1e-6)
