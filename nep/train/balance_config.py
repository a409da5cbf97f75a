"""What a job does about slow slots and busy experts while it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nep.planning.cost.hardware import HardwareProfile, Link
from nep.planning.pace import PaceConfig
from nep.train.power_config import PowerConfig

HOST = HardwareProfile(
    name="host, assumed",
    flops_per_s={2: 1e10, 4: 2e10, 8: 1e10},
    memory_bytes_per_s=5e9,
    launch_s=2e-5,
    scale_up=Link(bytes_per_s=1e9, latency_s=2e-4),
    network=Link(bytes_per_s=1e9, latency_s=2e-4),
)
"""Where no profile is given: its computing is scaled to what the job itself measures, its links are a guess."""


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """Compensation of slow slots and rebalancing of experts.

    Attributes:
        compensate: `auto` acts on slots that are found to be slow; `off` measures and does nothing.
        rebalance_every: steps from one look at the router's loads to the next, and once after each failure; 0: never.
        hardware: what predictions go by; None: `HOST`, scaled to the compute seconds that the job measures.
        bytes_per_boundary: that a slot may receive between two steps; a layer that is larger still moves whole. None:
            everything at once.
        least_gain: part of a step that a change must be predicted to gain, beside paying for its transfer.
        horizon_steps: within which a transfer must pay, or until the end of the job if that is nearer.
        cooldown_steps: after a change, before the next one is thought of.
        measured_steps: over which the gain is measured.
        half_life_steps: of the moving averages of the router's loads.
        bias_to_speed: router biases aim at loads by the speed of the slots that hold an expert, instead of even ones.
            This changes the model.
        router_stats_out: file for mean, variance and moving average of the loads (NPZ, read by `nep plan --loads`).
        pace: how soon a slot is taken for a slow one.
        patience_s: the next step waits at most so long for the planner, which goes on beside the steps then.
        power: what is done with power limits.
    """

    compensate: Literal["off", "auto"] = "off"
    rebalance_every: int = 0
    hardware: HardwareProfile | None = field(default=None, repr=False)
    bytes_per_boundary: int | None = 256 << 20
    least_gain: float = 0.02
    horizon_steps: int = 1000
    cooldown_steps: int = 8
    measured_steps: int = 8
    half_life_steps: float = 16.0
    bias_to_speed: bool = False
    router_stats_out: Path | None = field(default=None, repr=False)  # each node may have its own
    pace: PaceConfig = field(default_factory=PaceConfig)
    patience_s: float = 1.0
    power: PowerConfig = field(default_factory=PowerConfig)

    @property
    def acts(self) -> bool:
        """Whether the job may change its plan by itself."""
        return self.compensate != "off" or self.rebalance_every > 0

    def problems(self, router_bias_rate: float) -> list[str]:
        """Everything that is wrong with it.

        Args:
            router_bias_rate: of the job.
        """
        problems = []
        if self.rebalance_every < 0:
            problems.append(f"rebalance_every ({self.rebalance_every}) must be at least 0; 0 never rebalances")
        if self.bytes_per_boundary is not None and self.bytes_per_boundary < 1:
            problems.append(
                f"bytes_per_boundary ({self.bytes_per_boundary}) must be at least 1; give --rebalance-mib 1 or more"
            )
        if not 0 <= self.least_gain < math.inf:
            problems.append(f"least_gain ({self.least_gain}) must be finite and at least 0")
        problems += [
            f"{name} ({getattr(self, name)}) must be at least 1"
            for name in ("horizon_steps", "cooldown_steps", "measured_steps")
            if getattr(self, name) < 1
        ]
        if not self.half_life_steps > 0:
            problems.append(f"half_life_steps ({self.half_life_steps}) must be above 0")
        if self.bias_to_speed and not router_bias_rate:
            problems.append("bias_to_speed (True) moves router biases; give --router-bias-rate how fast")
        if not 0 <= self.patience_s < math.inf:
            problems.append(f"patience_s ({self.patience_s}) must be finite and at least 0")
        return problems + self.power.problems(self.compensate)
