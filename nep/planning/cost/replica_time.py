"""Seconds of forward and backward of one replica.

Shapes: l MoE layers, e experts, s slots of the replica.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from nep.planning.cost.dispatch_rows import hit_chance, inclusion
from nep.planning.cost.hardware import HardwareProfile
from nep.planning.cost.held import Floats, expert_axes, expert_units, held_layers, vocab_rows
from nep.planning.cost.kernels import Busy, Kernels
from nep.planning.cost.traffic import LINKS, NETWORK, SCALE_UP, link_seconds, links
from nep.planning.cost.workload import Workload
from nep.planning.layout import Layout, Lines, axis_lines
from nep.planning.plan import Lane
from nep.planning.shapes import ModelShape

__all__ = ["ReplicaTime", "expert_axes", "expert_units", "replica_time", "row_bytes"]

# Rows forward and their gradients back, results forward and their gradients back; and before them the counts.
EXCHANGES_PER_LAYER = 5
# All-gather before and reduce-scatter after attention, forward and backward; and once around the head.
LANE_COLLECTIVES_PER_LAYER, LANE_COLLECTIVES_OF_HEAD = 4, 2


@dataclass(frozen=True, kw_only=True)
class ReplicaTime:
    """Forward and backward of one replica.

    Attributes:
        parts: part -> seconds.
        by_slot: slot -> part -> seconds that the slot itself is busy.
        binding: part -> (slot that takes longest, what it spends the time on).
        rounds: forward and backward passes.
        tokens: of the replica's share of the batch.
        rows_per_token: rows that a token sends in one layer, its own slot included.
        busiest_rows: rows of a layer's busiest slot over the mean, averaged over layers.
    """

    parts: Mapping[str, float]
    by_slot: Mapping[int, Mapping[str, float]]
    binding: Mapping[str, tuple[int, str]]
    rounds: int
    tokens: int
    rows_per_token: float
    busiest_rows: float

    @property
    def seconds(self) -> float:
        """Of all parts."""
        return sum(self.parts.values())

    def moved_to(self, slots: Sequence[int]) -> "ReplicaTime":
        """The same for a replica that differs in the numbers of its slots only."""
        moved = dict(zip(self.by_slot, slots, strict=True))
        return replace(
            self,
            by_slot={moved[slot]: busy for slot, busy in self.by_slot.items()},
            binding={part: (moved[slot], what) for part, (slot, what) in self.binding.items()},
        )


def row_bytes(shape: ModelShape, workload: Workload) -> int:
    """Bytes of one dispatched row, there and back, forward and backward.

    Four times a row of the residual stream; weights forward and their gradients back, in the accumulation
    dtype, and expert ids in four bytes, for each of the token's experts.
    """
    row = shape.hidden_size * workload.parameter_bytes
    return 4 * row + shape.top_k * (2 * workload.accumulation_bytes + 4)


def replica_time(
    holders: Layout,
    slots: tuple[int, ...],
    lanes: tuple[Lane, ...],
    *,
    kernels: Kernels,
    workload: Workload,
    hardware: HardwareProfile,
    lines: Lines,
    domains: NDArray[np.int64],
    speeds: Floats,
    popularity: Floats,
    shares: Floats | None,
) -> ReplicaTime:
    """Seconds of forward and backward.

    Args:
        holders: of the plan.
        slots: of the replica.
        lanes: of the replica.
        kernels: prices of the kernels.
        workload: the step.
        hardware: for the links.
        lines: the model's.
        domains: [s], scale-up domain of each slot.
        speeds: [s], of compute; 1 is full speed.
        popularity: [l, e], share of each expert in a layer's load.
        shares: [l, e, s], see `step_time`; None: holders of a unit share it evenly.
    """
    units, even = expert_units(holders, slots, lines)
    shares = even if shares is None else np.where(units > 0, shares, 0.0)
    top_k = kernels.shape.top_k
    hits = hit_chance(inclusion(popularity, top_k), shares, top_k)
    work = _Work(holders, slots, lanes, kernels, hardware, lines, domains, speeds)
    counts = np.array([lane.num_sequences for lane in lanes])
    rounds = max(1, ceil(counts.max() / workload.micro_batch_size))
    sizes = np.array([counts * (index + 1) // rounds - counts * index // rounds for index in range(rounds)])
    for sequences, repeats in zip(*np.unique(sizes, axis=0, return_counts=True), strict=True):
        tokens = sequences.astype(np.float64) * workload.seq_len
        rows = tokens.sum() * top_k * popularity[:, :, None] * shares
        work.add_round(tokens, kernels.experts(rows, units), hits, row_bytes(kernels.shape, workload), int(repeats))
    received = hits.mean(axis=1)
    return ReplicaTime(
        parts=work.parts,
        by_slot={
            slot: {part: float(busy[place]) for part, busy in work.own.items()} for place, slot in enumerate(slots)
        },
        binding=work.binding(slots),
        rounds=rounds,
        tokens=int(counts.sum()) * workload.seq_len,
        rows_per_token=float(hits.sum(axis=1).mean()),
        busiest_rows=float((hits.max(axis=1) / np.where(received > 0, received, 1.0)).mean()),
    )


class _Work:
    """Adds up rounds of one replica."""

    def __init__(
        self,
        holders: Layout,
        slots: tuple[int, ...],
        lanes: tuple[Lane, ...],
        kernels: Kernels,
        hardware: HardwareProfile,
        lines: Lines,
        domains: NDArray[np.int64],
        speeds: Floats,
    ) -> None:
        self.kernels, self.hardware, self.speeds, self.domains = kernels, hardware, speeds, domains
        place = {slot: index for index, slot in enumerate(slots)}
        self.lane_of = np.zeros(len(slots), dtype=np.int64)
        self.lane_size = np.ones(len(slots))
        self.lane_apart = np.zeros(len(slots), dtype=bool)
        for index, lane in enumerate(lanes):
            places = [place[slot] for slot in lane.slots]
            self.lane_of[places] = index
            self.lane_size[places] = len(places)
            self.lane_apart[places] = len(set(domains[places])) > 1
        self.held = held_layers(holders, slots, lines)
        self.vocab_rows = vocab_rows(holders, slots, lines)
        order = axis_lines(lines)
        # Layers with experts launch a router; in those without there is nothing to wait for, but hardly
        # anything either that could differ between the slots of a lane, so they are taken like the others.
        self.routed = np.zeros(len(self.held.heads), dtype=bool)
        self.routed[[order[axis].layer for axis in expert_axes(lines)]] = True
        self.parts: dict[str, float] = {}
        self.own: dict[str, Floats] = {}
        self.busy: dict[str, Busy] = {}
        self.exchanged = np.zeros((2, 2, len(slots)))  # link, direction, slot

    def add_round(self, tokens: Floats, experts: Busy, hits: Floats, bytes_per_row: int, repeats: int) -> None:
        """Adds equal rounds.

        Args:
            tokens: of each lane.
            experts: [l, s] at speed 1.
            hits: [l, s], chance that a token goes to a slot.
            bytes_per_row: see `row_bytes`.
            repeats: how many such rounds there are.
        """
        kernels, slower = self.kernels, 1.0 / self.speeds
        lane_tokens = tokens[self.lane_of]
        own_tokens = lane_tokens / self.lane_size
        attention = kernels.attention(lane_tokens, own_tokens, self.held) * slower
        dense = kernels.dense(lane_tokens, own_tokens, self.held, self.routed) * slower
        head = kernels.head(lane_tokens, own_tokens, self.vocab_rows) * slower
        lane = self._lane_seconds(own_tokens)
        layers = len(self.routed)
        # From one exchange of rows to the next a slot does all of these, so the slowest counts for the sum.
        between = attention.total + dense.total + LANE_COLLECTIVES_PER_LAYER * lane
        last = np.argmax(between, axis=1)
        rows = np.arange(layers)
        end = int(np.argmax(head.total + LANE_COLLECTIVES_OF_HEAD * lane))
        self._part("attention", float(attention.total[rows, last].sum()), attention.sum(0), repeats)
        waited_dense = float(dense.total[rows, last].sum() + head.total[end])
        self._part("dense", waited_dense, dense.sum(0) + head, repeats)
        collectives = LANE_COLLECTIVES_PER_LAYER * layers + LANE_COLLECTIVES_OF_HEAD
        waited = LANE_COLLECTIVES_PER_LAYER * lane[last].sum() + LANE_COLLECTIVES_OF_HEAD * lane[end]
        self._own("tensor_parallel", float(waited), collectives * lane, repeats)
        experts = experts * slower
        self._part("expert_gemm", float(experts.total.max(axis=1).sum()), experts.sum(0), repeats)
        self._dispatch(own_tokens, hits, bytes_per_row, repeats)

    def _dispatch(self, own_tokens: Floats, hits: Floats, bytes_per_row: int, repeats: int) -> None:
        """Rows [l, s] over links: what a slot gets from others, and what it sends to them."""
        by_link = np.zeros((2, 2, *hits.shape))
        total = own_tokens.sum()
        for domain in np.unique(self.domains):
            inside = self.domains == domain
            near_tokens = own_tokens[inside].sum()
            near_hits = hits[:, inside].sum(axis=1, keepdims=True)
            # Summed, not a difference: a rounding error would count as a message over the network.
            far_hits = hits[:, ~inside].sum(axis=1, keepdims=True)
            by_link[SCALE_UP, 0][:, inside] = own_tokens[inside] * (near_hits - hits[:, inside])
            by_link[SCALE_UP, 1][:, inside] = hits[:, inside] * (near_tokens - own_tokens[inside])
            by_link[NETWORK, 0][:, inside] = own_tokens[inside] * far_hits
            by_link[NETWORK, 1][:, inside] = hits[:, inside] * (total - near_tokens)
        # A difference of equal sums may leave a rounding error.
        by_link = np.maximum(by_link, 0.0)
        moved = by_link.max(axis=1) * bytes_per_row
        seconds = link_seconds(moved, self.hardware, 0)
        remote = by_link.sum(axis=0)
        packing = self.kernels.copies(4 * remote[0] * self.kernels.shape.hidden_size).total / self.speeds
        # Slots without rows take part in every exchange, so latency is the group's.
        latency = float((link_seconds(moved, self.hardware, 1) - seconds).max())
        waiting = EXCHANGES_PER_LAYER * latency * hits.shape[0]
        busy = seconds + packing
        self._own("dispatch", float(busy.max(axis=1).sum()) + waiting, busy.sum(0) + waiting, repeats)
        self.exchanged += repeats * by_link.sum(axis=2)

    def _lane_seconds(self, own_tokens: Floats) -> Floats:
        """One collective of each slot's lane: everybody gets the others' tokens, or sums for them."""
        num_bytes = own_tokens * (self.lane_size - 1) * self.kernels.shape.hidden_size
        num_bytes = num_bytes * self.kernels.element_bytes
        by_link = np.stack([np.where(self.lane_apart, 0, num_bytes), np.where(self.lane_apart, num_bytes, 0)])
        return link_seconds(by_link, self.hardware)

    def _part(self, part: str, seconds: float, busy: Busy, repeats: int) -> None:
        scaled = busy * float(repeats)
        self.busy[part] = self.busy[part] + scaled if part in self.busy else scaled
        self._own(part, seconds, busy.total, repeats)

    def _own(self, part: str, seconds: float, own: Floats, repeats: int) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + repeats * seconds
        self.own[part] = self.own.get(part, np.zeros(len(self.speeds))) + repeats * own

    def binding(self, slots: tuple[int, ...]) -> dict[str, tuple[int, str]]:
        """Part -> busiest slot and what it spends most on."""
        found: dict[str, tuple[int, str]] = {}
        for part, own in self.own.items():
            place = int(np.argmax(own))
            if part in self.busy:
                busy = self.busy[part]
                kinds = {"flops": busy.flops, "memory": busy.memory, "launches": busy.launches}
                what = max(kinds, key=lambda kind: float(kinds[kind][place]))
            elif part == "dispatch":
                prices = np.array([link.seconds_per_byte for link in links(self.hardware)])
                priced = self.exchanged[:, :, place] * prices[:, None]
                link, direction = np.unravel_index(int(np.argmax(priced)), priced.shape)
                what = f"{LINKS[link]} link, {('sending', 'receiving')[direction]}"
            else:
                what = f"{LINKS[NETWORK if self.lane_apart[place] else SCALE_UP]} link"
            found[part] = (slots[place], what)
        return found
