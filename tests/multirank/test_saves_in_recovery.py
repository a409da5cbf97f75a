"""A step that is due for saving is committed, and only some have seen it: all survivors save it under one plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nep.checkpoint.folders import newest_in
from nep.checkpoint.saver import Saver
from nep.fault_tolerance.runtime import SlotRun
from nep.planning.plan import Plan
from nep.testing.parity import Training
from nep.train.resume import Resumption
from tests.multirank.plans import lane_plan
from tests.multirank.saved import go_on, load, savers, snapshot_of
from tests.multirank.steps import BATCH
from tests.multirank.test_training import FINE, failure
from tests.multirank.training import STEPS, assert_equals, make_training, reference_of

STEP, DEAD = 3, 1


@dataclass(frozen=True, kw_only=True)
class Saving(Training):
    """Saves a step where it is applied, as a trainer does; the dead slot does not come to that."""

    writers: dict[int, Saver] = field(default_factory=dict)

    def start(self, plan: Plan, slot: int) -> SlotRun:
        """A slot before the first step."""
        run = super().start(plan, slot)

        def applied() -> None:
            if run.progress.tx == STEP and slot in self.writers:
                self.writers[slot].save(snapshot_of(self, run))

        run.on_applied = applied
        return run


@pytest.mark.parametrize(
    ("saw_the_vote", "under_the_first_plan"),
    [
        ((0, DEAD), True),  # the others roll forward
        ((0, 2, 3), True),
        ((DEAD,), False),  # nobody alive has applied it: the step is replayed
        ((), False),
    ],
)
def test_survivors_save_under_one_plan(
    tmp_path: Path, saw_the_vote: tuple[int, ...], under_the_first_plan: bool
) -> None:
    plan, after = failure(4, 2, DEAD)
    base = make_training(FINE)
    expected = reference_of(base)
    training = Saving(
        shape=FINE,
        make_model=base.make_model,
        data=base.data,
        config=base.config,
        writers=savers(tmp_path, after.slots, dead=lambda: {DEAD}),
    )
    assert_equals(training.run_with_loss(plan, after, STEP, saw_the_vote), expected)
    assert all(saver.wait(20) for saver in training.writers.values())
    found = newest_in(tmp_path)
    assert found is not None and found[0].step == STEP
    manifest = found[1]
    assert manifest.contents.layout == (plan if under_the_first_plan else after).number
    assert under_the_first_plan == any("-from-" in chunk.file for chunk in manifest.chunks), "mirrors had to write"
    alone = load(base, Resumption(found[0].path, manifest), lane_plan([[[0]]], FINE, [BATCH]))
    assert_equals(go_on(base, alone, STEPS), expected)
