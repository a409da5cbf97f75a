"""The tensors that one slot keeps of one layout, addressed by units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from nep.planning.layout import Layout, Lines, storage_offset

CPU = torch.device("cpu")


def allocate(
    layout: Layout, slot: int, lines: Lines, dtype: torch.dtype, device: torch.device = CPU
) -> dict[str, torch.Tensor]:
    """Zeroed tensors `[units that the slot has, *unit_shape]` for every parameter (also for none: 0 units)."""
    return {
        name: torch.zeros(layout.num_units(line.axis, slot), *line.unit_shape, dtype=dtype, device=device)
        for name, line in lines.items()
    }


class Holding:
    """Tensors of one layout on one slot, in storage order.

    Args:
        layout: who has which units.
        slot: whose part this is.
        fields: one or more sets of tensors that are cut alike (say master weights and both moments); each
            maps every parameter name to a tensor `[units, *unit_shape]`.
    """

    def __init__(self, layout: Layout, slot: int, *fields: Mapping[str, torch.Tensor]):
        self.layout = layout
        self.slot = slot
        self.fields = fields

    def views(self, axis: str, names: Sequence[str], lo: int, hi: int) -> list[torch.Tensor] | None:
        """Views of units [lo, hi) for each field and parameter of an axis, or None if they are not all here.

        A fixed order (field, storage piece, parameter) makes the two ends of a transfer agree, since pieces
        never cross a storage boundary of either end.
        """
        chunks = storage_offset(self.layout.intervals(axis, self.slot), lo, hi)
        if sum(b - a for _, a, b in chunks) != hi - lo:
            return None
        return [
            field[name][offset : offset + b - a] for field in self.fields for offset, a, b in chunks for name in names
        ]
