"""What the router does, step by step: loads of experts as the planner and people want to know them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nep.planning.loads import ExpertLoads

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Imbalance:
    """How unevenly the experts of each layer are loaded.

    Attributes:
        by_layer: [layers], the busiest expert's tokens over the mean; 1 is even.
    """

    by_layer: tuple[float, ...]

    def __str__(self) -> str:
        worst = max(range(len(self.by_layer)), key=lambda layer: self.by_layer[layer])
        mean = sum(self.by_layer) / len(self.by_layer)
        return f"busiest expert {mean:.2f} times the mean, {self.by_layer[worst]:.2f} in MoE layer {worst}"


class RouterStatistics:
    """Mean, variance and moving averages of the tokens per layer and expert of committed steps.

    Args:
        half_life_steps: a step counts half as much after so many more, in the moving averages.
    """

    def __init__(self, half_life_steps: float = 16.0) -> None:
        if not half_life_steps > 0:
            raise ValueError(f"half_life_steps ({half_life_steps}) must be above 0")
        self.num_steps = 0
        self._keep = 0.5 ** (1 / half_life_steps)
        self._weight = 0.0
        self._mean = self._squares = self._ema = self._ema_squares = np.zeros((0, 0))

    def update(self, counts: ArrayLike) -> None:
        """One committed step.

        Args:
            counts: [layers, experts], tokens over all slots.

        Raises:
            ValueError: of another size than before.
        """
        tokens = np.asarray(counts, dtype=np.float64)
        if self.num_steps == 0:
            self._mean = self._squares = self._ema = self._ema_squares = np.zeros_like(tokens)
        if tokens.ndim != 2 or tokens.shape != self._mean.shape:
            raise ValueError(f"counts have shape {tokens.shape}; they must be {self._mean.shape} [layers, experts]")
        self.num_steps += 1
        # Welford's update (Technometrics 4, 1962); the moving averages are corrected for their short past.
        off = tokens - self._mean
        self._mean = self._mean + off / self.num_steps
        self._squares = self._squares + off * (tokens - self._mean)
        self._weight = self._keep * self._weight + 1 - self._keep
        self._ema = self._keep * self._ema + (1 - self._keep) * tokens
        self._ema_squares = self._keep * self._ema_squares + (1 - self._keep) * tokens**2

    @property
    def mean(self) -> Floats:
        """[layers, experts], over all steps."""
        return self._mean

    @property
    def variance(self) -> Floats:
        """[layers, experts], between steps; 0 of a single one."""
        return self._squares / max(1, self.num_steps - 1)

    @property
    def ema(self) -> Floats:
        """[layers, experts], moving average of the last steps.

        Raises:
            ValueError: there was no step.
        """
        self._require_steps()
        return self._ema / self._weight

    @property
    def ema_variance(self) -> Floats:
        """[layers, experts], of the same steps."""
        self._require_steps()
        return np.maximum(self._ema_squares / self._weight - self.ema**2, 0.0)

    def loads(self) -> ExpertLoads:
        """The last steps, as the planner takes them.

        Raises:
            ValueError: there was no step.
        """
        return ExpertLoads(mean=self.ema, variance=self.ema_variance, num_steps=self.num_steps)

    def imbalance(self) -> Imbalance:
        """Of the last steps."""
        loads = self.ema
        means = np.maximum(loads.mean(axis=1), 1e-30)
        return Imbalance(by_layer=tuple((loads.max(axis=1) / means).tolist()))

    def _require_steps(self) -> None:
        if self.num_steps == 0:
            raise ValueError("the router's statistics (of 0 steps) need one step or more")
