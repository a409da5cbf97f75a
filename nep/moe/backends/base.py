"""What a backend of the experts must do, and what is known about one before it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nep.moe.slices import ExpertSlice


class ExpertsBackend(Protocol):
    """Weighted sum over local slices, differentiable in rows, weights, w13 and w2.

    All backends sum over slices in the dtype of `weights_rk` and return the rows' dtype; are one autograd
    node that gives each parameter one whole gradient; drop no token, for then the result would depend on the
    layout; and give (zero) gradients for everything even without rows or slices.
    """

    def __call__(
        self,
        rows_rd: Tensor,
        expert_ids_rk: Tensor,
        weights_rk: Tensor,
        w13: Tensor,
        w2: Tensor,
        *,
        slices: tuple[ExpertSlice, ...],
        num_experts: int,
    ) -> Tensor:
        """Computes y_rd.

        Args:
            rows_rd: Rows.
            expert_ids_rk: Global expert ids, int64; ids without a slice, and -1, contribute nothing.
            weights_rk: Weight of each of the row's experts.
            w13: [n, 2, b, d], gate then up.
            w2: [n, b, d].
            slices: A partition of the n units.
            num_experts: Experts of the layer.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and on what a backend would run.

    Attributes:
        dtype: Of rows and weights.
        device_type: `cpu` or `cuda`.
        hidden_size: Of the model.
        neuron_block: Neurons of a unit; every slice has a multiple of it.
    """

    dtype: torch.dtype
    device_type: str
    hidden_size: int
    neuron_block: int


class Problem(NamedTuple):
    """Why a backend cannot run.

    Attributes:
        what: For a list of reasons.
        remedy: What to do, where choosing another backend is not the only answer.
    """

    what: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """An implementation with what is known about it before anything starts.

    Attributes:
        run: The computation.
        problem: Why it cannot run in a setting; imports nothing, since processes that will be forked ask too.
        load: Imports what it needs; a ValueError says how to install it.
        why: What speaks for it, when `auto` picks it.
    """

    run: ExpertsBackend
    problem: Callable[[Setting], Problem | None]
    load: Callable[[], object]
    why: str


def size_problem(setting: Setting, *, multiple: int, why: str) -> Problem | None:
    """A dimension that is not a multiple of `multiple`, if there is one.

    Args:
        setting: every dimension that is multiplied is a multiple of its hidden_size or neuron_block.
        multiple: of elements.
        why: ends the sentence.
    """
    for name, size in (("hidden_size", setting.hidden_size), ("neuron_block", setting.neuron_block)):
        if size % multiple:
            return Problem(f"{name} ({size}) is not a multiple of {multiple}, as {why}")
    return None


def setting_of(w13: Tensor) -> Setting:
    """The setting that weights [n, 2, b, d] stand for."""
    return Setting(dtype=w13.dtype, device_type=w13.device.type, hidden_size=w13.size(3), neuron_block=w13.size(2))


def refuse(name: str, problem: Problem | None) -> None:
    """Raise what stands against a backend.

    Raises:
        ValueError: there is a problem.
    """
    if problem is not None:
        remedy = f", or {problem.remedy}" if problem.remedy else ""
        raise ValueError(f"moe_backend {name!r}: {problem.what}; use 'loop' or 'auto'{remedy}")
