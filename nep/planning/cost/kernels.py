"""Seconds that one slot spends in the kernels of one round, forward and backward together.

Shapes: l layers, e experts, s slots. Operations are counted as multiplications and additions:

- a product ``[m, k] x [k, n]`` is ``2 m k n``; its backward are two products of the same size;
- causal attention over ``t`` keys is two products forward and five backward, since the scores are computed
  again there (arXiv 2205.14135), over the keys that a token sees: ``(t + 1) / 2`` on average;
- with recomputation every product of a layer runs once more.

Rows of experts are expectations, so their rounding to tiles is one too: half a tile. Bytes of elementwise
kernels are counted for fused kernels that read and write each tensor once.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.held import Floats, HeldLayers
from nep.planning.cost.workload import Workload
from nep.planning.shapes import ModelShape

# Operations that autograd launches for `models/mixtral.py`, forward and backward, views left out; counted with
# a dispatch mode. The second number is the forward alone, which recomputation repeats.
ATTENTION_LAUNCHES = (58, 18)
ROUTER_LAUNCHES = (55, 25)
PIECE_LAUNCHES = (26, 7)  # of each slice, one after the other
GROUPED_LAUNCHES = (34, 9)  # of all slices of a layer together
HEAD_LAUNCHES = 46

# Bytes of elementwise kernels, in elements read or written forward and backward; the forward alone behind it.
# Norm: 2 + 3; residual: 3 + 1; norm and residual of the experts' half of a layer likewise.
NORM_AND_RESIDUAL = (9, 5)
ROTARY = (4, 2)  # queries and keys
SWIGLU = (8, 3)  # of the neurons
PERMUTE = (8, 4)  # rows into expert order and back, twice
# Logits: read for the loss and for its gradient, written as gradient, all else in float32.
LOGIT_ELEMENTS, LOGIT_FLOAT_BYTES = 3, 12

# Adam: weight, two moments and sum are read and written; the norm reads the owner's sum once more.
OPTIMIZER_ACCESSES_OWNED, OPTIMIZER_ACCESSES_MIRRORED = 9, 8


@dataclass(frozen=True)
class Busy:
    """Seconds by what they are spent on; arrays of one shape.

    Attributes:
        flops: in matrix products and attention.
        memory: moving bytes, where that is not hidden behind products.
        launches: in starting operations.
    """

    flops: Floats
    memory: Floats
    launches: Floats

    @property
    def total(self) -> Floats:
        """All of it."""
        return self.flops + self.memory + self.launches

    def __add__(self, other: "Busy") -> "Busy":
        return Busy(self.flops + other.flops, self.memory + other.memory, self.launches + other.launches)

    def __mul__(self, factor: Floats | float) -> "Busy":
        return Busy(self.flops * factor, self.memory * factor, self.launches * factor)

    def sum(self, axis: int) -> "Busy":
        """Added up over one axis."""
        return Busy(self.flops.sum(axis), self.memory.sum(axis), self.launches.sum(axis))


def keys_per_token(seq_len: int, window: int | None) -> float:
    """Positions that a token attends to, on average over a sequence."""
    if window is None or window >= seq_len:
        return (seq_len + 1) / 2
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def expected_rows(rows: Floats, tile: int) -> Floats:
    """Rows that a product works on if it rounds up to tiles and ``rows`` is the mean of a random count."""
    busy = np.minimum(rows, 1.0)
    return np.asarray(np.maximum(rows + (tile - 1) / 2 * busy, tile * busy))


def rounded_up(size: Floats, tile: int) -> Floats:
    """The next multiple of a tile."""
    return np.asarray(np.ceil(size / tile) * tile)


class Kernels:
    """Prices of the kernels of one model on one kind of accelerator at speed 1.

    Args:
        shape: the model.
        workload: the step.
        hardware: the accelerator.
    """

    def __init__(self, shape: ModelShape, workload: Workload, hardware: HardwareProfile) -> None:
        self.shape = shape
        self.hardware = hardware
        self.element_bytes = workload.parameter_bytes
        self.accumulation_bytes = workload.accumulation_bytes
        self.forwards = 2 if workload.recompute else 1
        self.keys = keys_per_token(workload.seq_len, shape.sliding_window)
        self._speed = hardware.speed(workload.parameter_bytes)

    def attention(self, tokens: Floats, own_tokens: Floats, held: HeldLayers) -> Busy:
        """Norm, projections, rotary embedding, attention and residual of each layer, [l, s].

        Args:
            tokens: [s], of the slot's lane.
            own_tokens: [s], those that the slot norms itself.
            held: what the slots compute with.
        """
        shape, d = self.shape, self.shape.hidden_size
        values = shape.value_head_dim or shape.head_dim
        query, kv = held.heads * shape.head_dim, held.kv_heads * shape.head_dim
        depth = (self.forwards + 1) * (4 * d + 2 * query + 2 * kv) / 2
        products = self.products(tokens, held.attention, depth, 4)
        scores = 2 * tokens * self.keys * held.heads * (shape.head_dim + values) * (self.forwards + 2.5)
        flops = products + scores / (self._speed * self.hardware.attention_efficiency)
        moved = own_tokens * d * self._repeated(NORM_AND_RESIDUAL)
        moved = moved + tokens * (query + kv) * self._repeated(ROTARY)
        return self._busy(flops, moved, self._repeated(ATTENTION_LAUNCHES))

    def dense(self, tokens: Floats, own_tokens: Floats, held: HeldLayers, routed: NDArray[np.bool_]) -> Busy:
        """Second norm and residual of each layer, router, and what feed-forward every token visits, [l, s].

        Args:
            tokens: [s], of the slot's lane.
            own_tokens: [s], those that the slot norms and routes itself.
            held: what the slots compute with; projections down to latents count here.
            routed: [l], layers with a router.
        """
        d = self.shape.hidden_size
        flops = self.products(own_tokens, held.whole, 0.0, 1)
        has = held.neurons > 0
        depth = (self.forwards * (d + held.neurons) + d + 2 * held.neurons) * has
        flops = flops + self.products(tokens, held.dense, depth, 2)
        moved = own_tokens * d * self._repeated(NORM_AND_RESIDUAL)
        moved = moved + tokens * held.neurons * self._repeated(SWIGLU)
        launches = routed[:, None] * self._repeated(ROUTER_LAUNCHES) + has * self._repeated(PIECE_LAUNCHES)
        return self._busy(flops, moved, launches)

    def head(self, tokens: Floats, own_tokens: Floats, vocab_rows: Floats) -> Busy:
        """Embedding, final norm, head and loss, [s]; never recomputed.

        Args:
            tokens: [s], of the slot's lane.
            own_tokens: [s], those that the slot embeds and norms itself.
            vocab_rows: [s], rows of the head that the slot computes.
        """
        d = self.shape.hidden_size
        size = d * vocab_rows
        flops = (
            2 * size * (2 * rounded_up(tokens, self.hardware.tile_rows) + tokens)
            + self._tail(2 * d + vocab_rows + tokens) * (tokens > 0)
        ) / (self._speed * self.hardware.gemm_efficiency)
        logits = tokens * vocab_rows * (LOGIT_ELEMENTS + LOGIT_FLOAT_BYTES / self.element_bytes)
        return self._busy(flops, logits + own_tokens * d * (4 + NORM_AND_RESIDUAL[0]), HEAD_LAUNCHES)

    def experts(self, rows: Floats, units: Floats) -> Busy:
        """All slices of each layer, with the order of their rows.

        Args:
            rows: [l, e, s], expected rows of each expert at each slot, in this round.
            units: [l, e, s], units of each expert on each slot.

        Returns:
            [l, s].
        """
        hardware, d = self.hardware, self.shape.hidden_size
        neurons = units * float(self.shape.neuron_block)
        held = units > 0
        rows = np.where(held, rows, 0.0)
        speed = self._speed * hardware.expert_efficiency
        # Gate and up side by side are what the columns of the first product are.
        wide = rounded_up(2 * neurons, hardware.tile_columns) / 2
        tall = expected_rows(rows, hardware.tile_rows)
        operations = 6 * d * wide * ((self.forwards + 1) * tall + rows)
        weights = 3 * d * neurons * (self.forwards + 2) * self.element_bytes * (rows > 0)
        computing, loading = operations / speed, weights * hardware.memory_seconds_per_byte
        bound = loading > computing
        flops = np.where(bound, 0.0, computing).sum(axis=1)
        memory = np.where(bound, loading, 0.0).sum(axis=1)
        moved = rows * (neurons * self._repeated(SWIGLU) + d * self._repeated(PERMUTE))
        memory = memory + moved.sum(axis=1) * self.element_bytes * hardware.memory_seconds_per_byte
        pieces = held.sum(axis=1).astype(np.float64)
        depth = self.forwards * (d + neurons) + d + 2 * neurons + 2 * rows
        deep = np.where(held, depth, 0.0).sum(axis=1)
        if hardware.grouped_experts:
            deep = deep / np.maximum(pieces, 1.0)
        flops = flops + self._tail(deep) / speed
        if hardware.grouped_experts:
            launched = np.minimum(pieces, 1.0) * self._repeated(GROUPED_LAUNCHES)
        else:
            launched = pieces * self._repeated(PIECE_LAUNCHES)
        launches = launched * hardware.launch_s
        return Busy(flops, memory, launches)

    def optimizer(self, owned: Floats, mirrored: Floats) -> Busy:
        """Update of owned and mirrored elements, [s]."""
        accesses = owned * OPTIMIZER_ACCESSES_OWNED + mirrored * OPTIMIZER_ACCESSES_MIRRORED
        seconds = accesses * self.accumulation_bytes * self.hardware.optimizer_seconds_per_byte
        return Busy(np.zeros_like(seconds), seconds, np.zeros_like(seconds))

    def copies(self, elements: Floats) -> Busy:
        """Reading and writing elements once more, where rows are packed for sending."""
        return self._busy(np.zeros_like(elements), 2 * elements, 0)

    def _repeated(self, counts: tuple[int, int]) -> int:
        """Forward and backward, and the forward once more where it is recomputed."""
        return counts[0] + (self.forwards - 1) * counts[1]

    def products(self, tokens: Floats, size: Floats | float, depth: Floats | float, matrices: int) -> Floats:
        """Seconds of forward, both gradients, and recomputation for weights of ``size`` elements in all.

        Args:
            tokens: rows.
            size: elements of the weights.
            depth: sum of inner dimensions over launches, without those of the weights' gradients.
            matrices: how many weights there are.
        """
        tall = rounded_up(tokens, self.hardware.tile_rows)
        operations = 2 * size * ((self.forwards + 1) * tall + tokens)
        operations = operations + self._tail(depth + matrices * tokens) * (tokens > 0)
        return np.asarray(operations / (self._speed * self.hardware.gemm_efficiency))

    def _tail(self, depth: Floats) -> Floats:
        """Operations lost where the last round of tiles fills half of the processors, over some launches."""
        if self.hardware.processors is None:
            return np.zeros_like(depth)
        tile = self.hardware.tile_rows * self.hardware.tile_columns
        return 0.5 * 2 * tile * depth * self.hardware.processors

    def _busy(self, flops: Floats, elements: Floats, launches: int | NDArray[np.int64]) -> Busy:
        memory = elements * self.element_bytes * self.hardware.memory_seconds_per_byte
        started = np.broadcast_to(launches * self.hardware.launch_s, np.shape(flops))
        return Busy(flops, np.broadcast_to(memory, np.shape(flops)), started)
