"""Grouped-query attention for any set of query heads.

Shapes: b sequences, t tokens of a sequence, h query heads, g key-value heads, c channels of a head.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class HeadRun(NamedTuple):
    """Local query heads [q_lo, q_hi) that use local key-value heads [kv_lo, kv_hi), equally many each."""

    q_lo: int
    q_hi: int
    kv_lo: int
    kv_hi: int


def head_runs(query_heads: Sequence[int], kv_heads: Sequence[int], group_size: int) -> tuple[HeadRun, ...]:
    """As few runs as possible for the heads that a slot holds.

    Query head q uses key-value head q // group_size. A slot's first and last key-value head may serve fewer of
    its query heads than those between, since it shares them with a neighbour: so a contiguous cut has at most
    three runs.

    Args:
        query_heads: global numbers, in storage order.
        kv_heads: global numbers, in storage order.
        group_size: query heads per key-value head in the whole model.

    Raises:
        ValueError: a query head's key-value head is not held.
    """
    place = {head: index for index, head in enumerate(kv_heads)}
    missing = sorted({head // group_size for head in query_heads} - place.keys())
    if missing:
        raise ValueError(f"key-value heads {missing} are used but not held; hold them where their query heads are")
    groups: list[list[int]] = []  # [kv index, first query index, count]
    for index, head in enumerate(query_heads):
        kv = place[head // group_size]
        if groups and groups[-1][0] == kv:
            groups[-1][2] += 1
        else:
            groups.append([kv, index, 1])
    runs: list[HeadRun] = []
    size = 0
    for kv, first, count in groups:
        if runs and count == size and runs[-1].kv_hi == kv and runs[-1].q_hi == first:
            runs[-1] = HeadRun(runs[-1].q_lo, first + count, runs[-1].kv_lo, kv + 1)
        else:
            runs.append(HeadRun(first, first + count, kv, kv + 1))
            size = count
    return tuple(runs)


def grouped_attention(
    q_bhtc: Tensor, k_bgtc: Tensor, v_bgtc: Tensor, runs: Sequence[HeadRun], mask_tt: Tensor | None
) -> Tensor:
    """Causal attention, one call for each run, without copying keys and values.

    Args:
        q_bhtc, k_bgtc, v_bgtc: the heads held here; none is fine.
        runs: see `head_runs`.
        mask_tt: added to the scores; None for plain causal attention.

    Returns:
        o_bhtc.
    """
    parts = [
        F.scaled_dot_product_attention(
            q_bhtc[:, run.q_lo : run.q_hi],
            k_bgtc[:, run.kv_lo : run.kv_hi],
            v_bgtc[:, run.kv_lo : run.kv_hi],
            attn_mask=mask_tt,
            is_causal=mask_tt is None,
            enable_gqa=run.q_hi - run.q_lo != run.kv_hi - run.kv_lo,
        )
        for run in runs
    ]
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return q_bhtc  # no heads: an empty tensor that still hangs on the parameters
    return torch.cat(parts, dim=1)
