"""Emulated accelerators vote their seconds: the slow slot is found and compensated, skew alone is not taken for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.mixtral import build
from nep.planning.loads import ExpertLoads
from nep.testing.emulation.cases import QUICK_CASES
from nep.testing.emulation.run import EmulatedVote, run_emulated
from nep.testing.emulation.setting import SpeedChange
from nep.testing.emulation.steering import Steersman

SMALL = replace(
    QUICK_CASES[0], slots=4, replicas=1, shape=replace(QUICK_CASES[0].shape, num_layers=1), sequences=8, planned=False
)
SKEWED = ExpertLoads(mean=np.array([[8.0, 1.0, 4.0, 2.0, 2.0, 2.0, 1.0, 1.0]]))


def test_the_slow_slot_is_found_within_5_steps_and_the_job_is_as_fast_as_predicted() -> None:
    emulation = SMALL.emulation(build, 0.0)
    steersman = Steersman(emulation=emulation, horizon_steps=100)
    run = run_emulated(SMALL.plan(), emulation, steps=9, schedule=[SpeedChange(3, 2, 1 / 1.3)], steer=steersman)
    ((step, change),) = steersman.changes
    assert change.slot == 2 and step <= 7
    assert change.after == pytest.approx(1.3, rel=0.02)
    ((_, found),) = steersman.compensations
    seconds = [one.seconds for one in run.steps]
    assert seconds[2] > 1.15 * seconds[1], "it was slow"
    assert seconds[-1] < 0.93 * seconds[2], "and was compensated"
    assert seconds[2] / seconds[-1] - 1 == pytest.approx(found.gain, abs=0.05)
    assert list(run.moved_s) == [found.plan.number]


def test_skewed_routing_alone_flags_nobody() -> None:
    emulation = replace(SMALL.emulation(build, 0.0), loads=SKEWED)
    votes: list[EmulatedVote] = []
    steersman = Steersman(emulation=emulation)

    def steer(vote: EmulatedVote) -> None:
        votes.append(vote)
        assert steersman(vote) is None

    run_emulated(SMALL.plan(), emulation, steps=10, steer=steer)
    assert not steersman.changes and len(votes) == 10
    seconds = votes[-1].seconds.values()
    assert max(seconds) > 1.3 * min(seconds), "though some compute much longer"
