"""What a checkpoint is of: model, data and optimizer, as far as going on with others would be another training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nep.checkpoint.logical import logical_shape
from nep.planning.layout import Line, LineKind, Lines
from nep.planning.shapes import ModelShape

# How a model is called and cut changes no number.
_FREE_FIELDS = ("name", "neuron_block")
_REMEDIES = {
    "data_digest": "give the same text with --data",
    "seed": "give the same --seed",
    "seq_len": "give the same --seq-len",
    "global_batch_size": "give the same --global-batch-size",
    "kinds": "give the same --optimizer",
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What must be the same for training to go on.

    Attributes:
        model: fields of its shape; None if the model does not say.
        lines: its parameters.
        kinds: tensors of each parameter: `master`, then the optimizer's moments.
        data_digest, seed, seq_len: of the samples; the seed is that of initial values too.
        global_batch_size: sequences of a step; with the step it is the data cursor.
    """

    model: Mapping[str, Any] | None
    lines: Lines
    kinds: tuple[str, ...]
    data_digest: str
    seed: int
    seq_len: int
    global_batch_size: int

    @classmethod
    def of(cls, shape: ModelShape | None, **values: Any) -> Subject:
        return cls(model=None if shape is None else asdict(shape), **values)

    def differences(self, other: Subject) -> list[str]:
        """Why `self`, which somebody wants to go on with, is not what the checkpoint `other` is of."""
        found = self._model_differences(other)
        for name, remedy in _REMEDIES.items():
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                found.append(f"{name} ({_short(here)}) is not the checkpoint's ({_short(there)}); {remedy}")
        return found

    def _model_differences(self, other: Subject) -> list[str]:
        remedy = "give the same --model, or another --checkpoint-dir"
        if self.model is not None and other.model is not None:
            names = [name for name in self.model if name not in _FREE_FIELDS]
            # A field that an older version did not know is compared by its effect on the parameters only.
            unlike = [name for name in names if name in other.model and self.model[name] != other.model[name]]
            if unlike:
                values = ", ".join(f"{n} ({self.model[n]}) is not the checkpoint's ({other.model[n]})" for n in unlike)
                return [f"model: {values}; {remedy}"]
        here = {name: logical_shape(name, line) for name, line in self.lines.items()}
        there = {name: logical_shape(name, line) for name, line in other.lines.items()}
        for name in sorted({*here, *there}):
            if here.get(name) != there.get(name):
                mine, its = here.get(name, "(there is none)"), there.get(name, "(there is none)")
                return [f"model: {name} {mine} is not the checkpoint's {its}; {remedy}"]
        return []

    def to_json(self) -> dict[str, Any]:
        value = {name: getattr(self, name) for name in ("model", *_REMEDIES)}
        value["lines"] = {
            name: {
                "axis": line.axis,
                "kind": line.kind.value,
                "layer": line.layer,
                "num_units": line.num_units,
                "unit_shape": line.unit_shape,
                "units_per_expert": line.units_per_expert,
            }
            for name, line in self.lines.items()
        }
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Subject:
        """Reads what `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        lines = {
            name: Line(
                kind=LineKind(line["kind"]),
                num_units=line["num_units"],
                unit_shape=tuple(line["unit_shape"]),
                axis=line["axis"],
                layer=line["layer"],
                units_per_expert=line["units_per_expert"],
            )
            for name, line in value["lines"].items()
        }
        rest = {name: value[name] for name in ("model", *_REMEDIES)}
        return cls(lines=lines, **{**rest, "kinds": tuple(rest["kinds"])})


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else str(value)
