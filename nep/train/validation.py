"""The loss on held-out sequences."""

from __future__ import annotations

import torch
from torch import nn

from nep.distributed.collectives import all_gather_bytes
from nep.fault_tolerance.commit import settle
from nep.fault_tolerance.runtime import SlotRun
from nep.parallel.holding import CPU
from nep.planning.batch import split_sequences
from nep.planning.plan import Plan
from nep.train.config import TrainConfig
from nep.train.data import SampleSource


def validation_loss(run: SlotRun, model: nn.Module, data: SampleSource, config: TrainConfig) -> float:
    """Mean loss over the held-out sequences, the same number on every slot; nan if there are none. All members call it.

    Raises:
        Fault: it is not complete.
    """
    settle(run)
    count = min(config.validation_sequences, data.num_validation_samples)
    if count == 0:
        return float("nan")
    total, tokens = validation_sums(
        model,
        run.state.plan,
        run.slot,
        data,
        num_sequences=count,
        micro_batch_size=config.micro_batch_size,
        device=run.state.device,
    )
    mine = torch.tensor([total, float(tokens)], dtype=torch.float64).numpy().tobytes()
    blobs = all_gather_bytes(run.current.groups.vote, mine, run.current.waiter, "the validation loss")
    sums = torch.stack([torch.frombuffer(bytearray(blob), dtype=torch.float64) for blob in blobs]).sum(0)
    return float(sums[0] / sums[1])


@torch.no_grad()
def validation_sums(
    model: nn.Module,
    plan: Plan,
    slot: int,
    data: SampleSource,
    *,
    num_sequences: int,
    micro_batch_size: int,
    device: torch.device = CPU,
) -> tuple[float, int]:
    """This slot's part of the validation loss: sum over its tokens, and how many. All slots call it."""
    shares = split_sequences(num_sequences, [1] * len(plan.lanes))
    lane = plan.lane_of(slot)
    first, count = sum(shares[:lane]), shares[lane]
    total, tokens = 0.0, 0
    for done in range(0, max(shares), micro_batch_size):
        size = max(0, min(micro_batch_size, count - done))
        tokens_bt, targets_bt = (
            torch.from_numpy(array).to(device) for array in data.validation_batch(first + done, size)
        )
        loss = model(tokens_bt, targets_bt).loss
        total += float(loss.own)
        tokens += loss.num_tokens
    return total, tokens
