"""A committed step as one slot has it, copied at the step's boundary so that training may go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from nep.checkpoint.files import Entry
from nep.checkpoint.logical import Rows, logical_rows, take
from nep.checkpoint.manifest import Contents
from nep.parallel.holding import Holding
from nep.parallel.state import OptimizerShard, SlotState, Tensors
from nep.planning.intervals import Intervals, intersect, normalize, subtract
from nep.planning.layout import Layout, Lines, axes, axis_unit_numel
from nep.planning.plan import Plan

Cut = Mapping[str, Intervals]
"""Axis -> units."""


@dataclass(frozen=True)
class Part:
    """What one file of a slot's owned state has.

    Attributes:
        slot: the owner.
        index: among the slot's parts.
        cut: units, ascending.
    """

    slot: int
    index: int
    cut: Cut


def parts_of(plan: Plan, slot: int, lines: Lines, unit_bytes: Mapping[str, int], part_bytes: int) -> list[Part]:
    """How the owned state of a slot is divided into files. All slots find the same.

    Axes stay whole, so a file may be larger.

    Args:
        unit_bytes: axis -> bytes of one unit, over all parameters and kinds.
        part_bytes: what a file is filled up to.
    """
    parts: list[Part] = []
    cut: dict[str, Intervals] = {}
    size = 0
    for axis in axes(lines):
        owned = normalize(plan.owners.intervals(axis, slot))
        if not owned:
            continue
        more = sum(hi - lo for lo, hi in owned) * unit_bytes[axis]
        if cut and size + more > part_bytes:
            parts.append(Part(slot, len(parts), cut))
            cut, size = {}, 0
        cut[axis] = owned
        size += more
    if cut:
        parts.append(Part(slot, len(parts), cut))
    return parts


@dataclass(kw_only=True)
class Snapshot:
    """Copies of what a slot owns and mirrors after a committed step, and what to say about it.

    Attributes:
        contents: for the manifest.
        small: makes small tensors by name, the same on every slot; called by the thread of one of them.
        plan: in force at the step.
        owned, mirrored: tensors by kind.
    """

    contents: Contents
    small: Callable[[], Tensors]
    plan: Plan
    slot: int
    lines: Lines
    owned: Mapping[str, Tensors]
    mirrored: Mapping[str, Tensors]

    @classmethod
    def take(
        cls,
        state: SlotState,
        lines: Lines,
        contents: Contents,
        small: Callable[[], Tensors],
        into: Snapshot | None = None,
    ) -> Snapshot:
        """Copy. The owned and mirrored state must be of `contents.step`; parameters may still be on their way.

        Args:
            into: an earlier snapshot that nobody needs any more, whose memory is used again where it fits: new memory
                takes several times as long to fill, since the kernel hands it out page by page.
        """
        return cls(
            contents=contents,
            small=small,
            plan=state.plan,
            slot=state.slot,
            lines=lines,
            owned=_copies(state.owned, {} if into is None else into.owned),
            mirrored=_copies(state.mirrored, {} if into is None else into.mirrored),
        )

    @property
    def step(self) -> int:
        return self.contents.step

    @property
    def dtype(self) -> torch.dtype:
        """Of master weights and moments."""
        return next(iter(self.owned["master"].values())).dtype

    def unit_bytes(self) -> dict[str, int]:
        """Axis -> bytes of one unit over all kinds."""
        per_element = self.dtype.itemsize * len(self.owned)
        return {axis: numel * per_element for axis, numel in axis_unit_numel(self.lines).items()}

    def entries(self, cut: Cut, *, mirrored: bool) -> list[Entry]:
        """The tensors of a file, from the owned or the mirrored state, which must have all of the cut."""
        layout, tensors = (self.plan.mirrors, self.mirrored) if mirrored else (self.plan.owners, self.owned)
        found = []
        for kind in tensors:
            holding = Holding(layout, self.slot, tensors[kind])
            for name, rows in _rows_of(cut, self.lines):
                found.append(self._entry(kind, name, rows, holding))
        return found

    def _entry(self, kind: str, name: str, rows: Rows, holding: Holding) -> Entry:
        line = self.lines[name]

        def make() -> torch.Tensor:
            views = holding.views(line.axis, [name], rows.unit_lo, rows.unit_hi)
            assert views is not None, f"slot {self.slot} does not have {name} [{rows.unit_lo}, {rows.unit_hi})"
            return take(views[0] if len(views) == 1 else torch.cat(views), rows)

        if rows.part < 0:
            shape = (rows.hi - rows.lo, *line.unit_shape)
        else:
            shape = (rows.hi - rows.lo, *line.unit_shape[-1:])
        return Entry(entry_key(kind, rows.name, rows.lo, rows.hi), self.dtype, shape, make)

    def mirrored_of(self, part: Part, live: list[int]) -> Cut:
        """Which units of a dead owner's part this slot has to write: each is its lowest live mirror's."""
        left = dict(part.cut)
        for slot in sorted(live):
            mine = cut_by(self.plan.mirrors, slot, left)
            if slot == self.slot:
                return mine
            left = without(left, mine)
        return {}


def entry_key(kind: str, name: str, lo: int, hi: int) -> str:
    """Name of a tensor in a chunk: rows `[lo, hi)` of a logical tensor."""
    return f"{kind}/{name}[{lo}:{hi}]"


def cut_by(layout: Layout, slot: int, cut: Cut) -> dict[str, Intervals]:
    """The units of a cut that a slot has in a layout."""
    found = {axis: intersect(layout.intervals(axis, slot), wanted) for axis, wanted in cut.items()}
    return {axis: intervals for axis, intervals in found.items() if intervals}


def without(cut: Cut, less: Cut) -> dict[str, Intervals]:
    """A cut without the units of another."""
    left = {axis: subtract(intervals, less.get(axis, ())) for axis, intervals in cut.items()}
    return {axis: intervals for axis, intervals in left.items() if intervals}


def _rows_of(cut: Cut, lines: Lines) -> Iterator[tuple[str, Rows]]:
    for axis, names in axes(lines).items():
        for lo, hi in cut.get(axis, ()):
            for name in names:
                for rows in logical_rows(name, lines[name], lo, hi):
                    yield name, rows


def _copies(shard: OptimizerShard, into: Mapping[str, Tensors]) -> dict[str, Tensors]:
    return {
        kind: {name: _copy(tensor, into.get(kind, {}).get(name)) for name, tensor in tensors.items()}
        for kind, tensors in shard.kinds.items()
    }


def _copy(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
        return tensor.to("cpu", copy=True)
    return into.copy_(tensor)
