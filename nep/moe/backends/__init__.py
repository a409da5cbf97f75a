"""Implementations of the expert computation, by name."""

import torch

from nep.moe.backends import grouped_mm, loop, megablocks, transformer_engine
from nep.moe.backends.base import Backend, ExpertsBackend, Setting, refuse

__all__ = ["BACKENDS", "ExpertsBackend", "choose_backend", "get_backend"]

BACKENDS: dict[str, Backend] = {
    "loop": loop.BACKEND,
    "grouped_mm": grouped_mm.BACKEND,
    "megablocks": megablocks.BACKEND,
    "transformer_engine": transformer_engine.BACKEND,
    "transformer_engine_fp8": transformer_engine.FP8_BACKEND,
}

# What `auto` takes: the first that can run. Eight bits are never taken unasked: they change the numbers.
AUTO = ("grouped_mm", "megablocks", "transformer_engine", "loop")


def get_backend(name: str) -> ExpertsBackend:
    """The backend of this name, with its package imported.

    Raises:
        ValueError: There is none, or its package cannot be imported.
    """
    backend = _find(name)
    backend.load()
    return backend.run


def choose_backend(
    name: str, dtype: torch.dtype, *, hidden_size: int, neuron_block: int, device: torch.device | str = "cpu"
) -> tuple[str, str]:
    """Settle `auto`, and refuse what cannot run. Imports no package and touches no device.

    Args:
        name: of a backend, or `auto`.
        dtype: of rows and weights.
        hidden_size, neuron_block: of the model.
        device: that the model is on.

    Returns:
        The backend's name, and why.

    Raises:
        ValueError: there is no such backend, or it cannot run this model here; a missing or unsuitable package
            comes with the line that installs it.
    """
    setting = Setting(
        dtype=dtype, device_type=torch.device(device).type, hidden_size=hidden_size, neuron_block=neuron_block
    )
    if name != "auto":
        refuse(name, _find(name).problem(setting))
        return name, "as asked"
    passed_over = []
    for candidate in AUTO:
        problem = BACKENDS[candidate].problem(setting)
        if problem is None:
            return candidate, "; ".join([BACKENDS[candidate].why, *passed_over])
        passed_over.append(f"not {candidate}: {problem.what}")
    raise AssertionError("the loop runs everything")


def _find(name: str) -> Backend:
    if name not in BACKENDS:
        raise ValueError(f"moe_backend ({name!r}) is not known; choose one of auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]
