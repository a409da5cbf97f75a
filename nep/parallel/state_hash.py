"""Hashes of a slot's tensors that do not depend on where intervals are cut, so that copies on other slots compare.

Each unit of each parameter has a hash of its own, of its bytes and of which unit of what it is; the hash of an interval
is the sum of its units' hashes modulo 2^64. So whoever holds the same units has the same sum, and owned minus mirrored
is zero over all slots.

Within a unit, words of 32 bits are multiplied with odd random weights of 64 and added in blocks (multilinear hashing,
see Lemire and Kaser, arXiv 1202.4961); blocks and units are then mixed by the finalizer of splitmix64. Any one flipped
bit changes a hash for certain, since an odd weight times a power of two is not zero; other differences are missed
with a probability of 2^-32. It is no protection against an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import torch

from nep.planning.layout import Layout, Line, Lines

_BLOCK = 4096  # words that are added up before they are mixed
_CHUNK = 1 << 16  # words at a time: twice that many bytes fit a cache, and one buffer serves them all
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

UnitHashes = dict[str, torch.Tensor]
"""Parameter name -> int64 [units that the slot has]."""


def unit_hashes(tensors: Mapping[str, torch.Tensor], kind: str, layout: Layout, slot: int, lines: Lines) -> UnitHashes:
    """The hash of each unit that a slot has of each parameter, in storage order.

    Args:
        tensors: parameter name -> `[units, *unit_shape]`, in the storage order of the layout.
        kind: what they are (master, a moment, parameters); equal values of another kind have another hash.
        layout: which units they are.
    """
    return {name: _hash(tensors[name], kind, name, lines[name], layout, slot) for name in lines}


def total(hashes: Mapping[str, torch.Tensor], times: Mapping[str, torch.Tensor] | None = None) -> int:
    """Sum of the hashes modulo 2^64.

    Args:
        hashes: of some units.
        times: how often each counts; by default once.
    """
    found = 0
    for name, values in hashes.items():
        found += int((values if times is None else values * times[name]).sum())
    return found % 2**64


def units_of(layout: Layout, axis: str, slot: int) -> torch.Tensor:
    """Numbers of the units that a slot has of an axis, in storage order, int64."""
    parts = [torch.arange(lo, hi) for lo, hi in layout.intervals(axis, slot)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _hash(tensor: torch.Tensor, kind: str, name: str, line: Line, layout: Layout, slot: int) -> torch.Tensor:
    units = units_of(layout, line.axis, slot).to(tensor.device)
    if not len(units):
        return units
    words = tensor.detach().reshape(len(units), -1)
    words = words.view(torch.int32 if words.element_size() >= 4 else torch.int16)
    key = int.from_bytes(hashlib.sha256(f"{kind}/{name}".encode()).digest()[:8], "little")
    found = _mix(units * _signed(_GOLDEN) + _signed(key))
    for index, first in enumerate(range(0, words.shape[1], _BLOCK)):
        sums = _weighted_sums(words[:, first : first + _BLOCK])
        found = _mix(found ^ (sums + _signed(index * _GOLDEN)))
    return found


def _weighted_sums(words: torch.Tensor) -> torch.Tensor:
    """Sum of the words of each row times the weights of their places, modulo 2^64."""
    rows, width = words.shape
    weights = _weights(width, words.device)
    step = max(1, _CHUNK // width)
    room = torch.empty(min(step, rows), width, dtype=torch.int64, device=words.device)
    sums = torch.empty(rows, dtype=torch.int64, device=words.device)
    for first in range(0, rows, step):
        some = words[first : first + step]
        torch.sum(room[: len(some)].copy_(some).mul_(weights), 1, out=sums[first : first + step])
    return sums


@lru_cache(maxsize=64)
def _weights(width: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(1, width + 1, dtype=torch.int64, device=device)
    return _mix(places * _signed(_GOLDEN)) | 1


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014); a permutation of 64-bit numbers."""
    values = (values ^ _shifted(values, 30)) * _signed(_FIRST)
    values = (values ^ _shifted(values, 27)) * _signed(_SECOND)
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros from the left."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
