"""Cases that every backend of the experts must get right, and how it is compared with the loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nep.moe.backends.base import ExpertsBackend
from nep.moe.backends.loop import loop_experts
from nep.moe.slices import ExpertSlice, expert_slices

NUM_EXPERTS, UNITS = 6, 4
NOBODYS = 5  # an expert that no row chooses
CUTS = {
    "all experts": [(0, NUM_EXPERTS * UNITS)],
    "full ones, then slices": [(4, 12), (0, 2), (21, 24)],
    "halves of all": [(2 * half, 2 * half + 2) for half in range(0, 2 * NUM_EXPERTS, 2)],
    "two slices of one expert": [(0, 1), (2, 3), (8, 9)],
    "a second slice beside a first one": [(0, 2), (20, 22), (2, 3), (8, 9), (3, 4), (12, 13)],
    "an expert without rows": [(20, 24)],
    "nothing": [],
}
FP8_NORM_ERROR = 0.15  # see test_eight_bits_are_near
ROWS_AND_TOP_K = [(0, 2), (1, 1), (37, 2), (19, NUM_EXPERTS)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of a backend.

    Attributes:
        cut: Intervals of the expert line.
        num_rows, top_k: Of the routing.
        hidden_size, neuron_block: Of the model.
        dtype, device: Of rows and weights.
    """

    cut: list[tuple[int, int]]
    num_rows: int
    top_k: int
    hidden_size: int = 16
    neuron_block: int = 8
    dtype: torch.dtype = torch.float64
    device: str = "cpu"

    @property
    def slices(self) -> tuple[ExpertSlice, ...]:
        return expert_slices(self.cut, UNITS)

    def run(self, backend: ExpertsBackend) -> list[Tensor]:
        """The result, and the gradients of rows, weights, w13 and w2."""
        generator = torch.Generator().manual_seed(self.num_rows + self.top_k)

        def random(*size: int, scale: float = 1.0, dtype: torch.dtype = self.dtype) -> Tensor:
            tensor = torch.randn(*size, generator=generator, dtype=torch.float64) * scale
            return tensor.to(self.device, dtype).requires_grad_()

        wide = torch.promote_types(self.dtype, torch.float32)
        units = sum(piece.hi - piece.lo for piece in self.slices)
        rows = random(self.num_rows, self.hidden_size)
        scores = torch.rand(self.num_rows, NUM_EXPERTS, generator=generator)
        ids = scores.topk(self.top_k).indices.to(self.device)
        ids[ids == NOBODYS] = -1
        weights = random(self.num_rows, self.top_k, dtype=wide)
        w13 = random(units, 2, self.neuron_block, self.hidden_size, scale=self.hidden_size**-0.5)
        w2 = random(units, self.neuron_block, self.hidden_size, scale=self.hidden_size**-0.5)
        y = backend(rows, ids, weights, w13, w2, slices=self.slices, num_experts=NUM_EXPERTS)
        upstream = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(self.device, y.dtype)
        y.backward(upstream)
        gradients = [tensor.grad for tensor in (rows, weights, w13, w2)]
        assert all(gradient is not None for gradient in gradients)
        return [y.detach(), *(gradient for gradient in gradients if gradient is not None)]

    def largest_error(self, backend: ExpertsBackend) -> float:
        """Against the loop: largest difference of any of the five tensors, over the tensor's largest entry."""
        return self._error(backend, lambda tensor: tensor.abs().max())

    def norm_error(self, backend: ExpertsBackend) -> float:
        """Against the loop: largest Euclidean norm of a difference, over the tensor's norm."""
        return self._error(backend, torch.linalg.vector_norm)

    def _error(self, backend: ExpertsBackend, size: Callable[[Tensor], Tensor]) -> float:
        errors = [0.0]
        for found, expected in zip(self.run(backend), self.run(loop_experts), strict=True):
            assert found.dtype == expected.dtype and found.shape == expected.shape
            if expected.numel():
                error = (size(found.double() - expected.double()) / size(expected.double()).clamp(min=1e-3)).item()
                errors.append(math.inf if math.isnan(error) else error)
        return max(errors)
