"""Checkpoints of trainings on threads: written by the savers of all slots, loaded under any plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from nep.checkpoint.folders import newest_in
from nep.checkpoint.manifest import Contents
from nep.checkpoint.save import SaverConfig
from nep.checkpoint.saver import Saver
from nep.checkpoint.snapshot import Snapshot
from nep.fault_tolerance.runtime import SlotRun
from nep.parallel.grad_sync import GradSync
from nep.planning.plan import Plan
from nep.testing.memory_board import MemoryBoard
from nep.testing.parity import Training
from nep.testing.threads import run_slots
from nep.train.resume import Resumption, settings_of, small_tensors, subject_of


def snapshot_of(training: Training, run: SlotRun, into: Snapshot | None = None) -> Snapshot:
    """What a trainer hands to its saver after the last committed step."""
    plan = run.state.plan
    contents = Contents(
        step=run.progress.tx,
        subject=subject_of(training.config, training.data, training.shape, training.lines),
        num_updates=run.history.num_updates,
        settings=settings_of(training.config),
        plan_digest=plan.digest,
        layout=plan.number,
        slots=plan.slots,
        loss=run.history.steps[-1].loss,
    )
    return Snapshot.take(run.state, training.lines, contents, small_tensors(run.history, run.routing), into)


def savers(
    root: Path,
    slots: tuple[int, ...],
    board: MemoryBoard | None = None,
    dead: Callable[[], set[int]] = set,
    **options: object,
) -> dict[int, Saver]:
    """A saver for each slot."""
    board = MemoryBoard() if board is None else board
    config = SaverConfig(**{"root": root, "tag": "ab12", "stall_s": 20.0, "part_bytes": 20_000, **options})
    return {slot: Saver(slot, board, lambda _: dead(), config) for slot in slots}


def save(training: Training, runs: Mapping[int, SlotRun], root: Path) -> Resumption:
    """Write a checkpoint with all slots and read its manifest."""
    writers = savers(root, tuple(runs))
    for slot, run in runs.items():
        writers[slot].save(snapshot_of(training, run))
    for slot, saver in writers.items():
        assert saver.wait(20.0) and saver.last_step == runs[slot].progress.tx
    found = newest_in(root)
    assert found is not None
    return Resumption(found[0].path, found[1])


def load(training: Training, resumption: Resumption, plan: Plan) -> dict[int, SlotRun]:
    """Slots of a plan that begin with a checkpoint."""
    runs = {}
    for slot in plan.slots:
        run = training.start(plan, slot)
        run.state = resumption.state(plan, slot, training.lines, training.config.torch_dtype)
        run.sync = GradSync.build(run.state, training.lines, training.config.torch_dtype)
        resumption.restore(run)
        runs[slot] = run
    return runs


def go_on(training: Training, runs: Mapping[int, SlotRun], until: int) -> dict[int, SlotRun]:
    """Train the slots of a plan up to a step."""
    plan = runs[min(runs)].state.plan

    def act(me):  # type: ignore[no-untyped-def]
        training.enter(runs[me.slot], me, plan, 1)
        return training.go_on(runs[me.slot], me, until).run

    return run_slots(plan.replicas, act, lanes=[lane.slots for lane in plan.lanes])
