"""Forward and backward of one step on one slot: phase 1 of the protocol. Nothing but gradients changes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from nep.distributed.compute_clock import ComputeClock, clock_for, watching
from nep.fault_tolerance.commit import StepSums
from nep.moe.aux_losses import SumCounts
from nep.moe.routing_state import RoutingState
from nep.parallel.grad_sync import GradSync, Reduction
from nep.parallel.overlap import Overlap
from nep.planning.plan import Plan
from nep.train.config import TrainConfig
from nep.train.data import SampleSource, expected_hash


def share_of(plan: Plan, slot: int) -> tuple[int, int, int]:
    """Which part of each global batch a slot's lane takes, and in how many rounds of its replica.

    Returns:
        Offset in the batch, number of sequences, and the largest number of sequences of a lane of the
        replica: all lanes of a dispatch group run the same number of rounds.
    """
    offset = 0
    mine = (0, 0)
    replica = plan.replica_of(slot)
    for lane in plan.lanes:
        if slot in lane.slots:
            mine = (offset, lane.num_sequences)
        offset += lane.num_sequences
    most = max(lane.num_sequences for lane in plan.lanes if lane.replica == replica)
    return *mine, most


def prepare_model(model: nn.Module, config: TrainConfig, routing: RoutingState | None, sum_over_job: SumCounts) -> None:
    """Switch on what a config asks of a model beside its parameters. A model needs only the methods that are called.

    Args:
        model: of the current plan.
        config: says what.
        routing: state of committed steps, which the model will look at and not change.
        sum_over_job: adds integers over all members; called in forward, at the same points on all of them.
    """
    if routing is not None and hasattr(model, "use_routing_state"):
        model.use_routing_state(routing)
    if config.aux_losses.any:
        model.use_aux_losses(config.aux_losses, routing, sum_over_job)  # type: ignore[operator]
    if config.recompute:
        model.use_recompute()  # type: ignore[operator]


def forward_backward(
    model: nn.Module,
    overlap: Overlap,
    sync: GradSync,
    reduction: Reduction,
    data: SampleSource,
    *,
    first_sample: int,
    micro_batch_size: int,
    probe: Callable[[str], None],
    clock: ComputeClock | None = None,
) -> StepSums:
    """Run this slot's rounds of one step, gradients of the summed loss adding up in `sync.grads`, and start the sums
    over slots while the last round's backward runs. `reduction.finish` is left to the caller.

    All lanes of a replica run equally many rounds; a lane that has run out of samples joins with none.

    Args:
        overlap: of the model.
        reduction: of this step, nothing launched yet.
        first_sample: global index of the step's first sample.
        micro_batch_size: sequences per round.
        probe: failure injection.
        clock: counts what this slot computes; None: that of its device.
    """
    clock = clock or clock_for(sync.state.device)
    with watching(reduction.waiter, clock):
        return _rounds(model, overlap, sync, reduction, data, first_sample, micro_batch_size, probe, clock)


def _rounds(
    model: nn.Module,
    overlap: Overlap,
    sync: GradSync,
    reduction: Reduction,
    data: SampleSource,
    first_sample: int,
    micro_batch_size: int,
    probe: Callable[[str], None],
    clock: ComputeClock,
) -> StepSums:
    """See `forward_backward`."""
    offset, count, most = share_of(sync.state.plan, sync.state.slot)
    speaks = _speaks_for_lane(sync.state.plan, sync.state.slot)
    probe("forward")
    sync.zero_grads()
    start = clock.seconds()
    loss_sum, tokens, samples, sample_hash = 0.0, 0, 0, 0
    counts_le: torch.Tensor | None = None
    num_rounds = max(1, math.ceil(most / micro_batch_size))
    for round_index in range(num_rounds):
        done = count * round_index // num_rounds
        size = count * (round_index + 1) // num_rounds - done
        first = first_sample + offset + done
        tokens_bt, targets_bt = (
            torch.from_numpy(array).to(sync.state.device) for array in data.train_batch(first, size)
        )
        output = model(tokens_bt, targets_bt)
        total = output.loss.total if output.aux_loss is None else output.loss.total + output.aux_loss
        if round_index == 0:
            total.register_hook(lambda _: probe("backward"))
        overlap.reduction = reduction if round_index == num_rounds - 1 else None
        try:
            # With a GPU autograd has a thread for it, and its hooks launch messages: NCCL wants one thread for all.
            with torch.autograd.set_multithreading_enabled(sync.state.device.type == "cpu"):
                total.backward()
        finally:
            # The two point to each other: left so by a fault, they would keep all of the old state until Python
            # happens to look for cycles.
            overlap.reduction = None
        overlap.collect_all()
        loss_sum += float(output.loss.own)
        tokens += output.loss.num_tokens
        if speaks:
            samples += size
            sample_hash += expected_hash(first, size)
        counts = output.num_tokens_per_expert_le
        counts_le = counts if counts_le is None else counts_le + counts
    assert counts_le is not None
    return StepSums(
        loss=loss_sum,
        tokens=tokens,
        samples=samples,
        sample_hash=sample_hash % 2**64,
        counts_le=counts_le.cpu(),
        seconds=clock.seconds() - start,
    )


def _speaks_for_lane(plan: Plan, slot: int) -> bool:
    """Whether this slot reports the lane's samples: all its slots work on the same ones."""
    return slot == plan.lanes[plan.lane_of(slot)].slots[0]
