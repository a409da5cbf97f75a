"""Initial values as a pure function of (seed, parameter name, unit), so that any layout starts equal.

A unit's values come from the counter-based generator Philox 4x64 (Salmon et al., SC'11, "Parallel random
numbers: as easy as 1, 2, 3"), keyed by seed and name, with the unit as the counter; normal values by Box and
Muller (1958).
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

from nep.planning.layout import Line

_VALUES_PER_COUNTER = 4


def initial_units(seed: int, name: str, line: Line, lo: int, hi: int) -> torch.Tensor:
    """Initial values of units [lo, hi): float64 `[hi - lo, *unit_shape]`, normal(0, init_std), or ones."""
    shape = (hi - lo, *line.unit_shape)
    if line.init_std is None:
        return torch.ones(shape, dtype=torch.float64)
    numel = line.unit_numel
    counters_per_unit = -(-numel // _VALUES_PER_COUNTER)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    key = int.from_bytes(digest[:16], "little")
    generator = np.random.Philox(key=key, counter=lo * counters_per_unit)
    raw = generator.random_raw((hi - lo) * counters_per_unit * _VALUES_PER_COUNTER)
    # 53 random bits, shifted by half a step: uniform in the open interval (0, 1).
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(uniform[0::2]))
    angle = 2.0 * math.pi * uniform[1::2]
    normal = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1)
    values = normal.reshape(hi - lo, counters_per_unit * _VALUES_PER_COUNTER)[:, :numel]
    return torch.from_numpy(values * line.init_std).reshape(shape)
