"""Implementations of the expert computation, by name."""

from nep.moe.backends.base import ExpertsBackend
from nep.moe.backends.loop import loop_experts

__all__ = ["BACKENDS", "ExpertsBackend", "get_backend"]

BACKENDS: dict[str, ExpertsBackend] = {"loop": loop_experts}


def get_backend(name: str) -> ExpertsBackend:
    """The backend of this name.

    Raises:
        ValueError: There is none.
    """
    if name not in BACKENDS:
        raise ValueError(f"moe_backend ({name!r}) is not known; choose one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
