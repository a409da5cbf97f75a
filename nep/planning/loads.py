"""How busy each expert is: what the router did in past steps, as the planner takes it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLoads:
    """Load of each expert in each layer. The arrays are read-only copies.

    Attributes:
        mean: float64 ``[layers, experts]``, tokens per step and expert on any positive scale; zeros allowed.
        variance: float64 ``[layers, experts]``, between steps, on the square of that scale; None if unknown.
        num_steps: how many steps the statistics are of; 0 if they were not measured.
    """

    mean: NDArray[np.float64]
    variance: NDArray[np.float64] | None = None
    num_steps: int = 0

    def __post_init__(self) -> None:
        errors: list[str] = []
        mean = np.array(self.mean, dtype=np.float64)
        variance = None if self.variance is None else np.array(self.variance, dtype=np.float64)
        if mean.ndim != 2 or 0 in mean.shape:
            errors.append(f"mean has shape {mean.shape}; it must be [layers, experts], neither of them 0")
        errors += _problems("mean", mean)
        if variance is not None:
            if variance.shape != mean.shape:
                errors.append(f"variance has shape {variance.shape} and mean {mean.shape}; make them equal")
            errors += _problems("variance", variance)
        if self.num_steps < 0:
            errors.append(f"num_steps ({self.num_steps}) must be at least 0; 0 means not measured")
        if errors:
            raise ValueError("expert loads: " + "; ".join(errors))
        for name, array in (("mean", mean), ("variance", variance)):
            if array is not None:
                array.setflags(write=False)
            object.__setattr__(self, name, array)

    @classmethod
    def from_counts(cls, counts: ArrayLike) -> "ExpertLoads":
        """Mean and variance of counted tokens.

        Args:
            counts: ``[steps, layers, experts]``, tokens that the router sent to each expert in each step.

        Raises:
            ValueError: if the array has another rank or no step, or has negative or non-finite entries.
        """
        array = np.asarray(counts, dtype=np.float64)
        if array.ndim != 3 or array.shape[0] == 0:
            raise ValueError(
                f"counts have shape {array.shape}; they must be [steps, layers, experts], one step or more"
            )
        problems = _problems("counts", array)
        if problems:
            raise ValueError("; ".join(problems))
        steps = array.shape[0]
        variance = array.var(axis=0, ddof=1) if steps > 1 else None
        return cls(mean=array.mean(axis=0), variance=variance, num_steps=steps)

    @classmethod
    def uniform(cls, num_layers: int, num_experts: int) -> "ExpertLoads":
        """Equal loads: what to assume while nothing was measured."""
        return cls(mean=np.ones((num_layers, num_experts)))

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return int(self.mean.shape[0])

    @property
    def num_experts(self) -> int:
        """Experts of each layer."""
        return int(self.mean.shape[1])

    def of_layers(self, layers: Sequence[int] | NDArray[np.int64]) -> "ExpertLoads":
        """Those of some layers."""
        variance = None if self.variance is None else self.variance[layers]
        return ExpertLoads(mean=self.mean[layers], variance=variance, num_steps=self.num_steps)

    def normalised(self) -> "ExpertLoads":
        """The same loads as shares: the mean of every layer sums to 1.

        Of a layer without any load nothing is known, so its experts count as equally busy.
        """
        # Division by the largest first: sums of huge or denormal loads would overflow or lose their digits.
        largest = self.mean.max(axis=1, keepdims=True)
        known = largest > 0
        scaled = np.where(known, self.mean / np.where(known, largest, 1.0), 1.0)
        sums = scaled.sum(axis=1, keepdims=True)
        variance = None
        if self.variance is not None:
            scale = np.where(known, np.where(known, largest, 1.0) * sums, 1.0)
            variance = np.where(known, self.variance / scale / scale, 0.0)
        return ExpertLoads(mean=scaled / sums, variance=variance, num_steps=self.num_steps)


def _problems(name: str, array: NDArray[np.float64]) -> list[str]:
    """What is wrong with entries that must be numbers of tokens."""
    wrong = ~np.isfinite(array) | (array < 0)
    if not wrong.any():
        return []
    where = [int(position) for position in np.argwhere(wrong)[0]]
    return [f"{name}{where} ({array[tuple(where)]}) must be finite and at least 0; check the statistics"]
