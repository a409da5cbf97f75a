"""Hashes of a slot's tensors that do not depend on where intervals are cut, so that copies on other slots compare.

Each unit of each parameter has a hash of its own, of its bytes and of which unit of what it is; the hash of an interval
is the sum of its units' hashes modulo 2^64. So whoever holds the same units has the same sum, and owned minus mirrored
is zero over all slots.

Within a unit, words of 32 bits are multiplied with odd random weights of 64 and added in blocks (multilinear hashing,
see Lemire and Kaser, arXiv 1202.4961); the sums of blocks and units are mixed by the finalizer of splitmix64. Any one
flipped bit changes a hash for certain, since an odd weight times a power of two is not zero; other differences are
missed with a probability of 2^-32. It is no protection against an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import torch

from nep.planning.layout import Layout, Lines

_BLOCK = 4096  # words that are added up before they are mixed
_CHUNK = 1 << 16  # words at a time: twice that many bytes fit a cache, and one buffer serves them all
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class UnitHasher:
    """Hashes of what one slot has in one layout, unit by unit. Made once for a layout, used for tensors of any kind.

    All units of all parameters are in one vector, by parameter, units in storage order.

    Args:
        layout: which units.
        slot: whose.
        lines: the model's.
    """

    def __init__(self, layout: Layout, slot: int, lines: Lines):
        self._layout, self._slot, self._lines = layout, slot, lines
        self._units = {axis: units_of(layout, axis, slot) for axis in {line.axis: None for line in lines.values()}}
        self._spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name, line in lines.items():
            start, end = end, end + len(self._units[line.axis])
            self._spans[name] = start, end
        self.num_units = end
        self._bases: dict[str, torch.Tensor] = {}

    def split(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """A vector by parameter: views [units that the slot has]."""
        return {name: values[start:end] for name, (start, end) in self._spans.items()}

    def join(self, by_axis: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The inverse, of what is the same for all parameters of an axis."""
        return torch.cat([by_axis[line.axis] for line in self._lines.values()])

    def digest(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
        """What the bytes of each unit come to, int64 [num_units] on the host; `key` makes it a hash.

        Args:
            tensors: parameter name -> `[units, *unit_shape]`, in the storage order of the layout.
            dtype: to convert them to before.
        """
        found = torch.empty(self.num_units, dtype=torch.int64, device=next(iter(tensors.values())).device)
        for name, (start, end) in self._spans.items():
            if start < end:
                _digest(tensors[name].detach().reshape(end - start, -1), dtype, found[start:end])
        return found.cpu()

    def key(self, digests: torch.Tensor, kind: str) -> torch.Tensor:
        """Hashes, int64 [num_units]: equal bytes of another unit, parameter or kind have another one.

        Args:
            kind: what was digested (master, a moment, parameters).
        """
        if kind not in self._bases:
            bases = [self._units[line.axis] * _signed(_GOLDEN) + _key(kind, name) for name, line in self._lines.items()]
            self._bases[kind] = _mix(torch.cat(bases))
        return _mix(digests + self._bases[kind])

    def hash(self, tensors: Mapping[str, torch.Tensor], kind: str) -> torch.Tensor:
        """`digest` and `key`."""
        return self.key(self.digest(tensors), kind)


def units_of(layout: Layout, axis: str, slot: int) -> torch.Tensor:
    """Numbers of the units that a slot has of an axis, in storage order, int64."""
    parts = [torch.arange(lo, hi) for lo, hi in layout.intervals(axis, slot)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _key(kind: str, name: str) -> int:
    return _signed(int.from_bytes(hashlib.sha256(f"{kind}/{name}".encode()).digest()[:8], "little"))


def _digest(rows: torch.Tensor, dtype: torch.dtype | None, found: torch.Tensor) -> None:
    """Of each row; rows of many words go block by block, and each block changes what the ones after it make."""
    words_per_value = max(1, (rows.dtype if dtype is None else dtype).itemsize // 4)
    values = max(1, _BLOCK // words_per_value)
    for first in range(0, rows.shape[1], values):
        block = rows[:, first : first + values]
        if first == 0:
            _weighted_sums(block, words_per_value, dtype, found)
        else:
            sums = torch.empty_like(found)
            _weighted_sums(block, words_per_value, dtype, sums)
            found.copy_(_mix(found) + sums)


def _weighted_sums(block: torch.Tensor, words_per_value: int, dtype: torch.dtype | None, sums: torch.Tensor) -> None:
    """Sum of the words of each row times the weights of their places, modulo 2^64."""
    rows, width = block.shape[0], block.shape[1] * words_per_value
    weights = _weights(width, block.device)
    step = min(rows, max(1, _CHUNK // width))
    room = torch.empty(step, width, dtype=torch.int64, device=block.device)
    for first in range(0, rows, step):
        some = block[first : first + step]
        some = some if dtype is None else some.to(dtype)
        words = some.view(torch.int32 if some.element_size() >= 4 else torch.int16)
        torch.sum(room[: len(some)].copy_(words).mul_(weights), 1, out=sums[first : first + step])


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
