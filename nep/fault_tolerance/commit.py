"""A training step, and a change of layout, as transactions: everything or nothing, on all slots alike."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nep.distributed.collectives import all_gather_bytes, sum_exact
from nep.distributed.waiting import Fault
from nep.fault_tolerance import transaction
from nep.fault_tolerance.corruption import after_refusal
from nep.fault_tolerance.history import Committed
from nep.fault_tolerance.mending import mend
from nep.fault_tolerance.runtime import SlotRun
from nep.fault_tolerance.vote import Tally, VoteError, VoteKind, VoteRecord, unpack_records, verify
from nep.parallel.grad_sync import GradSync, Reduction, Return
from nep.parallel.optimizer import apply_update
from nep.parallel.state import SlotState
from nep.planning.router_bias import expert_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """What one slot adds to a step, besides gradients.

    Attributes:
        loss: summed over its tokens.
        tokens, samples: how many.
        sample_hash: sum of its samples' hashes modulo 2**64.
        counts_le: its tokens per layer and expert, int64.
        seconds: compute time of forward and backward, without waits.
    """

    loss: float
    tokens: int
    samples: int
    sample_hash: int
    counts_le: torch.Tensor
    seconds: float


def commit_step(run: SlotRun, step: int, sums: StepSums, reduction: Reduction) -> bool:
    """Phases 2 to 7 of a step: sums, prepared, vote, apply, start of the return. All members call it.

    The parameters return while the next forward runs; `settle` waits for all of them.

    Args:
        sums: what this slot adds.
        reduction: the step's gradient sums, as far as backward has launched them.

    Returns:
        Whether it is committed. If not, copies of some state differed: they have been made alike again, and the same
        step is to be run on the same batch.

    Raises:
        Fault: the step may or may not be committed; recovery finds out.
    """
    assert run.progress.prepared is None, "the sums of an earlier step are still needed"
    generation, sync = run.current, run.sync
    groups, waiter, probe = generation.groups, generation.waiter, run.probe_at(step)
    settle(run)
    reduction.finish()
    run.counts_le = sum_exact(groups.vote, sums.counts_le, waiter, "expert counts")
    run.progress = transaction.after_prepare(run.progress, step)

    norm2 = sync.norm2_owned()
    state_hash = run.integrity.summarize(run, step)
    blob = _vote(
        run,
        kind=VoteKind.STEP,
        number=step,
        sums=sums,
        norm2=norm2,
        nonfinite=not (math.isfinite(norm2) and math.isfinite(sums.loss)),
        state_hash=state_hash,
        on_sent=lambda: probe("vote"),
    )
    if Tally.of(unpack_records(blob)).refused:
        run.progress, run.counts_le = after_refusal(run.progress, step), None
        run.integrity.refuse(step)
        mend(run, step)
        return False
    run.progress = transaction.after_vote(run.progress, step, blob, generation.members)
    probe("apply")
    apply(run)
    run.returning = Return(sync, groups.transfer, waiter, step, probe)
    run.integrity.seal_for(run, step + 1)  # while the first parameters travel
    waiter.deadline_s = run.recipe.timeouts.wait_s
    return True


def settle(run: SlotRun) -> None:
    """Wait until every parameter that this slot holds is of the last committed step. All members call it.

    Raises:
        Fault: some are not; `SlotState.versions` says which.
    """
    if run.returning is not None:
        run.returning.finish()
        run.returning = None
        run.progress = transaction.after_return(run.progress)
    assert run.state.params_version == run.progress.tx


def apply(run: SlotRun) -> None:
    """Apply the committed step from its stored records. No wait inside, and the same bits on every slot."""
    progress, recipe, history = run.progress, run.recipe, run.history
    step = progress.tx
    assert progress.result is not None and run.counts_le is not None
    tally = Tally.of(unpack_records(progress.result))
    committed = Committed.from_tally(step, tally)
    applied = transaction.after_apply(progress)  # refuses before anything is changed
    run.integrity.break_seal()
    if not committed.skipped:
        apply_update(
            [run.state.owned, run.state.mirrored],
            recipe.lines,
            recipe.optimizer,
            lr=recipe.optimizer.learning_rate(step, recipe.total_steps),
            update=history.num_updates + 1,
            scale=recipe.optimizer.gradient_scale(math.sqrt(tally.norm2), tally.tokens),
        )
        history.num_updates += 1
        if run.routing is not None:
            run.routing.commit(run.counts_le, recipe.router_bias_rate, _bias_weights(run))
    history.steps.append(committed)
    if recipe.keep_loads:
        history.counts_le.append(run.counts_le)
    run.counts_le = None
    run.progress = applied  # only now may the buffers of the sums be used again
    run.stopping |= tally.stop
    run.on_applied()


def _bias_weights(run: SlotRun) -> torch.Tensor | None:
    """What router biases aim at under the plan that the step ran with; None: even loads."""
    if not (run.recipe.bias_to_speed and run.recipe.router_bias_rate):
        return None
    return torch.tensor(expert_weights(run.state.plan, run.recipe.lines), dtype=torch.int64)


def commit_layout(run: SlotRun, next_state: SlotState) -> None:
    """Vote on a layout whose state is complete on this slot, then drop the old one. All members call it.

    Raises:
        Fault: the layout may or may not be committed; recovery finds out.
    """
    plan = next_state.plan
    run.next_state = next_state
    run.progress = transaction.after_receive(run.progress, plan.number, plan.digest)
    _vote(run, kind=VoteKind.LAYOUT, number=run.progress.tx, layout=plan.number, digest=plan.digest)
    adopt(run)


def adopt(run: SlotRun) -> None:
    """Make the received layout the current one: its vote was seen, here or by a survivor."""
    assert run.next_state is not None
    run.progress = transaction.after_adopt(run.progress)
    run.state, run.next_state = run.next_state, None
    run.integrity.break_seal()  # it holds the old state
    del run.sync  # with the old state, before there are new gradients
    recipe = run.recipe
    run.sync = GradSync.build(run.state, recipe.lines, recipe.dtype, recipe.smallest_bucket_bytes)


def _vote(
    run: SlotRun,
    *,
    kind: VoteKind,
    number: int,
    sums: StepSums | None = None,
    norm2: float = 0.0,
    nonfinite: bool = False,
    layout: int | None = None,
    digest: str | None = None,
    state_hash: int | None = None,
    on_sent: Callable[[], None] | None = None,
) -> bytes:
    """All-gather one record per slot; returns them packed once all verify: the vote has been seen.

    The buffer of a wait that failed is never read.
    """
    generation = run.current
    plan = run.state.plan
    layout = plan.number if layout is None else layout
    digest = plan.digest if digest is None else digest
    record = VoteRecord(
        kind=kind,
        slot=run.slot,
        generation=generation.number,
        transaction=number,
        layout=layout,
        norm2=norm2,
        nonfinite=nonfinite,
        stop=run.stop_requested(),
        tokens=sums.tokens if sums else 0,
        loss=sums.loss if sums else 0.0,
        seconds=sums.seconds if sums else 0.0,
        samples=sums.samples if sums else 0,
        sample_hash=sums.sample_hash if sums else 0,
        digest=bytes.fromhex(digest),
        request=len(run.requests.known),
        checked=state_hash is not None,
        state_hash=state_hash or 0,
    )
    what = f"the vote on {'step' if kind is VoteKind.STEP else 'layout'} {number if kind is VoteKind.STEP else layout}"
    blob = b"".join(all_gather_bytes(generation.groups.vote, record.pack(), generation.waiter, what, on_sent))
    try:
        verify(
            blob,
            generation.members,
            generation=generation.number,
            transaction=number,
            kind=kind,
            layout=layout,
            digest=bytes.fromhex(digest),
        )
    except VoteError as error:
        raise Fault("record", f"{what}: {error}") from error
    return blob
