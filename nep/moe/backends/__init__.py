"""Implementations of the expert computation, by name."""

import torch

from nep.moe.backends.base import ExpertsBackend
from nep.moe.backends.grouped_mm import grouped_mm_experts, grouped_mm_problem
from nep.moe.backends.loop import loop_experts

__all__ = ["BACKENDS", "ExpertsBackend", "choose_backend", "get_backend"]

BACKENDS: dict[str, ExpertsBackend] = {"loop": loop_experts, "grouped_mm": grouped_mm_experts}


def get_backend(name: str) -> ExpertsBackend:
    """The backend of this name.

    Raises:
        ValueError: There is none.
    """
    if name not in BACKENDS:
        raise ValueError(f"moe_backend ({name!r}) is not known; choose one of auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]


def choose_backend(name: str, dtype: torch.dtype, *, hidden_size: int, neuron_block: int) -> tuple[str, str]:
    """Settle `auto`, and refuse what cannot run.

    Args:
        name: of a backend, or `auto`.
        dtype: of rows and weights.
        hidden_size, neuron_block: of the model.

    Returns:
        The backend's name, and why.

    Raises:
        ValueError: there is no such backend, or it cannot run this model.
    """
    problem = grouped_mm_problem(dtype, hidden_size=hidden_size, neuron_block=neuron_block)
    if name == "auto":
        if problem is None:
            return "grouped_mm", "all equally large slices run in one call"
        return "loop", problem
    get_backend(name)
    if name == "grouped_mm" and problem is not None:
        raise ValueError(f"moe_backend 'grouped_mm': {problem}; use 'loop' or 'auto'")
    return name, "as asked"
