"""What a training step has to process, as far as its cost depends on it."""

from dataclasses import dataclass
from typing import Literal, get_args

GradSyncMethod = Literal["reduce_scatter", "point_to_point"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step.

    Attributes:
        global_batch_size: sequences of a step, over all replicas.
        micro_batch_size: sequences that a lane runs at a time.
        seq_len: tokens of a sequence.
        parameter_bytes: bytes of a parameter and an activation: 2, 4 or 8.
        recompute: layers keep their inputs only and run forward again in the backward (without dispatch).
        grad_sync: how gradients get to their owners and parameters back. ``reduce_scatter``: inside a class
            collectives that use the links of a domain first, between classes straight to the owner.
            ``point_to_point``: every holder sends straight to every owner.
        buckets: the gradient transfer is cut by layer and two are in flight; otherwise it is one message.
        overlap: buckets travel while the products of the last round's backward and of the next step's first
            forward run; a part of a step then is what sticks out.
    """

    global_batch_size: int
    micro_batch_size: int
    seq_len: int
    parameter_bytes: int = 2
    recompute: bool = False
    grad_sync: GradSyncMethod = "reduce_scatter"
    buckets: bool = True
    overlap: bool = False

    def __post_init__(self) -> None:
        errors = [
            f"{name} ({getattr(self, name)}) must be at least 1"
            for name in ("global_batch_size", "micro_batch_size", "seq_len")
            if getattr(self, name) < 1
        ]
        if self.parameter_bytes not in (2, 4, 8):
            errors.append(f"parameter_bytes ({self.parameter_bytes}) must be 2, 4 or 8")
        if self.grad_sync not in get_args(GradSyncMethod):
            errors.append(f"grad_sync ({self.grad_sync!r}) must be one of {', '.join(get_args(GradSyncMethod))}")
        if self.overlap and not self.buckets:
            errors.append("overlap (True) needs buckets; one message cannot start before the backward has ended")
        if errors:
            raise ValueError("workload: " + "; ".join(errors))

    @property
    def accumulation_bytes(self) -> int:
        """Bytes of a gradient sum, a master weight and each moment: at least those of float32."""
        return max(4, self.parameter_bytes)

    @property
    def state_bytes(self) -> int:
        """Master weight and two moments of one parameter."""
        return 3 * self.accumulation_bytes
