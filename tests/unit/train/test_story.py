"""What a slot that comes back is told reads back to the last bit."""

from __future__ import annotations

import math

import pytest
import torch

from nep.fault_tolerance.corruption import Corruption
from nep.fault_tolerance.history import Committed, History
from nep.fault_tolerance.timeline import Recovery
from nep.train.protection import Protection
from nep.train.story import Story

WRONG = Corruption(step=2, slot=None, tensor="a", axis="b", lo=1, hi=4, kind="params", action="resync", why="so")


def committed(step: int, loss: float) -> Committed:
    return Committed(
        step=step,
        loss=loss,
        tokens=128,
        samples=8,
        sample_hash=2**64 - step,
        grad_norm=0.1,
        skipped=False,
        request=step,
    )


@pytest.mark.parametrize("keeps_loads", [False, True])
def test_there_and_back(keeps_loads: bool) -> None:
    counts = [torch.arange(12).view(3, 4) + step for step in range(2)] if keeps_loads else []
    story = Story(
        history=History(
            steps=[committed(1, 1 / 3), committed(2, 5e-324)], counts_le=counts, num_updates=2, corruptions=[WRONG]
        ),
        generations=[(1, 0, (0, 1), "start")],
        recoveries=[Recovery(failed_at=12.5, failed_slots=(3,), planned=False)],
        recovery=Recovery(reasons=("slots [1] return",)),
        validation_losses=[math.inf],
        full_size_s=[0.25],
        short_since=1e9 + 1 / 3,
        protection=Protection(windows_s=[0.1], since_step=4, since_s=1e9 + 2 / 3, was_complete=True),
        first_plan="{}",
        adjustments=[{"kind": "rebalance", "predicted_gain": 1 / 3}],
    )
    told = Story.from_bytes(story.to_bytes())
    assert [tensor.tolist() for tensor in told.history.counts_le] == [tensor.tolist() for tensor in counts]
    told.history.counts_le = story.history.counts_le
    assert told == story
    assert told.history.request == 2


def test_before_the_first_step() -> None:
    assert Story.from_bytes(Story(history=History()).to_bytes()) == Story(history=History())
