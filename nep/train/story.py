"""What a trainer that comes back is told of the job so far, beside its tensors."""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass, field
from typing import Any

import torch

from nep.fault_tolerance.corruption import Corruption
from nep.fault_tolerance.history import Committed, History
from nep.fault_tolerance.timeline import Recovery

SCHEMA = 1
_LENGTH = struct.Struct("<Q")

Generations = list[tuple[int, int, tuple[int, ...], str]]


@dataclass(kw_only=True)
class Story:
    """All that a report at the end needs of the time before.

    Attributes:
        history: committed steps.
        generations: number, step, slots, reason.
        recoveries: those that have ended.
        recovery: the one in progress.
        validation_losses: so far.
        full_size_s: see `nep.train.trainer.Trainer`.
        short_since: when the job last lost a slot, if it is not complete again; seconds since the epoch.
        resumed_step: that of the checkpoint which the job began with, or 0.
        stopping: the job ends after the last committed step.
        first_plan: canonical JSON.
        adjustments: changes of plan that the job made by itself, see `nep.train.adjustments`.
    """

    history: History
    generations: Generations = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    recovery: Recovery | None = None
    validation_losses: list[float] = field(default_factory=list)
    full_size_s: list[float] = field(default_factory=list)
    short_since: float | None = None
    resumed_step: int = 0
    stopping: bool = False
    first_plan: str = ""
    adjustments: list[dict[str, Any]] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """Length of the JSON, the JSON, the counts. Floats are exact: Python writes them so that they read back."""
        counts = self.history.counts_le
        text = json.dumps(
            {
                "schema": SCHEMA,
                "steps": [list(dataclasses.astuple(step)) for step in self.history.steps],
                "num_updates": self.history.num_updates,
                "corruptions": [one.to_json() for one in self.history.corruptions],
                "counts": [len(counts), *counts[0].shape] if counts else [],
                "generations": self.generations,
                "recoveries": [dataclasses.asdict(recovery) for recovery in self.recoveries],
                "recovery": None if self.recovery is None else dataclasses.asdict(self.recovery),
                "validation_losses": self.validation_losses,
                "full_size_s": self.full_size_s,
                "short_since": self.short_since,
                "resumed_step": self.resumed_step,
                "stopping": self.stopping,
                "first_plan": self.first_plan,
                "adjustments": self.adjustments,
            }
        ).encode()
        stacked = torch.stack(counts).numpy().tobytes() if counts else b""
        return _LENGTH.pack(len(text)) + text + stacked

    @classmethod
    def from_bytes(cls, blob: bytes) -> Story:
        """Reads what `to_bytes` wrote.

        Raises:
            ValueError: another format.
        """
        (length,) = _LENGTH.unpack_from(blob)
        value: dict[str, Any] = json.loads(blob[_LENGTH.size : _LENGTH.size + length])
        if value["schema"] != SCHEMA:
            raise ValueError(f"story of schema {value['schema']} must be of {SCHEMA}; run one release on all slots")
        names = [item.name for item in dataclasses.fields(Committed)]
        steps = [Committed(**dict(zip(names, step, strict=True))) for step in value["steps"]]
        counts: list[torch.Tensor] = []
        if value["counts"]:
            flat = torch.frombuffer(bytearray(blob[_LENGTH.size + length :]), dtype=torch.int64)
            counts = list(flat.view(value["counts"]).unbind(0))
        return cls(
            history=History(
                steps=steps,
                counts_le=counts,
                num_updates=value["num_updates"],
                corruptions=[Corruption.from_json(one) for one in value["corruptions"]],
                resumed=value["resumed_step"] > 0,
            ),
            generations=[(number, step, tuple(slots), why) for number, step, slots, why in value["generations"]],
            recoveries=[_recovery(one) for one in value["recoveries"]],
            recovery=None if value["recovery"] is None else _recovery(value["recovery"]),
            validation_losses=value["validation_losses"],
            full_size_s=value["full_size_s"],
            short_since=value["short_since"],
            resumed_step=value["resumed_step"],
            stopping=value["stopping"],
            first_plan=value["first_plan"],
            adjustments=value["adjustments"],
        )


def _recovery(value: dict[str, Any]) -> Recovery:
    return Recovery(**{**value, **{name: tuple(value[name]) for name in ("failed_slots", "reasons")}})
