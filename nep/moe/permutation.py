"""Grouping (row, choice) assignments by expert and moving rows into that order and back.

Shapes: r rows, k choices of a row, a assignments in expert order, d hidden size, e experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Permutation:
    """Assignments to a list of experts, grouped by expert in the list's order.

    Attributes:
        assignment_ids_a: Position of each assignment in the flattened [r, k] choices.
        row_ids_a: Row of each assignment.
        offsets: `offsets[i]:offsets[i + 1]` are the assignments of the i-th expert of the list.
    """

    assignment_ids_a: Tensor
    row_ids_a: Tensor
    offsets: tuple[int, ...]


def sort_assignments(expert_ids_rk: Tensor, experts: Sequence[int], num_experts: int) -> Permutation:
    """Sorts assignments by expert, once; assignments to experts that are not in the list are left out.

    Rows of one expert stay in ascending order, so that sums over them do not depend on the sort. The counts
    go to the host, which on an accelerator waits for the routing.

    Args:
        expert_ids_rk: Global expert ids, int64; -1 stands for no expert.
        experts: Distinct global expert ids to group by.
        num_experts: Experts of the layer.
    """
    num_listed = len(experts)
    positions = [num_listed] * (num_experts + 1)  # the last one is reached by id -1
    for position, expert in enumerate(experts):
        positions[expert] = position
    expert_ids = expert_ids_rk.flatten()
    position_of_expert = torch.tensor(positions, device=expert_ids.device)
    keys = position_of_expert[expert_ids]
    order = keys.argsort(stable=True)
    counts = num_tokens_per_expert(keys, num_listed + 1).tolist()
    offsets = [0]
    for count in counts[:num_listed]:
        offsets.append(offsets[-1] + count)
    assignment_ids = order[: offsets[-1]]
    row_ids = assignment_ids.div(max(expert_ids_rk.size(1), 1), rounding_mode="floor")
    return Permutation(assignment_ids_a=assignment_ids, row_ids_a=row_ids, offsets=tuple(offsets))


def num_tokens_per_expert(expert_ids: Tensor, num_experts: int) -> Tensor:
    """How many assignments each expert got, int64 [e]; ids must lie in 0..e-1."""
    expert_ids = expert_ids.flatten()
    # bincount would wait for the accelerator to learn the largest id
    counts_e = torch.zeros(num_experts, dtype=torch.int64, device=expert_ids.device)
    return counts_e.scatter_add_(0, expert_ids, torch.ones_like(expert_ids))


def permute_tokens(rows_rd: Tensor, row_ids_a: Tensor) -> Tensor:
    """Copies rows into expert order.

    Returns:
        rows_ad
    """
    return rows_rd.index_select(0, row_ids_a)


def unpermute_tokens(out_rd: Tensor, rows_ad: Tensor, row_ids_a: Tensor) -> Tensor:
    """Adds rows in expert order to the rows they came from, in place, and returns `out_rd`."""
    return out_rd.index_add_(0, row_ids_a, rows_ad)
