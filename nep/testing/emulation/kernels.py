"""How long an accelerator takes for one kernel after the other, from a hardware profile.

Written apart from the planner's cost model, which predicts a whole step from expectations: here are the rows that a
slice really got, tiles that are really there, and waves of tiles over processors. Every operation has two prices,
forward and backward, in seconds at full speed.

Operations of a product [m, k] x [k, n] are 2 m k n; bytes of elementwise kernels are those that fused kernels read and
write. With an ideal profile (tiles of 1, no memory bandwidth) a product takes its operations over the speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.workload import Workload
from nep.planning.shapes import ModelShape


class Seconds(NamedTuple):
    """Of one operation."""

    forward: float
    backward: float

    def __add__(self, other: Seconds) -> Seconds:  # type: ignore[override]
        return Seconds(self.forward + other.forward, self.backward + other.backward)


class KernelSeconds:
    """Prices of what one slot computes.

    Args:
        shape: the full model.
        workload: the step.
        hardware: the accelerator.

    Raises:
        ValueError: the profile charges for time on the host, which is the emulation's own.
    """

    def __init__(self, shape: ModelShape, workload: Workload, hardware: HardwareProfile):
        if hardware.launch_s > 0:
            raise ValueError(
                f"launch_s ({hardware.launch_s}) of {hardware.name!r} cannot be emulated: time on the host is the "
                "emulation's own; use a profile with launch_s 0"
            )
        self._shape = shape
        self._hardware = hardware
        self._keys = _keys(workload.seq_len, shape.sliding_window)
        self._element_bytes = workload.parameter_bytes
        self._state_bytes = workload.accumulation_bytes
        self._flops_per_s = hardware.speed(workload.parameter_bytes)

    def attention(self, tokens: float, own_tokens: float, query_heads: int, kv_heads: int) -> Seconds:
        """Norm, projections, rotary embedding, attention itself, residual.

        Args:
            tokens: of the lane.
            own_tokens: that the slot norms and adds itself.
            query_heads, kv_heads: that are here.
        """
        d, channels = self._shape.hidden_size, self._shape.head_dim
        query, kv = query_heads * channels, kv_heads * channels
        products = [self._linear(tokens, d, width) for width in (query, kv, kv)] + [self._linear(tokens, query, d)]
        # Scores and their use on values; backward computes scores again, then four products.
        pair = 2 * tokens * self._keys * query / (self._flops_per_s * self._hardware.attention_efficiency)
        turned = (query + kv) * tokens
        return _sum([*products, Seconds(2 * pair, 5 * pair), self._norm(own_tokens), self._moved(turned, 2, 2)])

    def router(self, own_tokens: float) -> Seconds:
        """Norm before the experts, scores of all of them, residual behind them."""
        return self._linear(own_tokens, self._shape.hidden_size, self._shape.num_experts) + self._norm(own_tokens)

    def experts(self, rows: Sequence[float], neurons: Sequence[int]) -> Seconds:
        """SwiGLU of every slice, with bringing rows into the order of experts and back.

        Args:
            rows: of each slice.
            neurons: of each slice.
        """
        d = self._shape.hidden_size
        slices = [(m, n) for m, n in zip(rows, neurons, strict=True) if m > 0 and n > 0]
        groups = [slices] if self._hardware.grouped_experts else [[piece] for piece in slices]
        total = Seconds(0.0, 0.0)
        for group in groups:
            total += self._products([(m, d, 2 * n) for m, n in group], self._hardware.expert_efficiency)
            total += self._products([(m, n, d) for m, n in group], self._hardware.expert_efficiency)
        activations, streams = sum(m * n for m, n in slices), d * sum(m for m, _ in slices)
        return _sum([total, self._moved(activations, 3, 5), self._moved(streams, 4, 4)])

    def head(self, tokens: float, own_tokens: float, vocab_rows: int) -> Seconds:
        """Embedding, final norm, scores of the vocabulary rows that are here, cross-entropy."""
        d = self._shape.hidden_size
        logits = tokens * vocab_rows
        wide = 4 / self._element_bytes
        return _sum(
            [
                self._linear(tokens, d, vocab_rows),
                self._norm(own_tokens),
                self._moved(own_tokens * d, 2, 2),
                self._moved(logits, 1 + wide, 2 + 2 * wide),
            ]
        )

    def optimizer(self, owned: float, mirrored: float) -> float:
        """Adam: weight, both moments and sum are read and written; the norm reads the owner's sum once more."""
        return (9 * owned + 8 * mirrored) * self._state_bytes * self._hardware.optimizer_seconds_per_byte

    def packing(self, num_bytes: float) -> float:
        """Copying rows into a message: read and written once."""
        return 2 * num_bytes * self._hardware.memory_seconds_per_byte

    def _norm(self, tokens: float) -> Seconds:
        """Norm: read and write, then two reads and a write; residual: two reads and a write, then one."""
        return self._moved(tokens * self._shape.hidden_size, 5, 4)

    def _linear(self, m: float, k: int, n: int) -> Seconds:
        return self._products([(m, k, n)], self._hardware.gemm_efficiency)

    def _products(self, sizes: Sequence[tuple[float, int, int]], efficiency: float) -> Seconds:
        """Products [m, k] x [k, n] in one launch; backward is one launch for inputs and one for weights."""
        inputs = self._launch([(m, n, k) for m, k, n in sizes], efficiency)
        weights = self._launch([(k, m, n) for m, k, n in sizes], efficiency)
        return Seconds(self._launch(sizes, efficiency), inputs + weights)

    def _launch(self, sizes: Iterable[tuple[float, float, int]], efficiency: float) -> float:
        """One launch: all tiles of all products, wave after wave, or as long as reading and writing takes."""
        hardware = self._hardware
        tile = hardware.tile_rows * hardware.tile_columns
        sizes = [size for size in sizes if all(size)]
        jobs = [(self._up(m, hardware.tile_rows) * self._up(n, hardware.tile_columns) / tile, k) for m, k, n in sizes]
        num_tiles = sum(count for count, _ in jobs)
        operations = sum(count * 2 * tile * k for count, k in jobs)
        if hardware.processors is not None and num_tiles:
            operations *= math.ceil(num_tiles / hardware.processors) * hardware.processors / num_tiles
        moved = sum(m * k + k * n + m * n for m, k, n in sizes) * self._element_bytes
        return max(operations / (self._flops_per_s * efficiency), moved * hardware.memory_seconds_per_byte)

    @staticmethod
    def _up(size: float, tile: int) -> float:
        """The next multiple of a tile; sizes may be fractions where a token stands for several."""
        return math.ceil(size / tile - 1e-9) * tile if tile > 1 else size

    def _moved(self, elements: float, forward: float, backward: float) -> Seconds:
        """An elementwise kernel that reads or writes so many times the elements."""
        once = elements * self._element_bytes * self._hardware.memory_seconds_per_byte
        return Seconds(forward * once, backward * once)


def _keys(seq_len: int, window: int | None) -> float:
    """Positions that a token attends to, on average."""
    return sum(min(position + 1, window or seq_len) for position in range(seq_len)) / seq_len


def _sum(parts: Iterable[Seconds]) -> Seconds:
    parts = list(parts)
    return Seconds(sum(part.forward for part in parts), sum(part.backward for part in parts))
