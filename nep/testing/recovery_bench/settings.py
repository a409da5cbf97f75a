"""Time-outs of torchft: those of its documentation, and some that are tuned to this job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TorchftSettings:
    """What torchft can be told about time.

    Attributes:
        join_timeout_ms: how long the lighthouse waits for stragglers that it has heard of.
        quorum_tick_ms: how often it looks.
        heartbeat_timeout_ms: when a replica that says nothing counts as dead.
        heartbeat_ms: how often a replica says that it lives.
        group_timeout_s: of the process group, so of an all-reduce with a dead member.
        manager_timeout_s: of everything else.
    """

    join_timeout_ms: int
    quorum_tick_ms: int
    heartbeat_timeout_ms: int
    heartbeat_ms: int
    group_timeout_s: float
    manager_timeout_s: float


# README: `torchft_lighthouse --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000`; train_ddp.py: 5 s for
# gloo, 30 s for the manager; what neither names has torchft's default.
DOCUMENTED = TorchftSettings(
    join_timeout_ms=10_000,
    quorum_tick_ms=100,
    heartbeat_timeout_ms=5_000,
    heartbeat_ms=100,
    group_timeout_s=5.0,
    manager_timeout_s=30.0,
)


def tuned(num_ranks: int) -> TorchftSettings:
    """As short as they may be here without members being taken for dead that are only slow, by trial."""
    return TorchftSettings(
        join_timeout_ms=1_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=400 if num_ranks <= 4 else 800,
        heartbeat_ms=50,
        group_timeout_s=0.5 if num_ranks <= 4 else 1.0,
        manager_timeout_s=30.0,
    )
