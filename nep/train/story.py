"""What a trainer that comes back is told of the job so far, beside its tensors."""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from nep.fault_tolerance.corruption import Corruption
from nep.fault_tolerance.history import Committed, History
from nep.fault_tolerance.timeline import Recovery
from nep.train.protection import Protection

SCHEMA = 2
_LENGTH = struct.Struct("<Q")
# A committed step, field by field. All members wait while the story is told, and as JSON a million steps take 10 s.
_STEP = struct.Struct("<qdqqQd?q")
_STEP_FIELDS = tuple(item.name for item in dataclasses.fields(Committed))
_values = attrgetter(*_STEP_FIELDS)

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
        protection: see there.
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
    protection: Protection = field(default_factory=Protection)
    resumed_step: int = 0
    stopping: bool = False
    first_plan: str = ""
    adjustments: list[dict[str, Any]] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        """Length of the JSON, the JSON, the steps, the counts. Floats are exact, also in JSON: they read back."""
        counts = self.history.counts_le
        text = json.dumps(
            {
                "schema": SCHEMA,
                "num_steps": len(self.history.steps),
                "num_updates": self.history.num_updates,
                "corruptions": [one.to_json() for one in self.history.corruptions],
                "counts": [len(counts), *counts[0].shape] if counts else [],
                "generations": self.generations,
                "recoveries": [dataclasses.asdict(recovery) for recovery in self.recoveries],
                "recovery": None if self.recovery is None else dataclasses.asdict(self.recovery),
                "validation_losses": self.validation_losses,
                "full_size_s": self.full_size_s,
                "short_since": self.short_since,
                "protection": dataclasses.asdict(self.protection),
                "resumed_step": self.resumed_step,
                "stopping": self.stopping,
                "first_plan": self.first_plan,
                "adjustments": self.adjustments,
            }
        ).encode()
        steps = b"".join(_STEP.pack(*_values(step)) for step in self.history.steps)
        stacked = torch.stack(counts).numpy().tobytes() if counts else b""
        return _LENGTH.pack(len(text)) + text + steps + stacked

    @classmethod
    def from_bytes(cls, blob: bytes) -> Story:
        """Reads what `to_bytes` wrote.

        Raises:
            ValueError: another format.
        """
        (length,) = _LENGTH.unpack_from(blob)
        text_end = _LENGTH.size + length
        value: dict[str, Any] = json.loads(blob[_LENGTH.size : text_end])
        if value["schema"] != SCHEMA:
            raise ValueError(f"story of schema {value['schema']} must be of {SCHEMA}; run one release on all slots")
        steps_end = text_end + value["num_steps"] * _STEP.size
        rows = _STEP.iter_unpack(memoryview(blob)[text_end:steps_end])
        steps = [Committed(**dict(zip(_STEP_FIELDS, row, strict=True))) for row in rows]
        counts: list[torch.Tensor] = []
        if value["counts"]:
            flat = torch.frombuffer(bytearray(blob[steps_end:]), dtype=torch.int64)
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
            protection=Protection(**value["protection"]),
            resumed_step=value["resumed_step"],
            stopping=value["stopping"],
            first_plan=value["first_plan"],
            adjustments=value["adjustments"],
        )


def _recovery(value: dict[str, Any]) -> Recovery:
    return Recovery(**{**value, **{name: tuple(value[name]) for name in ("failed_slots", "reasons")}})
