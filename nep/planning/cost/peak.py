"""When a step needs most memory beside its state: the moments of a backward pass, one after the other.

Activations are freed layer by layer while sums of gradients start, so their peaks do not add up. Shapes: b buckets
(one per layer, embedding first and head last), l layers, s slots of the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from nep.planning.cost.held import Floats
from nep.planning.cost.workload import Workload
from nep.planning.layout import Intervals, Layout, LineKind, Lines, axes, axis_lines, axis_unit_numel, count_units
from nep.planning.plan import Plan


@dataclass(frozen=True, kw_only=True, eq=False)
class Activations:
    """Bytes of a micro-batch.

    Attributes:
        kept: what forward keeps, [l + 1, s]; the last row is the head's.
        again: what a layer's backward computes again, [l, s].
        passing: what its backward has at most beside that, without gradients of weights, [l, s].
    """

    kept: Floats
    again: Floats
    passing: Floats

    @classmethod
    def zeros(cls, num_layers: int, num_slots: int) -> "Activations":
        """To be filled in."""
        kept, again, passing = (np.zeros((rows, num_slots)) for rows in (num_layers + 1, num_layers, num_layers))
        return cls(kept=kept, again=again, passing=passing)

    def put(self, columns: Sequence[int], other: "Activations") -> None:
        """Fill in some slots."""
        self.kept[:, columns] = other.kept
        self.again[:, columns] = other.again
        self.passing[:, columns] = other.passing


def step_peak(plan: Plan, workload: Workload, lines: Lines, activations: Activations) -> dict[int, dict[str, int]]:
    """Bytes of what passes: activations, gradients that are not accumulated yet, and messages.

    Looked at are the backward of each bucket, while the bucket before it is summed up and the one before that sent to
    the mirrors; and the end of it, when its own sum starts and the one before is forwarded, see
    `nep.parallel.grad_sync.Reduction`.

    Args:
        plan: who holds, owns and mirrors what.
        workload: the step.
        lines: the model's.
        activations: of one micro-batch.

    Returns:
        Slot -> kind -> bytes at the moment when they are most in all.
    """
    to_owner, to_mirror = messages(plan, workload, lines)
    fresh, narrow = _fresh_gradients(plan, workload, lines)
    num_buckets, num_slots = fresh.shape
    alive = np.zeros((num_buckets, num_slots))
    alive[1:] = activations.kept
    alive = alive.cumsum(axis=0)
    repeated = np.zeros((num_buckets, num_slots))
    repeated[1:-1] = activations.again
    fresh[1:-1] += activations.passing
    none = np.zeros(num_slots)
    # [kind, s] at each moment; kinds are staging, activations, workspace.
    moments = [np.stack((none, alive[bucket] + repeated[bucket], fresh[bucket])) for bucket in range(num_buckets)]
    if workload.buckets and workload.overlap:
        own, mirror = (np.concatenate((sizes, np.zeros((2, num_slots)))) for sizes in (to_owner, to_mirror))
        for bucket in range(num_buckets):
            moments[bucket][0] = own[bucket + 1] + mirror[bucket + 2]
            left = alive[bucket - 1] if bucket else none
            moments.append(np.stack((own[bucket] + np.maximum(own[bucket + 1], mirror[bucket + 1]), left, none)))
    else:
        later = np.concatenate((to_owner[1:], np.zeros((1, num_slots))))
        forwarded = np.concatenate((to_mirror[1:], np.zeros((1, num_slots))))
        pairs = to_owner + np.maximum(later, forwarded) if workload.buckets else np.maximum(to_owner, to_mirror)
        moments += [np.stack((pair, none, none)) for pair in pairs]
    if narrow.any() and _num_rounds(plan, workload) > 1:
        # Rounds but the last keep the gradients of all parameters until their end.
        behind = narrow[::-1].cumsum(axis=0)[::-1] - narrow
        moments += [
            np.stack((none, alive[bucket] + repeated[bucket], fresh[bucket] + behind[bucket]))
            for bucket in range(num_buckets)
        ]
    table = np.stack(moments)
    when = table.sum(axis=1).argmax(axis=0)
    highest = np.take_along_axis(table, when[None, None, :], axis=0)[0]
    return {
        slot: dict(zip(("staging", "activations", "workspace"), map(ceil, column), strict=True))
        for slot, column in zip(plan.slots, highest.T.tolist(), strict=True)
    }


def messages(plan: Plan, workload: Workload, lines: Lines) -> tuple[Floats, Floats]:
    """Bytes that a slot sends and receives, to the owners and to the mirrors, each [b, s]; [1, s] without buckets.

    A slot packs what others own of what it holds, and gets from each other holder what it owns. Finished sums of what
    it owns go to the mirror, and those of what it mirrors come.
    """
    numel = axis_unit_numel(lines)
    units = _Units(plan)
    num_buckets = _num_buckets(lines) if workload.buckets else 1
    to_owner, to_mirror = (np.zeros((num_buckets, len(plan.slots))) for _ in range(2))
    for axis, line in axis_lines(lines).items():
        bucket = line.layer + 1 if workload.buckets else 0
        size = numel[axis] * workload.accumulation_bytes
        held, owned, mirrored = (units.of(layout, axis) for layout in (plan.holders, plan.owners, plan.mirrors))
        # A collective adds up on the way; straight to the owner every holder's piece has its own place.
        pieces = max(held.sum() / line.num_units - 1, 0.0)
        if workload.grad_sync == "reduce_scatter":
            pieces = min(pieces, 1.0)
        to_owner[bucket] += (np.maximum(held - owned, 0) + owned * pieces) * size
        to_mirror[bucket] += (mirrored + (owned if mirrored.any() else 0)) * size
    return to_owner, to_mirror


def _fresh_gradients(plan: Plan, workload: Workload, lines: Lines) -> tuple[Floats, Floats]:
    """Gradients of a bucket as backward makes them: what is alive at once, and what waits to be accumulated; [b, s].

    Gradients in the accumulation dtype are added at once, one parameter after the other; those of experts come
    together, and a grouped product has no output argument, so that the largest of them is there twice. Narrower
    gradients wait until the bucket, or the round, is complete.
    """
    order = axis_lines(lines)
    units = _Units(plan)
    fresh, narrow = (np.zeros((_num_buckets(lines), len(plan.slots))) for _ in range(2))
    waits = workload.parameter_bytes < workload.accumulation_bytes
    for axis, names in axes(lines).items():
        line = order[axis]
        sizes = [lines[name].unit_numel * workload.parameter_bytes for name in names]
        together = sum(sizes) + max(sizes) if line.kind is LineKind.EXPERTS else max(sizes)
        held, bucket = units.of(plan.holders, axis), line.layer + 1
        fresh[bucket] = np.maximum(fresh[bucket], held * together)
        if waits:
            narrow[bucket] += held * sum(sizes)
    return np.maximum(fresh, narrow), narrow


class _Units:
    """How many units of an axis the slots have; mappings that axes share are counted once."""

    def __init__(self, plan: Plan) -> None:
        self._column = {slot: index for index, slot in enumerate(plan.slots)}
        self._known: dict[int, tuple[Mapping[int, Intervals], Floats]] = {}

    def of(self, layout: Layout, axis: str) -> Floats:
        """[s]."""
        by_slot = layout.by_slot(axis)
        if id(by_slot) not in self._known:
            counts = np.zeros(len(self._column))
            for slot, intervals in by_slot.items():
                counts[self._column[slot]] = count_units(intervals)
            self._known[id(by_slot)] = by_slot, counts  # the mapping too, or its id could be another's
        return self._known[id(by_slot)][1]


def _num_buckets(lines: Lines) -> int:
    return 2 + max(line.layer for line in axis_lines(lines).values())


def _num_rounds(plan: Plan, workload: Workload) -> int:
    return max(ceil(lane.num_sequences / workload.micro_batch_size) for lane in plan.lanes)
