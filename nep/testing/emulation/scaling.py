"""A model small enough to cost nothing, whose messages still tell how many bytes the full one would send.

The small model has the same layers, experts, heads, vocabulary and units, so a plan of the full model fits it. Only
widths shrink: hidden size, channels of a head, neurons of a unit, tokens of a sequence. Heads and units of experts
shrink by one factor, so that an element stands for the same number of elements wherever it is, however gradients
are cut into messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from nep.planning.cost.workload import Workload
from nep.planning.shapes import ModelShape, parameter_lines

# Vocabulary, norms and router shrink less than heads and experts and so count for more than they are: the less, the
# wider the small model is.
_MOST_MISCOUNTED = 0.01
_LEAST_WIDTH = 8
_HIDDEN_SIZE = 8
_SEQ_LEN = 16


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What the small model's sizes stand for.

    Attributes:
        full: the model that is emulated.
        small: the model that runs.
        seq_len: tokens of a sequence of the small one.
        tokens: tokens that one token stands for.
        elements: elements of parameters that one element stands for.
        element_bytes: of a parameter and an activation, in both.
    """

    full: ModelShape
    small: ModelShape
    seq_len: int
    tokens: float
    elements: float
    element_bytes: int

    @classmethod
    def of(cls, shape: ModelShape, workload: Workload, seq_len: int = _SEQ_LEN) -> Scale:
        """The smallest model for a shape.

        Args:
            shape: the model that is emulated.
            workload: its step.
            seq_len: tokens of a sequence of the small model: more of them make rows smoother and cost more.

        Raises:
            ValueError: parameters that are neither heads nor experts weigh too much to be counted like these.
        """
        most = math.gcd(shape.neuron_block, shape.head_dim // 2)
        widths = [width for width in range(most, 0, -1) if most % width == 0 and width >= min(most, _LEAST_WIDTH)]
        for width in widths:
            small, elements = _small(shape, width, seq_len), width * shape.hidden_size / _HIDDEN_SIZE
            off = elements * _num_elements(small) / _num_elements(shape) - 1
            if off <= _MOST_MISCOUNTED:
                break
        else:
            raise ValueError(
                f"{shape.name} scaled down would count {off:.0%} too many parameters, of vocab_size "
                f"({shape.vocab_size}), norms, routers and shared experts; emulate a shape with a smaller vocabulary "
                "(16 rows) and without shared experts"
            )
        return cls(
            full=shape,
            small=small,
            seq_len=seq_len,
            tokens=workload.seq_len / seq_len,
            elements=elements,
            element_bytes=workload.parameter_bytes,
        )

    def row_bytes(self, rows: Tensor) -> float:
        """Bytes of the full model for each row [rows, ...] of a message about tokens.

        A row that is wide enough has the residual stream of one token in it, and whatever else is there (weights,
        ids, scores) is as large in both models.
        """
        num_bytes = rows.shape[1:].numel() * rows.element_size()
        stream = self.small.hidden_size * self.element_bytes
        if rows.dim() > 1 and num_bytes >= stream:
            num_bytes += (self.full.hidden_size - self.small.hidden_size) * self.element_bytes
        return self.tokens * num_bytes


def _small(shape: ModelShape, width: int, seq_len: int) -> ModelShape:
    """The shape with channels and neurons divided by `width`, as many tokens and the smallest hidden size."""
    return replace(
        shape,
        name=f"{shape.name}, scaled down",
        hidden_size=_HIDDEN_SIZE,
        neuron_block=shape.neuron_block // width,
        ffn_hidden_size=shape.ffn_hidden_size // width,
        head_dim=shape.head_dim // width,
        max_seq_len=seq_len,
        sliding_window=None,
    )


def _num_elements(shape: ModelShape) -> int:
    return sum(line.num_units * line.unit_numel for line in parameter_lines(shape).values())
