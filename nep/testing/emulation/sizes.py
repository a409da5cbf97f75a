"""How large the messages of the gradient buckets would be in the full model.

Norms, routers and vocabulary rows shrink less than heads and experts, and a whole router has one owner: counting its
elements like others would make that owner's links look busy. So the messages that sums, mirrors and returns consist of
are worked out for both models; a message is recognised by its sizes in the small one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nep.planning.layout import Layout, Lines, axes, axis_unit_numel
from nep.planning.plan import Plan
from nep.planning.transfer import overlaps

Sizes = Mapping[int, int]
"""Peer -> elements."""


class Messages(NamedTuple):
    """What one slot sends and gets in one exchange."""

    sends: Sizes
    receives: Sizes


class BucketSizes:
    """Full sizes of one slot's exchanges under one plan.

    Args:
        plan: the plan.
        slot: whose exchanges.
        small, full: lines of both models; they have the same axes.
    """

    def __init__(self, plan: Plan, slot: int, small: Lines, full: Lines):
        numel, full_numel = axis_unit_numel(small), axis_unit_numel(full)
        order: dict[int, list[str]] = {}
        for axis, names in axes(small).items():
            order.setdefault(small[names[0]].layer, []).append(axis)
        self._full: dict[object, Messages] = {}
        for layer_axes in order.values():
            for source, target in (
                (plan.holders, plan.owners),
                (plan.owners, plan.mirrors),
                (plan.owners, plan.holders),
            ):
                found = [_messages(source, target, slot, tuple(layer_axes), sizes) for sizes in (numel, full_numel)]
                self._full[_signature(found[0])] = found[1]

    def full(self, sends: Sizes, receives: Sizes) -> Messages | None:
        """Elements of the full model, or None if this is no exchange of a bucket."""
        return self._full.get(_signature(Messages(sends, receives)))


def _messages(source: Layout, target: Layout, slot: int, order: tuple[str, ...], numel: Mapping[str, int]) -> Messages:
    sends: dict[int, int] = {}
    receives: dict[int, int] = {}
    for piece in overlaps(source.restrict([slot]), target, order).pieces:
        if piece.dst != slot:
            sends[piece.dst] = sends.get(piece.dst, 0) + (piece.hi - piece.lo) * numel[piece.axis]
    for piece in overlaps(source, target.restrict([slot]), order).pieces:
        if piece.src != slot:
            receives[piece.src] = receives.get(piece.src, 0) + (piece.hi - piece.lo) * numel[piece.axis]
    return Messages(sends, receives)


def _signature(messages: Messages) -> object:
    return tuple(tuple(sorted(sizes.items())) for sizes in messages)
