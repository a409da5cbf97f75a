"""What routing remembers of committed steps: not trained by gradients, the same on every slot.

It is part of the transaction: `commit` is called when a step is applied, with the counts that all slots agreed on
before they voted, and never from a forward. A step that is dropped leaves it alone, so its replay finds what the first
try did.

Shapes: l MoE layers, e experts.
"""

import struct
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nep.planning.layout import Lines, axis_lines

_HEADER = struct.Struct("<II")


@dataclass(frozen=True, kw_only=True)
class RoutingState:
    """Biases and the last counts. Both tensors are changed in place, so a layer may keep its row.

    Attributes:
        bias_le: added to the scores when experts are chosen, where a model does that; max(float32, model dtype).
        counts_le: tokens per layer and expert of the last committed step over all slots, int64; zero before the first.
    """

    bias_le: Tensor
    counts_le: Tensor

    @classmethod
    def initial(cls, lines: Lines, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """Before the first step.

        Args:
            lines: the model's.
            dtype: of its parameters.
            device: where its routers are.

        Raises:
            ValueError: the layers differ in their number of experts.
        """
        experts = [line for line in axis_lines(lines).values() if line.units_per_expert is not None]
        sizes = {line.num_units // line.units_per_expert for line in experts if line.units_per_expert}
        if len(sizes) != 1:
            raise ValueError(f"layers of {sorted(sizes)} experts: all layers must have equally many; change the model")
        wide = torch.promote_types(dtype, torch.float32)
        size = (len(experts), *sizes)
        return cls(
            bias_le=torch.zeros(size, dtype=wide, device=device),
            counts_le=torch.zeros(size, dtype=torch.int64, device=device),
        )

    def commit(self, counts_le: Tensor, bias_rate: float, weights_le: Tensor | None = None) -> None:
        """A step was applied: keep its counts, and move each bias against its expert's load.

        An expert with fewer tokens than the layer's mean goes up by `bias_rate`, one with more goes down by it (arXiv
        2408.15664, algorithm 1). Integers are compared, so that all slots find the same sign.

        Args:
            counts_le: of the step, over all slots, int64.
            bias_rate: 0 leaves the biases alone.
            weights_le: how many tokens each expert should get, relative to the others of its layer, int64; None: all
                as many.
        """
        self.counts_le.copy_(counts_le)
        if bias_rate:
            weights_le = torch.ones_like(counts_le) if weights_le is None else weights_le
            wanting_le = counts_le.sum(1, keepdim=True) * weights_le - counts_le * weights_le.sum(1, keepdim=True)
            self.bias_le.add_(wanting_le.sign().to(self.bias_le), alpha=bias_rate)

    def to_bytes(self) -> bytes:
        """For a slot that has nothing yet; the same bytes on every slot that has it."""
        wide = self.bias_le.to(torch.float64)
        return _HEADER.pack(*self.bias_le.shape) + wide.cpu().numpy().tobytes() + self.counts_le.cpu().numpy().tobytes()

    def load(self, blob: bytes) -> None:
        """Take what another slot's `to_bytes` gave.

        Raises:
            ValueError: it is of another model.
        """
        shape = tuple(self.bias_le.shape)
        half = self.bias_le.numel() * 8
        if len(blob) != _HEADER.size + 2 * half or _HEADER.unpack_from(blob) != shape:
            raise ValueError(f"routing state of {len(blob)} bytes is not that of {shape} layers and experts")
        bias, counts = bytearray(blob[_HEADER.size : -half]), bytearray(blob[-half:])
        self.bias_le.copy_(torch.frombuffer(bias, dtype=torch.float64).view(shape))
        self.counts_le.copy_(torch.frombuffer(counts, dtype=torch.int64).view(shape))
